"""One thread per test process: workers that run side by side would otherwise wait for each other's spinning threads."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
torch.set_num_threads(1)

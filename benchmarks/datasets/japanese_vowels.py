"""JapaneseVowels: 640 utterances of 12 cepstral channels and 7 to 29 frames, nine speakers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_utils.instance import Instance
from benchopt import BaseDataset

from convexformer.experiments.probes.series import carried_folder, read_ts

FOLDER_VARIABLE = "JAPANESE_VOWELS_FOLDER"
FILE = "JapaneseVowels_TRAIN.ts"
MAX_FRAMES = 29


class Dataset(BaseDataset):
    """The 270 training sequences as tokens, zero-padded to 29 frames, with the softmax loss.

    From a folder with ``JapaneseVowels_TRAIN.ts`` named by the variable ``JAPANESE_VOWELS_FOLDER``, else from the
    package ``aeon``, which carries the file.
    """

    name = "JapaneseVowels"

    def get_data(self) -> dict[str, Any]:
        sequences, labels = read_ts(find_file())
        X = np.zeros((len(sequences), MAX_FRAMES, sequences[0].shape[1]))
        for row, frames in zip(X, sequences, strict=True):
            row[: len(frames)] = frames
        classes, codes = np.unique(labels, return_inverse=True)
        return {"instance": Instance(X, None, np.eye(len(classes))[codes], "softmax")}


def find_file() -> Path:
    """Path of the training file; ``FileNotFoundError`` says where it was looked for."""
    folder = os.environ.get(FOLDER_VARIABLE)
    with suppress(ModuleNotFoundError):
        path = (Path(folder) if folder else carried_folder() / "JapaneseVowels") / FILE
        if path.exists():
            return path
    raise FileNotFoundError(
        f"{FILE} not found: set {FOLDER_VARIABLE} to a folder that holds it, or pip install aeon, which carries it"
    )

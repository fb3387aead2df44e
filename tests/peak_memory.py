"""The largest memory that a process of its own holds while a fit runs."""

import ctypes
import re
import threading
from pathlib import Path


class PeakMemory(threading.Thread):
    """Bytes that this process holds beyond its start, pages of files left out, while the context lasts."""

    def __init__(self):
        super().__init__(daemon=True)
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):  # of glibc, which otherwise keeps freed blocks of up to 32 MiB
            library.mallopt(-3, 2**20)
        library.prctl(41, 1, 0, 0, 0)  # no huge pages, which are resident as a whole where a part is used
        self.done, self.before, self.peak = threading.Event(), 0, 0

    def held(self):
        return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))

    def run(self):
        while not self.done.wait(0.001):
            self.peak = max(self.peak, self.held())

    def __enter__(self):
        self.before = self.held()
        self.start()
        return self

    def __exit__(self, *error):
        self.done.set()
        self.join()
        self.peak -= self.before

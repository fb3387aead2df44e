"""The tests under each instruction set that the processor offers: ``python tests/instruction_sets.py``.

BLAS libraries and torch choose their kernels by the processor, and sums in another order have other last digits. A test
that holds under one set alone is a defect. Three environment variables ask for the kernels of another processor:
``OPENBLAS_CORETYPE`` (numpy, scipy), ``ATEN_CPU_CAPABILITY`` and ``MKL_ENABLE_INSTRUCTIONS`` (torch).
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What each value asks of the processor, from the weakest on.
OPENBLAS = {"Nehalem": "sse4_2", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}
ATEN = {"default": "sse2", "avx2": "avx2", "avx512": "avx512f"}
MKL = {"SSE4_2": "sse4_2", "AVX2": "avx2", "AVX512": "avx512f"}
VARIABLES = {"OPENBLAS_CORETYPE": OPENBLAS, "ATEN_CPU_CAPABILITY": ATEN, "MKL_ENABLE_INSTRUCTIONS": MKL}


def processor_flags() -> set[str]:
    """Instruction sets of this processor, by their names in ``/proc/cpuinfo``; none elsewhere than on x86 Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


def offered(flags: set[str]) -> dict[str, list[str]]:
    """The values of each variable that the processor can run, from the weakest on."""
    return {name: [value for value, flag in values.items() if flag in flags] for name, values in VARIABLES.items()}


def chosen(values: dict[str, list[str]], which: str) -> list[dict[str, str]]:
    """Environments to test under: the weakest, the strongest, both, each value once, or all combinations."""
    weakest, strongest = ({name: some[end] for name, some in values.items() if some} for end in (0, -1))
    ends = {"weakest": [weakest], "strongest": [strongest], "extremes": [weakest, strongest]}
    if which in ends:
        result = ends[which]
    elif which == "each":
        others = [{**strongest, name: value} for name, some in values.items() for value in some]
        result = [weakest, *others, strongest]
    else:
        result = [dict(zip(values, some, strict=True)) for some in itertools.product(*values.values())]
    return [one for position, one in enumerate(result) if one not in result[:position]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sets = ["weakest", "strongest", "extremes", "each", "all"]
    parser.add_argument("--which", choices=sets, default="each", help="default: each value once")
    parser.add_argument("--show", action="store_true", help="print the variables, and run nothing")
    options, arguments = parser.parse_known_args()
    arguments = arguments or ["-n", str(os.cpu_count() or 1), "-q", "tests"]
    environments = [one for one in chosen(offered(processor_flags()), options.which) if one]
    if options.show:
        print("\n".join(" ".join(f"{key}={value}" for key, value in one.items()) for one in environments))
        return 0
    if not environments:
        print("this processor says nothing of its instruction sets: nothing to test")
        return 0
    failed = []
    for environment in environments:
        name, began = " ".join(f"{key}={value}" for key, value in environment.items()), time.perf_counter()
        print(f"+ {name} pytest {' '.join(arguments)}", flush=True)
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
        print(f"  {'failed' if done.returncode else 'passed'} in {time.perf_counter() - began:.0f} s", flush=True)
        failed += [name] * bool(done.returncode)
    print("\n".join(["failed under:", *failed]) if failed else "passed under every instruction set")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

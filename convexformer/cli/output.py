"""What the command line shows."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

GOES_ON = "interrupted; what is finished is in {}, and the same command goes on"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults except None, for which the help has words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def as_lines(report: dict[str, Any]) -> str:
    """A report as text, one entry on each line."""
    width = max(map(len, report))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in report.items())


def as_json(report: dict[str, Any]) -> str:
    """A report as JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(_finite(report), indent=2, allow_nan=False)


def print_text(text: str) -> None:
    """Print a report; what the encoding of the output lacks, as in names of files, is printed by its code."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

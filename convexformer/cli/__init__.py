"""The command line: ``convexformer demo``, ``fit``, ``predict``, ``activations`` and ``reproduce``."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import warnings
from typing import Any, NoReturn

from convexformer import __version__

from . import activations, demo, fit, predict, reproduce
from .inputs import CommandError
from .output import as_json, print_text

__all__ = ["CommandError", "build_parser", "main"]


class _Parser(argparse.ArgumentParser):
    """Names the nearest option of a command where one is unknown."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], re.findall(r"--[\w-]+", self.format_usage()))
            self.error(f"unknown arguments: {' '.join(unknown)}" + (f"; is {near[0]} meant?" if near else ""))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        # All processes that torchrun starts have the same options; RANK alone may be of something else.
        if os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
            self.exit(2)
        super().error(message)


# What messages of the library say, and what stands for it on the command line.
_OPTIONS = {
    r"use ConvexAttentionClassifier": "use --task classification",
    r"use ConvexAttentionRegressor": "use --task regression",
    r"Use device='cpu'": "Use --device cpu",
    r"\w+Path\(('[^']*')\)": r"\1",
    r"(contains NaN)\.\n\w+ does not accept missing values(.|\n)*": r"\1",  # advice of scikit-learn on its estimators
}


def _in_options(message: str) -> str:
    """A message of the library with options in place of estimators and parameters, and paths as they were given.

    Examples
    --------
    >>> _in_options("resume must be None or the path of a folder, got PosixPath('a.txt')")
    "resume must be None or the path of a folder, got 'a.txt'"
    """
    for pattern, option in _OPTIONS.items():
        message = re.sub(pattern, option, message)
    return message


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line.

    Returns
    -------
    argparse.ArgumentParser

    Examples
    --------
    >>> options = build_parser().parse_args(["fit", "data.npz", "--alpha", "cv"])
    >>> options.command, options.file.name, options.alpha, options.model.name
    ('fit', 'data.npz', 'cv', 'model.npz')
    """
    parser = _Parser(prog="convexformer", description="Attention networks trained to a proven global optimum.")
    parser.add_argument("--version", action="version", version=f"convexformer {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="no progress bars and no remarks")
    common.add_argument("--json", action="store_true", help="print JSON instead of text")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, fit, predict, activations, reproduce):
        command.add_command(commands, common)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : list of str, optional
        Default: those of the process.

    Returns
    -------
    int
        0, or 1 after a mistake in the input or where the report cannot be printed, or 130 after an interrupt.

    Raises
    ------
    SystemExit
        If `arguments` are none of the command line, and after ``--help`` and ``--version``.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(40, 4, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data, model = os.path.join(folder, "data.npz"), os.path.join(folder, "model.npz")
    ...     np.savez(data, X=X, y=X[:, 1, 0])
    ...     fitted = main(["fit", data, "--model", model, "--quiet"])
    ...     predicted = main(["predict", data, "--model", model, "--out", os.path.join(folder, "out.npz")])
    task            regression
    ...
    train_score     0.9999...
    model           ...
    predictions     ...
    n               40
    score           0.9999...
    >>> fitted, predicted
    (0, 0)
    """
    options = build_parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():  # puts back how warnings are shown
            warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
            report = options.run(options)
    except (CommandError, ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError) as error:
        print(f"convexformer: {_in_options(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convexformer: interrupted", file=sys.stderr)
        return 130
    text = report.pop("text")
    if text is None:  # another process prints
        return 0
    try:
        print_text(as_json(report) if options.json else text)
    except OSError as error:  # Python must not complain of it at its end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whoever reads a pipe has read enough
            print(f"convexformer: the report cannot be printed: {error}", file=sys.stderr)
            return 1
    return 0

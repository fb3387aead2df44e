"""The command line: ``convexformer demo``, ``fit``, ``predict`` and ``reproduce``."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__

_GOES_ON = "interrupted; what is finished is in {}, and the same command goes on"


class CommandError(Exception):
    """A mistake in what the user asked for; shown without a traceback."""


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {2**32 - 1}, got {value}")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line.

    Returns
    -------
    argparse.ArgumentParser
    """
    parser = argparse.ArgumentParser(
        prog="convexformer", description="Attention networks trained to a proven global optimum."
    )
    parser.add_argument("--version", action="version", version=f"convexformer {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="no progress bars and no remarks")
    common.add_argument("--json", action="store_true", help="print JSON instead of text")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands, common)
    _add_fit(commands, common)
    _add_predict(commands, common)
    _add_reproduce(commands, common)
    return parser


def _add_demo(commands: Any, common: argparse.ArgumentParser) -> None:
    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="certified fits on digits beside Adam (half a minute, no download)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--out", type=Path, default=Path("convexformer-demo"), help="folder for the figures and demo.json"
    )
    demo.add_argument("--seed", type=_seed, default=0, help="seed of the split and of the gates")
    demo.set_defaults(run=_run_demo)


# Parameters of cross-validated estimators: option, type and help.
_CROSS_VALIDATION: dict[str, tuple[str, Any, str]] = {
    "alphas": ("--n-alphas", int, "length of the grid; default: 30"),
    "eps": ("--eps", float, "ratio of its last alpha to the first, alpha_max; default: 0.01"),
    "cv": ("--folds", int, "number of folds; default: 5"),
    "n_jobs": ("--jobs", int, "folds at a time; default: 1"),
}


def _add_fit(commands: Any, common: argparse.ArgumentParser) -> None:
    fit = commands.add_parser(
        "fit",
        parents=[common],
        help="fit arrays X and y of an .npz file and save the model",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    fit.add_argument("file", type=Path, help=".npz with X (samples, tokens[, features]), y and maybe sample_weight")
    fit.add_argument("--model", type=Path, default=Path("model.npz"), help="where to save the model")
    fit.add_argument(
        "--task",
        choices=("auto", "regression", "classification"),
        default="auto",
        help="auto: regression when y holds floats, classification when it holds integers, booleans or text",
    )
    fit.add_argument(
        "--alpha", default="0.01", help="weight of the decay against the mean loss, or 'cv' to cross-validate"
    )
    fit.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="with --alpha cv: folder that keeps what is finished, to go on from",
    )
    for parameter, (option, kind, description) in _CROSS_VALIDATION.items():
        about = {"dest": parameter, "metavar": "N" if kind is int else "RATIO", "default": argparse.SUPPRESS}
        fit.add_argument(option, type=kind, help=f"with --alpha cv: {description}", **about)
    fit.add_argument("--loss", help="loss by name; default: squared, or logistic / softmax for labels")
    fit.add_argument("--penalty", default="group_l2", help="group_l2 or nuclear")
    fit.add_argument("--activation", default="linear", help="linear or gated_relu")
    fit.add_argument("--n-gates", type=int, default=32, help="gates of gated_relu; at most so many are generated")
    fit.add_argument("--gates", default="gaussian", help="gaussian, sparse, fourier, difference or generated")
    fit.add_argument(
        "--solver",
        default="auto",
        help="auto, admm, fista, smoothing_newton, semismooth_newton, column_generation, exact, or a cvxpy solver",
    )
    fit.add_argument("--tol", type=float, default=1e-4, help="bound on the certified relative gap")
    fit.add_argument("--max-iter", type=int, default=10_000, help="iterations at most")
    fit.add_argument("--dtype", help="float32 or float64; default: that of X")
    fit.add_argument("--device", help="cpu or cuda")
    fit.add_argument("--seed", type=_seed, default=0, help="seed of the gates")
    fit.set_defaults(run=_run_fit)


def _add_predict(commands: Any, common: argparse.ArgumentParser) -> None:
    predict = commands.add_parser(
        "predict",
        parents=[common],
        help="predict for array X of an .npz file with a saved model",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    predict.add_argument("file", type=Path, help=".npz with X, and y when a score is wanted")
    predict.add_argument("--model", type=Path, default=Path("model.npz"), help="model saved by fit")
    predict.add_argument(
        "--out", type=Path, default=Path("predictions.npz"), help="where to save predictions (and probabilities)"
    )
    predict.set_defaults(run=_run_predict)


def _add_reproduce(commands: Any, common: argparse.ArgumentParser) -> None:
    reproduce = commands.add_parser("reproduce", help="experiments of the paper, several seeds, with tuned baselines")
    experiments = reproduce.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    _add_student_teacher(experiments, common)
    _add_grokking(experiments, common)


# Options of an experiment that are settings by the same name: type and help. A list stands for one or more.
_STUDENT_TEACHER_SETTINGS: dict[str, tuple[Any, str]] = {
    "model": (str, "teacher: folder or name of an encoder (default: all-MiniLM-L6-v2)"),
    "layer": (int, "layer of the teacher, from 0 (default: 2)"),
    "site": (str, "targets: outputs of the 'attention' sublayer or of the whole 'layer' (default: attention)"),
    "sentences": (str, "text file, 'documentation' or 'glue/mrpc' (default: documentation)"),
    "n_sentences": (int, "sentences that are long enough (default: 2800, small: 300)"),
    "n_tokens": (int, "tokens per sentence (default: 32, small: 10)"),
    "position": (int, "token whose output is the target (default: a quarter of the tokens)"),
    "n_outputs": (int, "principal directions of the targets (default: all outputs, small: 8)"),
    "map_outputs": (int, "the same for the attention maps (default: all outputs, small: 4)"),
    "n_gates": (int, "gates of the gated class (default: 64, small: 8)"),
    "n_steps": (int, "steps of Adam for every combination (default: 3000, small: 100)"),
    "device": (str, "cpu or cuda (default: cpu)"),
}
_GROKKING_SETTINGS: dict[str, tuple[Any, str]] = {
    "moduli": ([int], "moduli p of the tables (default: 97 15, small: 31)"),
    "layers": ([int], "depths L of convex attention (default: 1 2 4, small: 1 2)"),
    "transformer_layers": ([int], "depths L of the transformers (default: 1 2 4, small: 1)"),
    "n_steps": (int, "steps after which a tuned method is given up (default: 10000, small: 500)"),
    "untuned_steps": (int, "the same for the untuned transformer (default: 100000, small: 200)"),
    "tuning_steps": (int, "steps of every pair of learning rate and decay tried (default: 4000, small: 200)"),
    "device": (str, "cpu or cuda (default: cpu)"),
}


def _add_experiment(
    experiments: Any, common: argparse.ArgumentParser, name: str, small: str, settings: dict[str, Any], **texts: str
) -> argparse.ArgumentParser:
    """A command with the options that every experiment has, and those of its settings."""
    command: argparse.ArgumentParser = experiments.add_parser(name, parents=[common], **texts)
    command.add_argument("--small", action="store_true", help=small)
    command.add_argument(
        "--out",
        type=Path,
        default=Path(f"convexformer-{name}"),
        help=f"folder for {name.replace('-', '_')}.json and the figures (default: %(default)s)",
    )
    command.add_argument("--seeds", type=int, default=3, help="number of splits and initial weights (default: 3)")
    for setting, (kind, text) in settings.items():
        several = {"type": kind[0], "nargs": "+"} if isinstance(kind, list) else {"type": kind}
        command.add_argument("--" + setting.replace("_", "-"), help=text, **several)
    return command


def _add_student_teacher(experiments: Any, common: argparse.ArgumentParser) -> None:
    command = _add_experiment(
        experiments,
        common,
        "student-teacher",
        "about two minutes on two cores; else meant for a GPU",
        _STUDENT_TEACHER_SETTINGS,
        help="students of an attention layer of a pretrained encoder (paper, Figs 2 and 3)",
        description="Students of an attention layer of a pretrained encoder: certified convex programs, their networks "
        "under Adam, softmax attention and ridge. A call that was interrupted goes on after its last finished seed.",
    )
    command.add_argument("--cache", type=Path, help="folder for the teacher's activations (default: inside --out)")
    command.set_defaults(run=_run_student_teacher)


def _add_grokking(experiments: Any, common: argparse.ArgumentParser) -> None:
    command = _add_experiment(
        experiments,
        common,
        "grokking",
        "two minutes on two cores; else hours, or a GPU",
        _GROKKING_SETTINGS,
        help="steps to learn division modulo p, and the grokking delay (paper, Figs 4 to 7)",
        description="Division modulo p from half of the table: certified convex programs, convex attention trained end "
        "to end, and transformers and MLPs tuned with equal budgets. A call that was interrupted goes on after the "
        "last finished seed of a method, or the last finished pair of its search.",
    )
    command.add_argument("--methods", nargs="+", metavar="NAME", help="beginnings of names of methods (default: all)")
    command.set_defaults(run=_run_grokking)


def _experiment_settings(options: argparse.Namespace, kind: Any, names: Iterable[str]) -> Any:
    """The small or the full setting of an experiment with what the user asked to be otherwise."""
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return kind.small(**changes) if options.small else kind(**changes)


def _without_runs(report: dict[str, Any], text: str) -> dict[str, Any]:
    """What is shown of a report: its summary."""
    return {name: value for name, value in report.items() if name != "runs"} | {"text": text}


def _run_student_teacher(options: argparse.Namespace) -> dict[str, Any]:
    from .reproduce import StudentTeacherSettings, finished_seeds, format_student_teacher, run_student_teacher
    from .reproduce.student_teacher import FILE

    _check_folder(options.out)
    settings = _experiment_settings(options, StudentTeacherSettings, _STUDENT_TEACHER_SETTINGS)
    quiet = options.quiet or options.json
    try:
        report = run_student_teacher(options.out, settings, n_seeds=options.seeds, cache=options.cache, quiet=quiet)
    except KeyboardInterrupt:
        finished = finished_seeds(options.out / FILE)
        print(
            f"interrupted; {len(finished)} of {options.seeds} seeds are finished in {options.out}, and the same "
            "command goes on from there",
            file=sys.stderr,
        )
        raise
    return _without_runs(report, format_student_teacher(report))


def _run_grokking(options: argparse.Namespace) -> dict[str, Any]:
    from .reproduce import GrokkingSettings, format_grokking, run_grokking

    _check_folder(options.out)
    settings = _experiment_settings(options, GrokkingSettings, _GROKKING_SETTINGS)
    quiet = options.quiet or options.json
    try:
        report = run_grokking(options.out, settings, n_seeds=options.seeds, methods=options.methods, quiet=quiet)
    except KeyboardInterrupt:
        print(_GOES_ON.format(options.out), file=sys.stderr)
        raise
    return _without_runs(report, format_grokking(report))


def _run_demo(options: argparse.Namespace) -> dict[str, Any]:
    from .demo import format_table, rows_as_json, run_demo

    _check_folder(options.out)
    rows = run_demo(options.out, seed=options.seed, quiet=options.quiet or options.json)
    figures = [str(options.out / name) for name in ("token_map.png", "convergence.png")]
    report: dict[str, Any] = {"rows": rows_as_json(rows), "figures": figures}
    (options.out / "demo.json").write_text(_as_json(report) + "\n")
    remark = (
        "relative gap = (objective - dual bound) / objective of the best constant model; the dual bound is certified: "
        "no network of the class, however trained, gets below it. heads = those of the certified solution; the same "
        "number (and their gates) were given to Adam, with 2000 full-batch steps and one learning rate throughout, "
        "0.05 falling to zero along a cosine. Scores: accuracy, or R2 for the regression."
    )
    report["text"] = "\n".join([format_table(rows), "", remark, "figures: " + ", ".join(figures)])
    return report


def _run_fit(options: argparse.Namespace) -> dict[str, Any]:
    arrays = _load(options.file, ("X", "y"))
    X, y = arrays["X"], arrays["y"]
    task = options.task
    if task == "auto":
        task = "regression" if np.issubdtype(y.dtype, np.floating) else "classification"
    model = _new_model(task, options)
    _check_target(options.model, options.file)  # before the minutes that a fit may take
    from .persistence import save_model

    try:
        model.fit(X, y, sample_weight=arrays.get("sample_weight"))
    except KeyboardInterrupt:
        if hasattr(model, "certificate_"):
            save_model(model, options.model)
            print(f"interrupted; the best point so far is saved in {options.model}", file=sys.stderr)
        elif options.resume is not None:
            print(_GOES_ON.format(options.resume), file=sys.stderr)
        raise
    save_model(model, options.model)
    certificate = model.certificate_
    report = {
        "task": task,
        "model": str(options.model),
        "alpha": model.heads_.alpha,
        "alpha_max": model.alpha_max_,
        "status": model.status_.value,
        "objective": certificate.primal,
        "dual_bound": certificate.dual,
        "relative_gap": certificate.relative_gap,
        "iterations": model.n_iter_,
        "heads": len(model.heads_),
        "nonzero_tokens": int(np.count_nonzero(model.token_norms_)),
        "train_score": float(model.score(X, y, sample_weight=arrays.get("sample_weight"))),
    }
    if hasattr(model, "alpha_"):
        report["held_out_score"] = float(model.score_path_.mean(axis=1)[list(model.alphas_).index(model.alpha_)])
        if model.alpha_ == model.alphas_[-1] < model.alphas_[0]:
            smallest = model.alpha_ / model.alphas_[0]
            report["remark"] = f"the smallest alpha of the grid was chosen; --eps below {smallest:.3g} looks further"
    report["text"] = _as_lines(report)
    return report


def _new_model(task: str, options: argparse.Namespace) -> Any:
    import convexformer

    from .gates import GATE_SOURCES

    if options.gates not in GATE_SOURCES:
        raise CommandError(f"--gates must be one of {sorted(GATE_SOURCES)}, got {options.gates!r}")
    parameters = {
        "penalty": options.penalty,
        "activation": options.activation,
        "n_gates": options.n_gates,
        "gates": options.gates,
        "solver": options.solver,
        "tol": options.tol,
        "max_iter": options.max_iter,
        "dtype": options.dtype,
        "device": options.device,
        "random_state": options.seed,
        "verbose": not (options.quiet or options.json),
    }
    if options.loss is not None:
        parameters["loss"] = options.loss
    name = "ConvexAttentionRegressor" if task == "regression" else "ConvexAttentionClassifier"
    of_grid = {parameter: getattr(options, parameter) for parameter in _CROSS_VALIDATION if hasattr(options, parameter)}
    if options.alpha == "cv":
        return getattr(convexformer, name + "CV")(resume=options.resume, **of_grid, **parameters)
    if of_grid:
        given = ", ".join(_CROSS_VALIDATION[parameter][0] for parameter in of_grid)
        raise CommandError(f"{given}: for --alpha cv; got --alpha {options.alpha}")
    if options.resume is not None:
        raise CommandError(
            "--resume is for --alpha cv; a single fit that is interrupted saves its best point in --model"
        )
    try:
        alpha = float(options.alpha)
    except ValueError:
        raise CommandError(f"--alpha must be a number or 'cv', got {options.alpha!r}") from None
    return getattr(convexformer, name)(alpha=alpha, **parameters)


def _run_predict(options: argparse.Namespace) -> dict[str, Any]:
    from convexformer_solvers.archive import replacing

    from .persistence import load_model

    arrays = _load(options.file, ("X",))
    if not options.model.exists():
        raise CommandError(
            f"no model at {options.model}; 'convexformer fit FILE.npz --model {options.model}' makes one"
        )
    _check_target(options.out, options.file, options.model)
    model: Any = load_model(options.model)
    results = {"predictions": model.predict(arrays["X"])}
    if hasattr(model, "predict_proba"):
        results |= {"probabilities": model.predict_proba(arrays["X"]), "classes": model.classes_}
    report: dict[str, Any] = {"model": str(options.model), "predictions": str(options.out), "n": len(arrays["X"])}
    if "y" in arrays:
        try:
            report["score"] = float(model.score(arrays["X"], arrays["y"], sample_weight=arrays.get("sample_weight")))
        except (ValueError, TypeError) as error:
            raise CommandError(f"y of {options.file} gives no score; predictions do not need it: {error}") from error
    with replacing(options.out) as partial, open(partial, "wb") as file:  # by its name numpy would add an ending
        np.savez(file, **results)
    report["text"] = _as_lines(report)
    return report


def _check_target(path: Path, *inputs: Path) -> None:
    if path.exists() and any(path.samefile(other) for other in inputs):
        raise CommandError(f"{path} is read here and would be replaced; give another name to write to")
    if path.is_dir():
        raise CommandError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise CommandError(f"no folder at {path.parent}; make it first or give another name than {path}")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{path.parent} cannot be written to; give another name than {path}")


def _check_folder(path: Path) -> None:
    """Raise unless there is such a folder, which can be written to, or one can be made."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise CommandError(f"{there} is a file; give the name of a folder with --out")
    if not os.access(there, os.W_OK):
        raise CommandError(f"{there} cannot be written to; give another folder with --out")


def _load(path: Path, wanted: tuple[str, ...]) -> dict[str, Any]:
    if not path.exists():
        raise CommandError(f"no file at {path}")
    from convexformer_solvers.archive import read_arrays

    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise CommandError(_why_unreadable(path, str(error))) from error
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise CommandError(f"{path} must hold the arrays {list(wanted)}; missing: {missing}, found: {sorted(arrays)}")
    return arrays


def _why_unreadable(path: Path, reason: str) -> str:
    """Why a file of arrays cannot be read, and what to do, without numpy's advice to trust its pickles."""
    if "allow_pickle" not in reason:
        return f"{path} is not an .npz file of plain arrays: {reason}"
    if not zipfile.is_zipfile(path):
        name = path.with_suffix(".npz").name  # numpy would append it to any other
        return f"{path} is not an .npz file of plain arrays; np.savez({name!r}, X=X, y=y) makes one"
    objects = _arrays_of_objects(path)
    return (
        f"{path}: the arrays {objects} hold objects, which are not read; save text as {objects[0]}.astype(str) and "
        f"numbers as {objects[0]}.astype(float)"
    )


def _arrays_of_objects(path: Path) -> list[str]:
    names = []
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            try:
                archive[name]
            except ValueError:
                names.append(name)
    return names


def _as_lines(report: dict[str, Any]) -> str:
    width = max(map(len, report))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in report.items())


def _as_json(report: dict[str, Any]) -> str:
    """A report as JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(_finite(report), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : list of str, optional
        Default: those of the process.

    Returns
    -------
    int
        0, or 1 after a mistake in the input, or 130 after an interrupt.
    """
    options = build_parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():  # puts back how warnings are shown
            warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
            report = options.run(options)
    except (CommandError, ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError) as error:
        print(f"convexformer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convexformer: interrupted", file=sys.stderr)
        return 130
    text = report.pop("text")
    try:
        print(_as_json(report) if options.json else text, flush=True)
    except BrokenPipeError:  # whoever reads has read enough; Python must not complain of it at its end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``convexformer fit``: a model of arrays in a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .inputs import TARGETS, CommandError, check_no_shard, check_target, load_data, memory, named_path, samples_of, seed
from .output import GOES_ON, HelpFormatter, as_lines
from .processes import n_processes, process_group

# Parameters of cross-validated estimators: option, type and help.
_CROSS_VALIDATION: dict[str, tuple[str, Any, str]] = {
    "alphas": ("--n-alphas", int, "length of the grid; default: 30"),
    "eps": ("--eps", float, "ratio of its last alpha to the first, alpha_max; default: 0.01"),
    "cv": ("--folds", int, "number of folds; default: 5"),
    "n_jobs": ("--jobs", int, "folds at a time; default: 1"),
}


# Options that are parameters of the estimators by the same name.
_PARAMETERS = ("penalty", "solver", "tol", "max_iter", "dtype", "device", "memory_limit")


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    fit = commands.add_parser(
        "fit",
        parents=[common],
        help="fit arrays X and y of a file or folder and save the model",
        description="Fit a model and save it with its certificate. Under torchrun each process reads a part of the "
        "samples.",
        formatter_class=HelpFormatter,
    )
    fit.add_argument(
        "file",
        type=named_path,
        metavar="DATA",
        help=".npz, another file or a folder of shards, with X (samples, tokens[, features]), y or else a file of "
        "--targets, and maybe sample_weight; FILE:NAME is one of several arrays",
    )
    fit.add_argument("--targets", type=named_path, metavar="FILE", help=TARGETS)
    fit.add_argument(
        "--memory-limit",
        type=memory,
        metavar="SIZE",
        help="memory that data on a disk, or pooled tokens, may take, in bytes or with a unit, as 500MB or 2GiB; "
        "default: a quarter of what is free, with --probe no limit",
    )
    fit.add_argument("--model", type=named_path, default=Path("model.npz"), help=".npz file to save the model in")
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
        type=named_path,
        metavar="PATH",
        help="file that keeps the best point so far, with --alpha cv folder that keeps what is finished, to go on from",
    )
    for parameter, (option, kind, description) in _CROSS_VALIDATION.items():
        about = {"dest": parameter, "metavar": "N" if kind is int else "RATIO", "default": argparse.SUPPRESS}
        fit.add_argument(option, type=kind, help=f"with --alpha cv: {description}", **about)
    fit.add_argument(
        "--probe",
        action="store_true",
        help="pool tokens by content with a certified probe; DATA may hold lengths or mask",
    )
    fit.add_argument("--generate", type=int, metavar="N", help="with --probe: weightings to generate at most")
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
    fit.add_argument("--seed", type=seed, default=0, help="seed of the gates, or of the dictionary of a probe")
    fit.set_defaults(run=_run_fit)


def _run_fit(options: argparse.Namespace) -> dict[str, Any]:
    with process_group(options.device) as (rank, options.device):
        return _fit(options, is_first=rank == 0)


def _fit(options: argparse.Namespace, is_first: bool) -> dict[str, Any]:
    # Each of several processes takes an array for samples of its own, and of a path its part.
    X, arrays = load_data(options.file, options.targets, options.memory_limit is None and n_processes() == 1)
    y, weight, task = arrays["y"], arrays.get("sample_weight"), _task(options, arrays["y"])
    model = _new_model(task, options)
    X = samples_of({**arrays, "X": X}, options.file, options.targets, options.probe)
    if is_first:  # the one that writes, before the minutes that a fit may take
        check_target(options.model, options.file, options.targets, options.resume)
        check_no_shard(options.model, options.file, options.targets)
        if options.resume is not None:
            kept = options.resume / "fold_0.npz" if options.alpha == "cv" else options.resume
            check_no_shard(kept, options.file, options.targets)
    from convexformer.estimators.persistence import save_model

    try:
        single = {} if options.alpha == "cv" or options.resume is None else {"resume": options.resume}
        model.fit(X, y, sample_weight=weight, **single)
    except KeyboardInterrupt:
        if not is_first:
            raise
        if hasattr(model, "certificate_"):
            save_model(model, options.model)
            print(f"interrupted; the best point so far is saved in {options.model}", file=sys.stderr)
        elif options.resume is not None:
            print(GOES_ON.format(options.resume), file=sys.stderr)
        raise
    if is_first:
        save_model(model, options.model)
    report = {"task": task, "model": str(options.model), **_described(model)}
    report["train_score"] = float(model.score(X, y, sample_weight=weight))
    if hasattr(model, "alpha_"):
        report |= _chosen(model)
    report["text"] = as_lines(report) if is_first else None
    return report


def _task(options: argparse.Namespace, y: Any) -> str:
    """The task, of the targets where no option says it."""
    from sklearn.utils.multiclass import type_of_target

    if options.task == "auto":
        return "regression" if np.issubdtype(y.dtype, np.floating) else "classification"
    if options.task == "classification" and type_of_target(y, input_name="y").startswith("continuous"):
        raise CommandError(
            f"--task classification needs labels, but y of {options.targets or options.file} holds numbers that are "
            "not whole; leave --task out, or store labels, for example y.astype(str)"
        )
    return options.task


def _described(model: Any) -> dict[str, Any]:
    """The certificate of a fitted model, and what its solution uses."""
    certificate = model.certificate_
    return {
        "alpha": model.heads_.alpha,
        "alpha_max": model.alpha_max_,
        "status": model.status_.value,
        "objective": certificate.primal,
        "dual_bound": certificate.dual,
        "relative_gap": certificate.relative_gap,
        "iterations": model.n_iter_,
        **_read(model),
        "heads": len(model.heads_),
        **_used(model),
    }


def _chosen(model: Any) -> dict[str, Any]:
    """What cross-validation says of the alpha that it has chosen."""
    found: dict[str, Any] = {
        "held_out_score": float(model.score_path_.mean(axis=1)[list(model.alphas_).index(model.alpha_)])
    }
    if model.alpha_ == model.alphas_[-1] < model.alphas_[0]:
        smallest = model.alpha_ / model.alphas_[0]
        found["remark"] = f"the smallest alpha of the grid was chosen; --eps below {smallest:.3g} looks further"
    return found


def _used(model: Any) -> dict[str, int]:
    """Tokens, or weightings of a probe, that the solution uses."""
    if hasattr(model, "weighting_norms_"):
        return {"nonzero_weightings": int(np.count_nonzero(model.weighting_norms_))}
    return {"nonzero_tokens": int(np.count_nonzero(model.token_norms_))}


def _read(model: Any) -> dict[str, float]:
    """What the fit has read of data on a disk."""
    traffic = model.traffic_
    return {} if traffic is None else {"passes": traffic.passes, "gigabytes_per_second": traffic.bytes_per_second / 1e9}


# Options of networks of positions, which a probe does not have, with their defaults.
_OF_POSITIONS: dict[str, Any] = {"activation": "linear", "n_gates": 32, "gates": "gaussian"}


def _of_networks(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Beginning of the estimator's name, and the parameters of its class of networks."""
    from convexformer.gates import GATE_SOURCES

    own = {name: getattr(options, name) for name in _OF_POSITIONS}
    if options.probe:
        given = ["--" + name.replace("_", "-") for name in own if own[name] != _OF_POSITIONS[name]]
        if given:
            raise CommandError(f"{', '.join(given)}: not with --probe, whose gates are part of its dictionary")
        return "ConvexProbe", {"generate": options.generate}
    if options.generate is not None:
        raise CommandError(f"--generate is for --probe, got --generate {options.generate}")
    if options.gates not in GATE_SOURCES:
        raise CommandError(f"--gates must be one of {sorted(GATE_SOURCES)}, got {options.gates!r}")
    return "ConvexAttention", own


def _new_model(task: str, options: argparse.Namespace) -> Any:
    import convexformer

    beginning, own = _of_networks(options)
    parameters = own | {name: getattr(options, name) for name in _PARAMETERS}
    parameters |= {"random_state": options.seed, "verbose": not (options.quiet or options.json)}
    if options.loss is not None:
        parameters["loss"] = options.loss
    name = beginning + ("Regressor" if task == "regression" else "Classifier")
    of_grid = {parameter: getattr(options, parameter) for parameter in _CROSS_VALIDATION if hasattr(options, parameter)}
    if options.alpha == "cv":
        return getattr(convexformer, name + "CV")(resume=options.resume, **of_grid, **parameters)
    if of_grid:
        given = ", ".join(_CROSS_VALIDATION[parameter][0] for parameter in of_grid)
        raise CommandError(f"{given}: for --alpha cv; got --alpha {options.alpha}")
    try:
        alpha = float(options.alpha)
    except ValueError:
        raise CommandError(f"--alpha must be a number or 'cv', got {options.alpha!r}") from None
    return getattr(convexformer, name)(alpha=alpha, **parameters)

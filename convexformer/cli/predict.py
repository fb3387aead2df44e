"""``convexformer predict``: what a saved model says of arrays in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from .inputs import TARGETS, CommandError, check_no_shard, check_target, load_samples, named_path, samples_of
from .output import HelpFormatter, as_lines
from .processes import n_processes, own_device, process_group


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    predict = commands.add_parser(
        "predict",
        parents=[common],
        help="predict for the samples of a file or folder with a saved model",
        description="Predict with a saved model. Under torchrun each process predicts a part of the samples.",
        formatter_class=HelpFormatter,
    )
    predict.add_argument(
        "file",
        type=named_path,
        metavar="DATA",
        help=".npz, another file or a folder of shards with X, and y when a score is wanted",
    )
    predict.add_argument("--targets", type=named_path, metavar="FILE", help=f"{TARGETS}; when a score is wanted")
    predict.add_argument("--model", type=named_path, default=Path("model.npz"), help="model saved by fit")
    predict.add_argument(
        "--out",
        type=named_path,
        default=Path("predictions.npz"),
        help=".npz file to save predictions (and probabilities) in",
    )
    predict.add_argument("--device", help="cpu or cuda; default: that of the fit")
    predict.set_defaults(run=_run_predict)


def _run_predict(options: argparse.Namespace) -> dict[str, Any]:
    with process_group(None) as (rank, _):
        return _predict(options, is_first=rank == 0)


def _predict(options: argparse.Namespace, is_first: bool) -> dict[str, Any]:
    from convexformer.estimators.persistence import load_model
    from convexformer.estimators.samples import predictions_of_all
    from convexformer_solvers.io.npz import replacing

    arrays = load_samples(options.file, options.targets, in_memory=n_processes() == 1)
    if not options.model.is_file():
        raise CommandError(
            f"no model at {options.model}; 'convexformer fit FILE.npz --model {options.model}' makes one"
        )
    if is_first:  # the one that writes
        check_target(options.out, options.file, options.targets, options.model)
        check_no_shard(options.out, options.file, options.targets)
    model: Any = load_model(options.model)
    if not hasattr(model, "predict"):
        raise CommandError(f"{options.model} holds a {type(model).__name__}, which has no targets to predict")
    X = samples_of(arrays, options.file, options.targets, hasattr(model, "pooler_"))
    if options.device is not None:
        _place(model, own_device(options.device))
    elif n_processes() > 1 and str(model.device).startswith("cuda"):
        _place(model, own_device("cuda"))  # that of the fit is of its first process
    y = arrays.get("y")
    weight = None if y is None else arrays.get("sample_weight")
    y, weight, predictions = predictions_of_all(model, X, y, weight)
    results = {"predictions": predictions}
    if hasattr(model, "predict_proba"):
        *_, probabilities = predictions_of_all(model, X, None, None, "predict_proba")
        results |= {"probabilities": probabilities, "classes": model.classes_}
    report: dict[str, Any] = {"model": str(options.model), "predictions": str(options.out), "n": len(predictions)}
    if y is not None:
        try:
            report["score"] = model._score_of(y, weight, predictions)
        except (ValueError, TypeError) as error:
            place = options.targets or options.file
            raise CommandError(f"y of {place} gives no score; predictions do not need it: {error}") from error
    if is_first:
        with replacing(options.out) as partial, open(partial, "wb") as file:  # by its name numpy would add an ending
            np.savez(file, **results)
    report["text"] = as_lines(report) if is_first else None
    return report


def _place(model: Any, device: str | None) -> None:
    """Let a model predict on a device."""
    import torch

    from convexformer.validation import check_device

    place = check_device(device, torch.device("cpu"))
    for part in (model, *getattr(model, "layers_", ())):
        part.device = device
    if hasattr(model, "network_"):
        model.network_.to(place)

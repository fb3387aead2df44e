"""Constrained training of denoisers of video: frames, models, and runs of each method ([K] section 5)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from convexformer.constrained import FeasibilityReport, LayerReadouts, NonFiniteLossError, PrimalDual
from convexformer.constrained.data import LayerLosses
from convexformer.datasets import load_video_frames
from convexformer.experiments.common import Unit, begin_report, finish_report, new_report, report_path, run_units
from convexformer.nn.modules.base import seeded
from convexformer.unfolded.unrolled import DUST, UnrolledTransformer, frame_patches, frames_from_patches
from convexformer.validation import check_device
from convexformer_solvers.draws import standard_normal

from .common import METHODS, PARTS, Method, Task, Trained, search, train_once
from .video_figures import draw_figures
from .video_report import remark, summarise
from .video_settings import ConstrainedVideoSettings

FILE = "constrained_video.json"
EXAMPLES = "examples"
_CONSTRAINED = METHODS[0]
_TEST_SEED = 2**31


class Video(NamedTuple):
    """Patches of the frames of a clip, split by time so that neighbours of test frames are not trained on.

    Attributes
    ----------
    training, validation, test : Tensor of shape (n_frames, n_patches, patch_size ** 2)
        In [0, 1].
    sha256 : str
        Of all frames.
    """

    training: Tensor
    validation: Tensor
    test: Tensor
    sha256: str

    @classmethod
    def load(cls, settings: ConstrainedVideoSettings) -> Video:
        """The frames that settings ask for.

        Parameters
        ----------
        settings : ConstrainedVideoSettings
            Source, sizes and device.

        Returns
        -------
        Video
        """
        frames = load_video_frames(settings.source, size=settings.size, n_frames=settings.n_frames)
        patches = frame_patches(torch.as_tensor(frames), settings.patch_size)
        patches = patches.to(check_device(settings.device, torch.device("cpu")))
        first, second = int(0.6 * len(frames)), int(0.8 * len(frames))
        digest = hashlib.sha256(frames.tobytes()).hexdigest()
        return cls(patches[:first], patches[first:second], patches[second:], digest)


class VisionTransformer(nn.Module):
    """A randomly initialised ViT of transformers, every layer of which puts out a reconstruction of the patches.

    One linear readout, shared by all layers, makes pixels of normalised tokens.

    Parameters
    ----------
    size, patch_size : int
        Sides of a frame and of a patch.
    n_layers, n_hidden, n_heads : int
        Sizes of the encoder.
    seed : int
        Of the initial weights.
    """

    def __init__(self, size: int, patch_size: int, n_layers: int, n_hidden: int, n_heads: int, seed: int) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel  # slow to import

        self.size, self.patch_size = size, patch_size
        config = ViTConfig(
            hidden_size=n_hidden,
            num_hidden_layers=n_layers,
            num_attention_heads=n_heads,
            intermediate_size=2 * n_hidden,
            image_size=size,
            patch_size=patch_size,
            num_channels=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        with seeded(seed):
            encoder = ViTModel(config, add_pooling_layer=False)
            self.readouts = LayerReadouts(encoder, nn.Linear(n_hidden, patch_size**2), "reconstruction")

    def layer_outputs(self, tokens: Tensor) -> Tensor:
        """Reconstructions after each layer.

        Parameters
        ----------
        tokens : Tensor of shape (N, n_patches, patch_size ** 2)
            Patches of frames.

        Returns
        -------
        Tensor of shape (n_layers, N, n_patches, patch_size ** 2)
        """
        frames = frames_from_patches(tokens, (self.size, self.size), self.patch_size)
        return self.readouts.layer_outputs(pixel_values=frames[:, None])


def denoising_losses(noise: float, unit: float) -> LayerLosses:
    """Function that gives the losses of the layers of a model for clean patches, to which it adds noise.

    Parameters
    ----------
    noise : float
        Standard deviation of the noise, drawn from torch's global generator.
    unit : float
        Mean squared error over the pixels of a frame whose loss is 1.

    Returns
    -------
    callable
        As ``PrimalDual`` takes it.

    Examples
    --------
    >>> losses = denoising_losses(noise=0.0, unit=0.5)
    >>> losses(UnrolledTransformer(4, n_layers=3), (torch.rand(2, 9, 4),)).shape
    torch.Size([3, 2])
    """

    def layer_losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        (clean,) = batch
        outputs = model.layer_outputs(clean + noise * standard_normal(clean.shape, torch.default_generator).to(clean))
        return (outputs - clean).square().mean((-2, -1)) / unit

    return layer_losses


def make_model(name: str, depth: int, settings: ConstrainedVideoSettings, seed: int) -> nn.Module:
    """A model with initial weights.

    Parameters
    ----------
    name : {"UT", "DUST", "ViT"}
        Which.
    depth : int
        Layers.
    settings : ConstrainedVideoSettings
        Sizes and device.
    seed : int
        Of the initial weights; DUST begins with cosines whatever it is.

    Returns
    -------
    Module
        With ``layer_outputs``.

    Examples
    --------
    >>> type(make_model("DUST", 3, ConstrainedVideoSettings.small(), seed=0)).__name__
    'DUST'
    """
    width = settings.patch_size**2
    model: nn.Module
    if name == "UT":
        model = UnrolledTransformer(width, depth, seed=seed)
        with torch.no_grad():
            model.feedforward_weight.mul_(settings.feedforward_scale)
    elif name == "DUST":
        model = DUST(width, depth, n_atoms=settings.n_atoms, seed=seed)
    else:
        model = VisionTransformer(settings.size, settings.patch_size, depth, settings.n_hidden, settings.n_heads, seed)
    return model.to(check_device(settings.device, torch.device("cpu")))


def missing_models(settings: ConstrainedVideoSettings) -> dict[str, str]:
    """Models that cannot be made here, each with the reason.

    Parameters
    ----------
    settings : ConstrainedVideoSettings
        Which are asked for.

    Returns
    -------
    dict

    Examples
    --------
    >>> missing_models(ConstrainedVideoSettings.small(models=("UT",)))
    {}
    """
    if "ViT" in settings.models and find_spec("transformers") is None:
        return {"ViT": "transformers is not installed: pip install 'convexformer[bert]'"}
    return {}


def _find(rows: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any] | None:
    """The row of a key."""
    return next((row for row in rows if key.items() <= row.items()), None)


def run_constrained_video(
    folder: str | os.PathLike[str],
    settings: ConstrainedVideoSettings | None = None,
    *,
    n_seeds: int = 3,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train denoisers of video with and without descent constraints and with deep supervision, and draw.

    Every seed draws initial weights, orders of frames and noise. What is finished is on disk at once; a later call
    with the same settings goes on with what is missing.

    Parameters
    ----------
    folder : path-like
        Where ``constrained_video.json``, the figures and a few reconstructions go; made when absent.
    settings : ConstrainedVideoSettings, optional
        Default: the full setting, many hours on one core.
    n_seeds : int, default=3
        Seeds 0, 1, ...
    quiet : bool, default=False
        Whether to hide the progress bar.

    Returns
    -------
    dict
        What the JSON file holds: ``settings``, ``data``, ``remark``, ``skipped`` models with reasons, ``versions``,
        ``runs`` of each seed, ``ablation``, ``summaries`` over seeds, and ``figures``.

    Raises
    ------
    ValueError
        If the folder holds results of other settings or frames, no model can be made, or an argument is not as
        described.
    FileNotFoundError
        If the source is not there.
    ModuleNotFoundError
        If matplotlib, the clip's package or what decodes it is not installed.
    KeyboardInterrupt
        On Ctrl-C. What was finished is on disk.

    Examples
    --------
    Few small frames for one epoch:

    >>> import tempfile
    >>> settings = ConstrainedVideoSettings.small(
    ...     size=8, patch_size=4, n_frames=5, models=("UT",), depths=(2,), n_epochs=1, ablation_alphas=()
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = run_constrained_video(folder, settings, n_seeds=1, quiet=True)
    >>> [row["method"] for row in report["runs"]]
    ['constrained', 'unconstrained', 'deep supervision']
    """
    settings = ConstrainedVideoSettings() if settings is None else settings
    skipped = missing_models(settings)
    models = [name for name in settings.models if name not in skipped]
    if not models:
        raise ValueError(f"models must hold one that can be made here: {'; '.join(skipped.values())}")
    path = report_path(folder, FILE, n_seeds)
    video = Video.load(settings)
    examples = path.parent / EXAMPLES
    examples.mkdir(exist_ok=True)
    report = begin_report(path, _fresh(settings, video, skipped), PARTS)
    # run_units adds rows to this very list, so that later units see the runs before them
    units = list(_units(settings, models, video, n_seeds, examples, report["runs"]))
    run_units(path, report, units, quiet=quiet)
    report["summaries"] = summarise(report)
    return finish_report(path, report, draw_figures)


def _fresh(settings: ConstrainedVideoSettings, video: Video, skipped: dict[str, str]) -> dict[str, Any]:
    """The report of no run."""
    parts = {name: len(getattr(video, name)) for name in ("training", "validation", "test")}
    data = {"frames_read": {**parts, "n_patches": video.test.shape[1], "sha256": video.sha256}}
    return new_report(settings, data, PARTS, remark=remark(settings), skipped=skipped)


def _units(
    settings: ConstrainedVideoSettings,
    models: list[str],
    video: Video,
    n_seeds: int,
    examples: Path,
    runs: list[dict[str, Any]],
) -> Iterator[Unit]:
    """All that is to be run: seeds one after the other, and the ablation once the runs hold its learning rate."""
    for seed, noise, model, depth in product(range(n_seeds), settings.noises, models, settings.depths):
        task = _task(settings, video, noise, model, depth)
        for method in METHODS:
            key = {"seed": seed, "noise": noise, "model": model, "depth": depth, "method": method.name}
            title = f"seed {seed}, noise {noise}, {model} {depth}: {method.name}"
            yield Unit("runs", title, key, partial(_run, task, method, settings, video, key, examples, runs))
    noise, model, depth = max(settings.noises), models[0], min(settings.depths)
    task, cell = _task(settings, video, noise, model, depth), {"noise": noise, "model": model, "depth": depth}
    for alpha, resilience in product(settings.ablation_alphas, settings.ablation_resiliences):
        key = {**cell, "alpha": alpha, "resilience": resilience}
        title = f"ablation: alpha {alpha}, resilience {resilience}"
        yield Unit("ablation", title, key, partial(_ablate, task, settings, video, key, runs))


def _task(settings: ConstrainedVideoSettings, video: Video, noise: float, model: str, depth: int) -> Task:
    options = {
        "batch_size": settings.batch_size,
        "dual_lr": settings.dual_lr,
        "warmup_epochs": settings.warmup_epochs,
        "resilience": settings.resilience,
        "slack_update": "explicit",
        "reset_slacks": settings.resilience is not None,
    }
    return Task(
        lambda seed: make_model(model, depth, settings, seed),
        denoising_losses(noise, settings.unit(noise)),
        [video.training],
        [video.validation],
        settings.c_ref,
        options,
        settings.n_epochs,
    )


def _run(
    task: Task,
    method: Method,
    settings: ConstrainedVideoSettings,
    video: Video,
    key: dict[str, Any],
    examples: Path,
    runs: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The row of a method: its search, or the pair that was best for seed 0, and errors on test frames."""
    seed = key["seed"]
    first = _find(runs, {**key, "seed": 0})
    try:
        if settings.search_every_seed or first is None or first["diverged"]:
            trained = search(task, method, settings.search, seed)
        else:
            pair = (first["learning_rate"], first["tuned"])
            trainer = train_once(task, method, pair, seed)
            trained = Trained(trainer, pair, sum(trainer.history_.seconds))
        row = _row(trained, settings, video, key["noise"])
    except NonFiniteLossError as error:
        return [key | {"diverged": str(error)}]
    if seed == 0:
        _save_example(trained.trainer, settings, video, examples / example_name(**key))
    return [key | row]


def _row(trained: Trained, settings: ConstrainedVideoSettings, video: Video, noise: float) -> dict[str, Any]:
    """What a report keeps of a run that came to an end."""
    return {"diverged": None, **trained.as_json(), **_measure(trained.trainer, settings, video, noise)}


def example_name(noise: float, model: str, depth: int, method: str, **_: Any) -> str:
    """Name of the file of a method's reconstruction.

    Examples
    --------
    >>> example_name(0.11, "UT", 3, "deep supervision")
    'UT_3_0.11_deep_supervision.npy'
    """
    return f"{model}_{depth}_{noise}_{method.replace(' ', '_')}.npy"


def _ablate(
    task: Task, settings: ConstrainedVideoSettings, video: Video, key: dict[str, Any], runs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The row of an alpha and a resilience, with the learning rate that the search chose for constrained training."""
    cell = {name: key[name] for name in ("noise", "model", "depth")}
    found = _find(runs, {**cell, "seed": 0, "method": _CONSTRAINED.name})
    assert found is not None
    if found["diverged"]:
        return [key | {"diverged": found["diverged"]}]
    pair = (found["learning_rate"], key["alpha"])
    try:
        resilience = key["resilience"]
        changes = {"resilience": resilience, "reset_slacks": resilience is not None}
        trainer = train_once(task, _CONSTRAINED, pair, 0, **changes)
        trained = Trained(trainer, pair, sum(trainer.history_.seconds))
        return [key | _row(trained, settings, video, key["noise"])]
    except NonFiniteLossError as error:
        return [key | {"diverged": str(error)}]


def _noisy(clean: Tensor, noise: float) -> Tensor:
    """Clean patches with noise that is the same for all methods and seeds."""
    return clean + noise * standard_normal(clean.shape, torch.Generator().manual_seed(_TEST_SEED)).to(clean)


@torch.no_grad()
def _measure(trainer: PrimalDual, settings: ConstrainedVideoSettings, video: Video, noise: float) -> dict[str, Any]:
    """Errors on test frames, on the scale of 0 to 255, and what a step costs."""
    model: Any = trainer.model.eval()

    def errors(test_noise: float) -> list[float]:
        pairs = (frames.split(settings.batch_size) for frames in (_noisy(video.test, test_noise), video.test))
        parts = [
            (model.layer_outputs(noisy) - clean).square().mean((-2, -1)) for noisy, clean in zip(*pairs, strict=True)
        ]
        return (255 * torch.cat(parts, 1).mean(1).sqrt()).tolist()

    curves = [errors(test_noise) for test_noise in settings.test_noises]
    if not np.isfinite(curves).all():
        raise NonFiniteLossError("an error on test frames became infinite or nan")
    n_steps = -(-len(video.training) // settings.batch_size)
    losses = trainer.layer_losses_of([video.test])
    report = FeasibilityReport.of(losses, trainer.constraints)
    return {
        "rmse": [layers[-1] for layers in curves],
        "mean_rmse": float(np.mean([layers[-1] for layers in curves])),
        "layer_rmse": (255 * (losses.mean(1) * settings.unit(noise)).sqrt()).tolist(),
        "test_descending_share": report.descending_share,
        "seconds_per_step": float(np.median(trainer.history_.seconds)) / n_steps,
        "n_parameters": sum(weight.numel() for weight in model.parameters()),
        # JSON has no infinity, which the loss of an epoch that was not chosen may be
        "training_curve": [loss if math.isfinite(loss) else None for *_, loss in trainer.history_.validation],
    }


@torch.no_grad()
def _save_example(trainer: PrimalDual, settings: ConstrainedVideoSettings, video: Video, path: Path) -> None:
    """Write the clean frame in the middle of the test frames, the noisy one, and its reconstruction."""
    clean = video.test[len(video.test) // 2][None]
    model: Any = trainer.model.eval()
    noisy = _noisy(clean, max(settings.test_noises))
    patches = torch.cat([clean, noisy, model.layer_outputs(noisy)[-1]])
    frames = frames_from_patches(patches, (settings.size, settings.size), settings.patch_size)
    np.save(path, (255 * frames.clamp(0, 1)).round().byte().cpu().numpy())

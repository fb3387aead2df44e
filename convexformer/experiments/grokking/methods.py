"""The methods that are compared: one line for each kind and all depths of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from convexformer.experiments.settings import check_each
from convexformer.validation import is_prime

from .convex_programs import solve_fourier, solve_greedy
from .learned import join, project
from .networks import Trainer, adamw, convex_attention, mlp, transformer
from .settings import GrokkingSettings

_END_TO_END, _CERTIFIED = "convex attention, end to end", "certified convex programs"
_LEARNED = "convex block, learned tokens"
_DEPTHS = (1, 2, 4)


@dataclass(frozen=True)
class Method:
    """A way to learn the table.

    Attributes
    ----------
    name : str
        As tables and figures show it.
    family : str
        Methods of one family share panels of the figures.
    train : callable
        From split, settings, seed, pair of learning rate and decay (None where not tuned) and ``Watch`` to a
        dictionary of what else is to be reported, as ``learning_rate``, ``weight_decay``, ``batch_size``,
        ``parameters``, ``alpha``, ``relative_gap``, ``certified_steps``, ``certified_seconds``, ``structure``. It shows
        itself to the watch as often as ``watch.due`` says, ends when ``watch.look`` returns True or after
        ``watch.n_steps``, and draws all that is random from the seed.
    tuned : bool, default=True
        Whether learning rate and decay are searched, with the same budget for all methods.
    n_layers : int, default=None
        Depth, where there is one.
    convex : bool, default=False
        Whether each program that it solves is convex and certified, so that it ends by itself.
    limit : {"n_steps", "untuned_steps", "projection_steps", "max_iter"}, default="n_steps"
        The setting that is ``watch.n_steps`` outside the search.
    applies : callable
        Whether it can be used for a modulus. Default: for all.

    Examples
    --------
    >>> method = Method("MLP, no name", "MLPs", adamw(mlp("relu")), tuned=False)
    >>> method.is_in(GrokkingSettings.small()), method.applies(15)
    (True, True)
    >>> [method.name for method in METHODS if method.convex and not method.applies(15)][:2]
    ['fully convex', 'layer-wise convex, L = 1']
    """

    name: str
    family: str
    train: Trainer
    tuned: bool = True
    n_layers: int | None = None
    convex: bool = False
    limit: Literal["n_steps", "untuned_steps", "projection_steps", "max_iter"] = "n_steps"
    applies: Callable[[int], bool] = lambda p: True

    @property
    def depths(self) -> str:
        """The setting that says which depths are run."""
        return "transformer_layers" if self.family == "transformers" else "layers"

    def is_in(self, settings: GrokkingSettings) -> bool:
        """Whether its depth is one of the settings."""
        return self.n_layers is None or self.n_layers in getattr(settings, self.depths)


def _certified(name: str, trainer: Trainer, n_layers: int | None = None) -> Method:
    return Method(name, _CERTIFIED, trainer, False, n_layers, convex=True, limit="max_iter", applies=is_prime)


METHODS: tuple[Method, ...] = (
    Method("MLP, ReLU", "MLPs", adamw(mlp("relu"))),
    Method("MLP, quadratic", "MLPs", adamw(mlp("quadratic"))),
    *(Method(f"transformer, L = {n}", "transformers", adamw(transformer(n)), n_layers=n) for n in _DEPTHS),
    Method("transformer, L = 1, untuned", "transformers", adamw(transformer(1)), False, 1, limit="untuned_steps"),
    *(Method(f"convex attention, L = {n}", _END_TO_END, adamw(convex_attention(n)), n_layers=n) for n in _DEPTHS),
    Method("convex block, joint", _LEARNED, join, tuned=False),
    Method("convex block, projection", _LEARNED, project, tuned=False, limit="projection_steps"),
    _certified("fully convex", solve_fourier),
    *(_certified(f"layer-wise convex, L = {n}", partial(solve_greedy, n), n) for n in _DEPTHS),
)


def chosen_methods(settings: GrokkingSettings, names: list[str] | None = None) -> list[Method]:
    """The methods of a run.

    Parameters
    ----------
    settings : GrokkingSettings
        Methods of other depths than it has are left out.
    names : list of str, optional
        Names, each of which stands for all methods that begin so. Default: all.

    Returns
    -------
    list of Method

    Raises
    ------
    ValueError
        If a name is that of none of them, or no method has a depth of the settings.

    Examples
    --------
    >>> [method.name for method in chosen_methods(GrokkingSettings.small(), ["MLP", "fully"])]
    ['MLP, ReLU', 'MLP, quadratic', 'fully convex']
    """
    for name in ("layers", "transformer_layers"):
        known = sorted({m.n_layers for m in METHODS if m.depths == name and m.n_layers is not None})
        check_each(known.__contains__, f"of the depths {known}", **{name: getattr(settings, name)})
    there = [method for method in METHODS if method.is_in(settings)]
    for name in names or ():
        if not any(method.name.startswith(name) for method in there):
            raise ValueError(f"methods must begin like some of {[method.name for method in there]}, got {name!r}")
    return [method for method in there if names is None or method.name.startswith(tuple(names))]

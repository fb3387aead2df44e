"""The numbers that the plan of the default solver goes by."""

from __future__ import annotations

from dataclasses import dataclass

from convexformer_solvers.linear_maps.config import MapConfig


@dataclass(frozen=True)
class AutoConfig:
    """Numbers that ``plan`` goes by.

    Parameters
    ----------
    largest_side : int, default=12000
        Side of the largest Gram matrix that is factorised: 576 MB in float32. Working sets have half as many columns.
    gram_copies : int, default=12
        Matrices of that size, at most, for which there must be room within ``LinearMap.memory_limit``; for two thirds
        of them of the samples' own Gram matrix.
    independent : float, default=1.15
        ``eigenvalue_ratio`` up to which features count as nearly independent; up to ``AdmmConfig.independent`` as
        slightly dependent, which is near enough where the regularisation is strong or the loss couples the outputs.
    gradient_steps : float, default=8
        Gradient steps that independent features take, over the root of the groups' median dual norm over ``alpha``;
        twice as many slightly dependent ones, and steps in a metric of low rank.
    costly_gram : float, default=16
        Products with the data in the time of which the Gram matrix of all features is formed, from which on a working
        set pays, or steps in a metric of low rank; twice that for block descent with fewer samples than features, a
        third of it for data that are not in memory, of which some samples are timed.
    long_tails : float, default=60
        ``Loss.tail_length`` from which on Newton steps on smoothed losses, or proximal steps in the dual, come first.
    first_steps : int, default=80
        First-order steps at least before Newton steps have their turn, and semismooth Newton steps at most.
    newton_share : float, default=0.2
        First-order steps before Newton steps, as a share of those in the time of which Newton steps would be done.
    steps : int, default=2000
        Steps of alternating directions at most, after Newton steps or in their place; also of proximal steps in the
        dual, of gradient steps before semismooth Newton steps, and of steps in a metric where no other limit is named.
    few_steps : int, default=400
        The same where others follow that may be better, as for losses that couple the outputs; at least before Newton
        steps with the squared loss; Newton steps at most, of which about 25 are taken.
    usual_steps : int, default=25
        Steps that alternating directions from scratch and Newton steps take as a rule.
    calls : int, default=1000
        Small calls of a step of alternating directions; a Newton step has twice as many for each of its systems.
    block_calls : float, default=75
        Small calls of a step of block descent, for each of its blocks.
    set_width : float, default=0.6
        ``WorkingSetConfig.widest`` of all sets but those of block descent.
    least_single : int, default=MapConfig.temporary
        Numbers that data or matrices hold at least where iterations begin in single precision.

    Examples
    --------
    >>> from convexformer_solvers import Auto
    >>> solver = Auto(AutoConfig(largest_side=20_000))  # where there is memory for Gram matrices of 1.6 GB
    """

    largest_side: int = 12_000
    gram_copies: int = 12
    independent: float = 1.15
    gradient_steps: float = 8.0
    costly_gram: float = 16.0
    long_tails: float = 60.0
    first_steps: int = 80
    newton_share: float = 0.2
    steps: int = 2000
    few_steps: int = 400
    usual_steps: int = 25
    calls: int = 1000
    block_calls: float = 75.0
    set_width: float = 0.6
    least_single: int = MapConfig.temporary

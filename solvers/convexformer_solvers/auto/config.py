"""The numbers that the plan of the default solver goes by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AutoConfig:
    """Numbers that ``plan`` goes by.

    Parameters
    ----------
    largest_side : int, default=12000
        Side of the largest Gram matrix that is factorised: 576 MB in float32.
    independent : float, default=1.15
        ``eigenvalue_ratio`` up to which features count as nearly independent.
    slightly_dependent : float, default=1.7
        The same where the regularisation is strong, as with gated independent features.
    independent_coupled : float, default=2
        The same where the loss couples the outputs: gradient steps do not mind that.
    gradient_steps : float, default=8
        Gradient steps that independent features take, over the root of the groups' median dual norm over ``alpha``;
        twice as many slightly dependent ones.
    costly_gram : float, default=32
        Products with the data in the time of which the Gram matrix of all features is formed, from which on a working
        set pays.
    long_tails : float, default=60
        ``Loss.tail_length`` from which on nothing but proximal steps in the dual makes much of the loss.
    quick_newton, slow_newton, late_newton : float, default=1000, 2000, 20000
        Steps of alternating directions in the time of which Newton steps on smoothed objectives must be done to have
        their turn early, after the first stage, and before the last.
    newton_steps : int, default=100
        These Newton steps at most; about 25 are taken.
    first_steps : int, default=400
        Steps of alternating directions before other algorithms have their turn; a fifth where Newton steps are quick.
    steps : int, default=2000
        Steps of alternating directions after that, before gradient steps end the plan.
    least_single : int, default=2**18
        Numbers that data or matrices hold at least where iterations begin in single precision.
    """

    largest_side: int = 12_000
    independent: float = 1.15
    slightly_dependent: float = 1.7
    independent_coupled: float = 2.0
    gradient_steps: float = 8.0
    costly_gram: float = 32.0
    long_tails: float = 60.0
    quick_newton: float = 1000.0
    slow_newton: float = 2000.0
    late_newton: float = 20_000.0
    newton_steps: int = 100
    first_steps: int = 400
    steps: int = 2000
    least_single: int = 2**18

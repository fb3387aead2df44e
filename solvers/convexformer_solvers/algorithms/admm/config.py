"""The numbers of alternating directions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdmmConfig:
    """Numbers that ``Admm`` goes by.

    Parameters
    ----------
    over_relaxation : float, default=1.7
        Share of each step that is taken; below 2. More than 1 saves a third of the iterations.
    memory : int, default=8
        Differences that Anderson acceleration keeps, if any; half as many iterations are the moves that set ``rho``.
    bold : float, default=3
        Sum of the sizes of an extrapolation's weights from which on it is compared with the best constant model.
    threshold : float, default=10/3
        The first ``rho`` is such that the prox's threshold ``alpha / rho`` is so many times the median active group.
    independent_threshold, correlated_threshold : float, default=2, 5
        The same where features are nearly independent and the loss is squared, and where they are correlated.
    near_threshold : float, default=1.5
        The same along a path for losses that couple the outputs, where one number bounds a matrix of curvatures.
    independent, correlated : float, default=1.7, 8
        ``eigenvalue_ratio`` up to which features are nearly independent, gated ones included, and from which on they
        are correlated.
    first_share : float, default=0.25
        Share of that for the groups of the first proximal step, which grow; twice that for nearly independent features.
    adapt_at : tuple of int, default=(5, 15, 25, 40, 70, 100, 200, 400, 800)
        Iterations after which ``rho`` is set anew, first by the size of groups, then by moves; and the curvatures after
        those that are at least twice the last of these.
    refactor : float, default=2.2
        Factor by which ``rho`` must change for another factorisation to be worth its cost. From one alpha of a path to
        the next ``rho`` changes by its square at most.
    largest_change : float, default=30
        Factor by which moves may change ``rho`` at once: moves that are rounding say nothing of it.
    curvature_change : float, default=0.2
        Mean relative change of the curvatures below which they stay.
    least_curvature : float, default=0.02
        Curvature of a sample's loss at least, as a share of its bound.
    least_margin : float, default=0.1
        Curvature that is reckoned with at least, as a share of the local one: moves may show none.
    safety : float, default=1.3
        Curvature that is reckoned with, over that which moves have shown.
    loss_steps : int, default=10
        Ridge problems within one proximal step on a loss that is not quadratic, at most, where they need no product.
    loss_accuracy : float, default=0.1
        Move of the last of them over that of all that ends them.
    """

    over_relaxation: float = 1.7
    memory: int = 8
    bold: float = 3.0
    threshold: float = 10 / 3
    independent_threshold: float = 2.0
    correlated_threshold: float = 5.0
    near_threshold: float = 1.5
    independent: float = 1.7
    correlated: float = 8.0
    first_share: float = 0.25
    adapt_at: tuple[int, ...] = (5, 15, 25, 40, 70, 100, 200, 400, 800)
    refactor: float = 2.2
    largest_change: float = 30.0
    curvature_change: float = 0.2
    least_curvature: float = 0.02
    least_margin: float = 0.1
    safety: float = 1.3
    loss_steps: int = 10
    loss_accuracy: float = 0.1

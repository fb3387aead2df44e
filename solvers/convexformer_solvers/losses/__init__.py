"""Losses by name. A new one is a class in a file of its own and a line of ``LOSSES``; ``check_loss`` tests it."""

from __future__ import annotations

from convexformer_solvers.validation import shown

from .base import Loss
from .classification import Logistic, Softmax, SquaredHinge
from .regression import Huber, Poisson, Squared

LOSSES: dict[str, type[Loss]] = {
    "squared": Squared,
    "huber": Huber,
    "logistic": Logistic,
    "squared_hinge": SquaredHinge,
    "softmax": Softmax,
    "poisson": Poisson,
}


def get_loss(loss: str | Loss) -> Loss:
    """The loss of a registered name, or the instance itself.

    Parameters
    ----------
    loss : str or Loss
        A key of ``LOSSES`` or an instance, for example ``Huber(delta=0.5)``.

    Returns
    -------
    Loss

    Raises
    ------
    ValueError
        If it is neither.

    Examples
    --------
    >>> get_loss("squared")
    Squared()
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]()
    raise ValueError(f"loss must be one of {sorted(LOSSES)} or a Loss instance, got {shown(loss)}")

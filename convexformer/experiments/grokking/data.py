"""Tables of division modulo p, split in two, as the methods take them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from convexformer.datasets import ModularArithmetic, make_modular_arithmetic


@dataclass(frozen=True)
class Part:
    """Some rows of the table.

    Attributes
    ----------
    symbols : Tensor of int64 of shape (N, 2)
        The operands.
    labels : Tensor of int64 of shape (N,)
        Their quotients.
    """

    symbols: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Split:
    """One half of the table to train on and the other to test on.

    Attributes
    ----------
    p : int
        Modulus, and number of symbols and of labels.
    seed : int
        What drew the split.
    fraction : float
        Share of the table to train on.
    device : str or None
        Where the tensors are.
    train, test : Part
        The rows.
    """

    p: int
    seed: int
    fraction: float
    device: str | None
    train: Part
    test: Part

    @property
    def targets(self) -> Tensor:
        """Labels to train on as one-hot rows, shape ``(N, p)``, float32."""
        return torch.nn.functional.one_hot(self.train.labels, self.p).float()

    def waves(self) -> ModularArithmetic:
        """The same split with waves over discrete logarithms as tokens, in float64; for odd prime `p`."""
        return make_modular_arithmetic(self.p, "/", fraction=self.fraction, encoding="fourier", random_state=self.seed)


def make_split(p: int, seed: int, fraction: float = 0.5, device: str | None = None) -> Split:
    """Draw a split of the table of division.

    Parameters
    ----------
    p : int
        Modulus; where it is composite, divisors are those coprime to it.
    seed : int
        Of the split.
    fraction : float, default=0.5
        Share of the table to train on.
    device : str, optional
        Where tensors go. Default: the CPU.

    Returns
    -------
    Split

    Examples
    --------
    >>> split = make_split(15, seed=0)
    >>> split.train.symbols.shape, split.targets.shape
    (torch.Size([60, 2]), torch.Size([60, 15]))
    """
    data = make_modular_arithmetic(p, "/", fraction=fraction, random_state=seed)

    def part(symbols: Any, labels: Any) -> Part:
        return Part(torch.as_tensor(symbols, device=device), torch.as_tensor(labels, device=device))

    train, test = part(data.X_train, data.y_train), part(data.X_test, data.y_test)
    return Split(p, seed, fraction, device, train, test)


def describe_table(p: int, fraction: float = 0.5) -> dict[str, Any]:
    """What the table of a modulus holds, for the report.

    Parameters
    ----------
    p : int
        Modulus.
    fraction : float, default=0.5
        Share to train on.

    Returns
    -------
    dict
        ``p``, ``rows``, ``training_rows``, ``divisors``, and ``usual_ceiling``: the best accuracy that any function of
        the operands could have on the table of the usual recipe, which is not used.

    Examples
    --------
    >>> table = describe_table(15)
    >>> table["rows"], table["divisors"], round(table["usual_ceiling"], 3)
    (120, [1, 2, 4, 7, 8, 11, 13, 14], 0.695)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the ambiguous rows and absent labels of the usual recipe
        usual = make_modular_arithmetic(p, "/", distinct=False, random_state=0)
    divisors = [b for b in range(1, p) if gcd(b, p) == 1]
    rows = p * len(divisors)
    return {
        "p": p,
        "rows": rows,
        "training_rows": round(fraction * rows),
        "divisors": divisors if len(divisors) < p - 1 else [],
        "usual_ceiling": usual.label_ceiling,
    }

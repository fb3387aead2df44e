"""Tables of modular arithmetic, split into a part to train on and the rest: the data of experiments on grokking."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from convexformer.validation import check_optional_counts, check_stream, is_integer, is_one_of, is_prime
from convexformer_solvers.validation import as_dtype, is_real

Operation = Literal["+", "-", "x", "/"]
Encoding = Literal["index", "one_hot", "fourier"]

_DEFAULT_N_FREQUENCIES = 5


@dataclass(frozen=True, eq=False, repr=False)
class ModularArithmetic:
    """A table of one operation modulo `p` in two parts; the tokens of a row are its two operands.

    Parameters
    ----------
    X_train : ndarray of shape (N_train, 2, d), or of int of shape (N_train, 2) when `encoding` is "index"
        Operands to train on, encoded: ``d`` is `p` for "one_hot"; for "fourier" it is ``2 * F``, with ``F`` the number
        of `frequencies`, and one more for multiplication and division.
    X_test : ndarray
        The other operands, of the same kind.
    y_train : ndarray of int of shape (N_train,)
        Results of the operation, 0 to ``p - 1``.
    y_test : ndarray of int of shape (N_test,)
        Those of the other operands.
    operands_train : ndarray of int of shape (N_train, 2)
        The operands themselves.
    operands_test : ndarray of int of shape (N_test, 2)
        Those of the other part.
    p : int
        Modulus.
    operation : {"+", "-", "x", "/"}
        What is done to the operands.
    encoding : {"index", "one_hot", "fourier"}
        How `X_train` and `X_test` stand for the operands.
    label_ceiling : float
        Best accuracy that any function of the inputs can have on both parts together: 1.0 unless the same inputs come
        with several labels.
    frequencies : tuple of int or None
        Frequencies of the waves, when `encoding` is "fourier"; columns ``2 * f`` and ``2 * f + 1`` belong to
        ``frequencies[f]``.
    columns : tuple of str or None
        What each of the ``d`` columns holds for a symbol ``a``, when `encoding` is "fourier".
    primitive_root : int or None
        Base of the discrete logarithms, when `encoding` is "fourier" and `operation` is "x" or "/".

    Examples
    --------
    >>> make_modular_arithmetic(97, random_state=0)
    ModularArithmetic(a / b modulo 97, 4656 rows to train on, 4656 to test on, encoding='index')
    """

    X_train: NDArray
    X_test: NDArray
    y_train: NDArray[np.int64]
    y_test: NDArray[np.int64]
    operands_train: NDArray[np.int64]
    operands_test: NDArray[np.int64]
    p: int
    operation: Operation
    encoding: Encoding
    label_ceiling: float
    frequencies: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    primitive_root: int | None = None

    @property
    def n_classes(self) -> int:
        """Number of labels: `p`, since every residue is a result somewhere in the table."""
        return self.p

    @property
    def class_counts(self) -> dict[str, NDArray[np.int64]]:
        """Rows of each label, shape ``(n_classes,)``, in the part ``"train"`` and in the part ``"test"``."""
        return {
            "train": np.bincount(self.y_train, minlength=self.p),
            "test": np.bincount(self.y_test, minlength=self.p),
        }

    def __repr__(self) -> str:
        rows = f"{len(self.y_train)} rows to train on, {len(self.y_test)} to test on"
        return f"ModularArithmetic(a {self.operation} b modulo {self.p}, {rows}, encoding={self.encoding!r})"


def make_modular_arithmetic(
    p: int,
    operation: Operation = "/",
    *,
    fraction: float = 0.5,
    distinct: bool = True,
    encoding: Encoding = "index",
    n_frequencies: int | None = None,
    frequencies: Sequence[int] | Literal["random"] | None = None,
    dtype: Any = None,
    random_state: int | np.random.RandomState | None = None,
) -> ModularArithmetic:
    r"""Make the table of an operation modulo `p` and split its rows at random.

    The data of the experiments on grokking (paper [C], Figs 4 to 7, division modulo 97 and 15). The label of operands
    :math:`a, b` is :math:`y = a \circ b \bmod p`; for division it is the solution of :math:`b y = a \bmod p`.

    Parameters
    ----------
    p : int
        Modulus, at least 2.
    operation : {"+", "-", "x", "/"}, default="/"
        The table of "+", "-" and "x" has all ``p ** 2`` pairs. That of "/" has the pairs whose second operand can be
        divided by, being coprime to `p`: ``p * (p - 1)`` rows for prime `p` (9312 for 97), 120 rows for 15.
    fraction : float, default=0.5
        Share of the rows to train on, rounded to whole rows.
    distinct : bool, default=True
        Whether the pairs of operands are distinct. False matters for division by composite `p` only. It is the usual
        recipe of the literature: for all ``b`` from 1 and ``y`` from 0 to ``p - 1`` the row
        :math:`(b y \bmod p, b) \mapsto y`, which gives the same pair several labels where ``b`` shares a factor with
        `p`. No function of the inputs is then right on all rows, which `label_ceiling` and a warning put in numbers
        (69.5% for 15). No row comes twice; but rows with the same operands and different labels are split like any
        others, so they may be in both parts.
    encoding : {"index", "one_hot", "fourier"}, default="index"
        "index" gives the operands as they are, for embeddings that are learned (for an estimator they would be tokens
        of width 1). "one_hot" gives unit vectors. "fourier" gives, for each frequency :math:`k`, the columns
        :math:`\cos(2 \pi k t / m)` and :math:`\sin(2 \pi k t / m)`: for "+" and "-" with :math:`t = a` and
        :math:`m = p`; for "x" and "/", modulo a prime, with the discrete logarithm :math:`t = \log_g a` to the least
        primitive root :math:`g` and :math:`m = p - 1`. As zero has no logarithm, its waves are zero, and a last column
        is one for zero and zero for all else. The operation is thus a product or quotient of waves: with
        :math:`z(a) = e^{2 \pi i k t / m}`, :math:`z(a / b) = z(a) \overline{z(b)}`.
    n_frequencies : int, optional
        Number of waves for "fourier", at most ``m // 2``. Default: as many as there are `frequencies`, when they are
        given, else 5, or ``m // 2`` where that is less.
    frequencies : sequence of int or "random", optional
        Frequencies for "fourier", from 1 to ``m - 1``, none of them the same as another or its negative modulo ``m``
        (which has the same waves up to sign). "random" draws them. Default: 1, then one after another that with the
        waves so far keeps the two nearest symbols as far apart as possible. Two symbols never have the same waves: this
        holds if and only if no number but 1 divides ``m`` and all frequencies.
    dtype : {"float32", "float64"}, optional
        Floating type of "one_hot" and "fourier" inputs. Default: float64, the precision of certificates.
    random_state : int, RandomState instance or None, default=None
        Draws the split, then the frequencies if they are random: a seed gives the same split in every encoding.

    Returns
    -------
    ModularArithmetic
        Both parts, with counts of classes and a description of the inputs.

    Raises
    ------
    ValueError
        If an argument is outside its range, or given for an encoding it has no meaning for; if a part would be empty;
        if frequencies repeat or give two symbols the same waves; if "fourier" is asked for "x" or "/" with a `p` that
        is not an odd prime, since then there need not be a primitive root, and not all numbers but 0 are its powers.

    Warns
    -----
    UserWarning
        If the same operands have several labels, or no row to train on has some label.

    Examples
    --------
    >>> data = make_modular_arithmetic(97, "/", encoding="fourier", random_state=0)
    >>> data.X_train.shape, data.frequencies, data.columns[0], data.columns[-1]
    ((4656, 2, 11), (1, 3, 10, 19, 34), 'cos(2 pi 1 log_5(a) / 96)', 'a is 0')
    >>> (a, b), y = data.operands_train.T, data.y_train
    >>> bool((b * y % 97 == a).all())
    True
    """
    p, fraction = _check(p, operation, fraction, distinct, encoding)
    if encoding != "fourier":
        _refuse(encoding, n_frequencies=n_frequencies, frequencies=frequencies)
    if encoding == "index":
        _refuse(encoding, dtype=dtype)
    precision = np.float32 if as_dtype(dtype, torch.float64) == torch.float32 else np.float64
    generator = check_stream(random_state)
    operands, labels = _table(p, operation, distinct)
    ceiling = len(np.unique(operands, axis=0)) / len(operands)
    if ceiling < 1:
        _warn_of_ambiguous(p, operands, ceiling)
    train, test = _split(len(labels), fraction, generator)
    _warn_of_absent(labels[train], p)
    description: dict[str, Any] = {}
    inputs: NDArray[Any] = operands
    if encoding == "one_hot":
        inputs = np.eye(p, dtype=precision)[operands]
    elif encoding == "fourier":
        symbols, description = _fourier(p, operation, n_frequencies, frequencies, generator)
        inputs = symbols.astype(precision)[operands]
    return ModularArithmetic(
        X_train=inputs[train],
        X_test=inputs[test],
        y_train=labels[train],
        y_test=labels[test],
        operands_train=operands[train],
        operands_test=operands[test],
        p=p,
        operation=operation,
        encoding=encoding,
        label_ceiling=ceiling,
        **description,
    )


def _check(p: Any, operation: Any, fraction: Any, distinct: Any, encoding: Any) -> tuple[int, float]:
    """Refuse wrong arguments; modulus and fraction as Python numbers."""
    if not is_integer(p, 2):
        raise ValueError(f"p must be an integer of at least 2, got {p!r}")
    if not is_one_of(operation, get_args(Operation)):
        raise ValueError(f"operation must be '+', '-', 'x' (for multiplication) or '/', got {operation!r}")
    if not (is_real(fraction) and 0 < float(fraction) < 1):
        raise ValueError(f"fraction must be a number between 0 and 1, both excluded, got {fraction!r}")
    if not isinstance(distinct, (bool, np.bool_)):
        raise ValueError(f"distinct must be True or False, got {distinct!r}")
    if not is_one_of(encoding, get_args(Encoding)):
        raise ValueError(f"encoding must be 'index', 'one_hot' or 'fourier', got {encoding!r}")
    return int(p), float(fraction)


def _refuse(encoding: Encoding, **arguments: Any) -> None:
    """Refuse arguments that an encoding would ignore."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} has no meaning for encoding={encoding!r} and must be None, got {value!r}")


def _table(p: int, operation: Operation, distinct: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Operands ``(N, 2)`` and labels ``(N,)`` of all rows, in rising order."""
    first, second = (grid.ravel() for grid in np.meshgrid(np.arange(p), np.arange(p), indexing="ij"))
    if operation == "/":
        # Written as a = b y, each row has one label whatever p is; the recipe keeps all b but 0.
        label, b = first, second
        kept = np.gcd(b, p) == 1 if distinct else b > 0
        a, b, label = (label * b % p)[kept], b[kept], label[kept]
        order = np.lexsort((label, b, a))
        return np.stack([a[order], b[order]], axis=1), label[order]
    results = {"+": first + second, "-": first - second, "x": first * second}
    return np.stack([first, second], axis=1), results[operation] % p


def _split(n_rows: int, fraction: float, generator: np.random.RandomState) -> tuple[NDArray, NDArray]:
    """Positions of the two parts in random order."""
    n_train = round(fraction * n_rows)
    if not 0 < n_train < n_rows:
        raise ValueError(f"fraction={fraction} leaves one part of the {n_rows} rows empty; take it nearer to 0.5")
    order = generator.permutation(n_rows)
    return order[:n_train], order[n_train:]


def _warn_of_ambiguous(p: int, operands: NDArray[np.int64], ceiling: float) -> None:
    pairs, counts = np.unique(operands, axis=0, return_counts=True)
    warnings.warn(
        f"p={p} is not prime: {(counts > 1).sum()} of the {len(pairs)} pairs of operands have several labels, so no "
        f"function of the inputs can be right on more than {ceiling:.1%} of the {len(operands)} rows, and the same "
        "pair may be in both parts; distinct=True keeps to divisors coprime to p, with one label each",
        UserWarning,
        stacklevel=3,
    )


def _warn_of_absent(labels: NDArray[np.int64], p: int) -> None:
    absent = np.setdiff1d(np.arange(p), labels)
    if absent.size:
        shown = ", ".join(map(str, absent[:10])) + (", ..." if absent.size > 10 else "")
        warnings.warn(
            f"{absent.size} of the {p} classes ({shown}) have no row to train on; take a larger fraction or another "
            "random_state",
            UserWarning,
            stacklevel=3,
        )


def _fourier(
    p: int, operation: Operation, n_frequencies: Any, frequencies: Any, generator: np.random.RandomState
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Waves ``(p, d)`` of all symbols, and their description."""
    root = None if operation in ("+", "-") else _primitive_root(p, operation)
    order = p if root is None else p - 1
    chosen = _frequencies(order, n_frequencies, frequencies, generator)
    elements, exponent = np.arange(order), "a"
    if root is not None:
        elements, exponent = np.array([pow(root, t, p) for t in range(order)]), f"log_{root}(a)"
    # Reduced first, so that angles are as exact for high frequencies as for low ones.
    angles = 2 * np.pi * (np.outer(np.arange(order), chosen) % order) / order
    table = np.zeros((p, 2 * len(chosen) + (root is not None)))
    table[elements, : 2 * len(chosen)] = np.stack([np.cos(angles), np.sin(angles)], axis=2).reshape(order, -1)
    columns = [f"{wave}(2 pi {k} {exponent} / {order})" for k in chosen for wave in ("cos", "sin")]
    if root is not None:
        table[0, -1] = 1.0
        columns.append("a is 0")
    return table, {"frequencies": chosen, "columns": tuple(columns), "primitive_root": root}


def _primitive_root(p: int, operation: Operation) -> int:
    """The least number whose powers are all residues but 0."""
    if p == 2 or not is_prime(p):
        raise ValueError(
            f"encoding='fourier' with operation={operation!r} needs discrete logarithms, so p must be an odd prime, "
            f"got {p}; take encoding='index' or 'one_hot'"
        )
    divisors = [divisor for divisor in range(2, p) if (p - 1) % divisor == 0]
    return next(g for g in range(2, p) if all(pow(g, (p - 1) // divisor, p) != 1 for divisor in divisors))


def _frequencies(order: int, n_frequencies: Any, frequencies: Any, generator: np.random.RandomState) -> tuple[int, ...]:
    """Frequencies of waves on a cyclic group of this order that separate its elements."""
    available = order // 2
    check_optional_counts(n_frequencies=n_frequencies)
    if n_frequencies is not None and n_frequencies > available:
        raise ValueError(f"n_frequencies must be at most {available}, half the period {order}, got {n_frequencies}")
    count = min(_DEFAULT_N_FREQUENCIES, available) if n_frequencies is None else int(n_frequencies)
    if frequencies is None:
        return _spread_frequencies(order, count)
    if isinstance(frequencies, str) and frequencies == "random":
        return _random_frequencies(order, count, generator)
    chosen = _check_frequencies(order, frequencies)
    if n_frequencies not in (None, len(chosen)):
        raise ValueError(f"n_frequencies={n_frequencies} contradicts the {len(chosen)} frequencies that are given")
    return chosen


def _spread_frequencies(order: int, count: int) -> tuple[int, ...]:
    """1, then greedily those for which the two nearest elements are farthest apart; in rising order."""
    candidates = np.arange(1, order // 2 + 1)
    # Squared distances of elements that differ by d are sums of 2 - 2 cos(2 pi k d / order).
    cosines = np.cos(2 * np.pi * (np.outer(candidates, candidates) % order) / order)
    chosen, likeness = [0], cosines[0]
    for _ in range(count - 1):
        nearest = (likeness + cosines).max(axis=1).round(9)  # rounded so that ties go to the lower frequency
        nearest[chosen] = np.inf
        chosen.append(int(nearest.argmin()))
        likeness = likeness + cosines[chosen[-1]]
    return tuple(sorted(int(candidates[i]) for i in chosen))


def _random_frequencies(order: int, count: int, generator: np.random.RandomState) -> tuple[int, ...]:
    """A draw among all sets of this size that separate the elements, in rising order."""
    while True:
        drawn = 1 + generator.permutation(order // 2)[:count]
        if gcd(order, *drawn.tolist()) == 1:
            return tuple(sorted(drawn.tolist()))


def _check_frequencies(order: int, frequencies: Any) -> tuple[int, ...]:
    """Given frequencies, if they are distinct up to sign and separate the elements."""
    message = f"frequencies must be None, 'random' or a sequence of integers from 1 to {order - 1}, got {frequencies!r}"
    if isinstance(frequencies, str) or not isinstance(frequencies, (Sequence, np.ndarray)) or not len(frequencies):
        raise ValueError(message)
    if not all(is_integer(k, 1) and k < order for k in frequencies):
        raise ValueError(message)
    chosen = tuple(int(k) for k in frequencies)
    if len({min(k, order - k) for k in chosen}) < len(chosen):
        raise ValueError(
            f"frequencies must not hold a k twice, nor k and {order} - k (one wave up to sign), got {frequencies!r}"
        )
    divisor = gcd(order, *chosen)
    if divisor > 1:
        raise ValueError(
            f"frequencies={frequencies!r} give different symbols the same waves, since {divisor} divides all of them "
            f"and the period {order}; add one that is coprime to {divisor}"
        )
    return chosen

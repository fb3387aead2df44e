"""Attention maps: those of students for all positions, beside the teacher's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import entr, rel_entr

from convexformer.estimators.sequence import ConvexSequenceRegressor
from convexformer.nn import SoftmaxAttention
from convexformer.programs.sequence import sequence_program

from .baselines import SoftmaxChoice, train_softmax_sequence
from .data import Part, Split, r2_and_error
from .settings import StudentTeacherSettings
from .watch import outputs_of

TEACHER, CONVEX, SOFTMAX = "teacher", "convex, single row", "softmax attention"
SMOOTHING = 0.01
_AT_ONCE = 256


def compare_maps(
    teacher: NDArray, choice: SoftmaxChoice, split: Split, settings: StudentTeacherSettings, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train students for all positions and compare their attention maps with the teacher's.

    Parameters
    ----------
    teacher : ndarray of shape (N, n, n)
        Attention of the teacher on the training sentences, mean over its heads.
    choice : SoftmaxChoice
        Settings of the softmax student.
    split : Split
        The data, with targets at all positions.
    settings : StudentTeacherSettings
        Grids and tolerances.
    seed : int
        Of initial weights.

    Returns
    -------
    rows : list of dict
        Similarity of each map to the teacher's, with the uniform map and that of each position to itself as
        baselines; each figure also without the first position, see ``without_first``. And ``positions``, see
        ``positions_read``.
    maps : dict
        The maps by name, rows summing to 1; none of a softmax student that diverged.
    """
    convex = _solve_sequence(split, settings)
    softmax = train_softmax_sequence(choice, split, settings, seed)
    n_tokens = teacher.shape[1]
    maps = {
        TEACHER: normalise_rows(teacher.mean(axis=0)),
        CONVEX: normalise_rows(convex.attention_map_),
    }
    baselines = {"uniform": np.full((n_tokens, n_tokens), 1 / n_tokens), "each position itself": np.eye(n_tokens)}
    test_r2 = {CONVEX: _r2(convex.predict(split.test.tokens), split.test)}
    if softmax is not None:
        maps[SOFTMAX] = normalise_rows(_mean_attention(softmax, split.train.tokens, settings.device))
        test_r2[SOFTMAX] = _r2(outputs_of(softmax, split.test.tokens, settings.device), split.test)
    rows = [
        {
            "student": name,
            "seed": seed,
            **similarity(maps[TEACHER], student),
            **{
                f"{figure}_without_first": value
                for figure, value in similarity(without_first(maps[TEACHER]), without_first(student)).items()
            },
            "positions": positions_read(student),
            "test_r2": test_r2.get(name),
        }
        for name, student in (maps | baselines).items()
        if name != TEACHER
    ]
    n_heads = int(np.linalg.norm(convex.coef_, axis=2).astype(bool).sum())  # one per group that is not zero
    rows[0] |= {"alpha": convex.alpha, "relative_gap": convex.certificate_.relative_gap, "heads": n_heads}
    return rows, {name: values.tolist() for name, values in maps.items()}


def normalise_rows(weights: NDArray) -> NDArray[np.float64]:
    """Rows scaled to sum 1; a row of zeros, which reads nothing, becomes uniform.

    Parameters
    ----------
    weights : ndarray of shape (T, n)
        Non-negative.

    Returns
    -------
    ndarray of shape (T, n)

    Examples
    --------
    >>> normalise_rows(np.array([[1.0, 3.0], [0.0, 0.0]]))
    array([[0.25, 0.75],
           [0.5 , 0.5 ]])
    """
    weights = np.asarray(weights, dtype=np.float64)
    sums = weights.sum(axis=1, keepdims=True)
    return np.where(sums > 0, weights / np.where(sums > 0, sums, 1), 1 / weights.shape[1])


def without_first(weights: NDArray) -> NDArray[np.float64]:
    """The map among all positions but the first, rows scaled to sum 1 again.

    The first token of BERT's kin, ``[CLS]``, is nearly the same vector in all sentences: a teacher's head that reads
    it does little more than add a constant, which students have as a bias.

    Parameters
    ----------
    weights : ndarray of shape (n, n)
        A map.

    Returns
    -------
    ndarray of shape (n - 1, n - 1)
    """
    return normalise_rows(weights[1:, 1:])


def similarity(teacher: NDArray, student: NDArray) -> dict[str, float | None]:
    r"""Compare two attention maps whose rows sum to 1.

    Parameters
    ----------
    teacher, student : ndarray of shape (n, n)
        The maps.

    Returns
    -------
    dict
        ``pearson`` over all entries and ``pearson_off_diagonal`` without the diagonal, None where one map is
        constant; ``kl``, the mean over rows of the divergence :math:`\sum_k t_k \log(t_k / s_k)` of the student mixed
        with 1% of the uniform map, so that it stays finite.

    Examples
    --------
    >>> uniform = np.full((3, 3), 1 / 3)
    >>> similarity(uniform, uniform)
    {'pearson': None, 'pearson_off_diagonal': None, 'kl': 0.0}
    """
    off = ~np.eye(len(teacher), dtype=bool)
    smooth = (1 - SMOOTHING) * student + SMOOTHING / teacher.shape[1]
    return {
        "pearson": _pearson(teacher.ravel(), student.ravel()),
        "pearson_off_diagonal": _pearson(teacher[off], student[off]),
        "kl": abs(float(rel_entr(teacher, smooth).sum(axis=1).mean())),
    }


def positions_read(weights: NDArray) -> float:
    r"""Positions that a row of a map reads, in the mean over rows: the exponential of its entropy.

    It is ``m`` where a row spreads evenly over ``m`` positions, and less where some of these have most of the weight.

    Parameters
    ----------
    weights : ndarray of shape (T, n)
        A map, whose rows sum to 1.

    Returns
    -------
    float

    Examples
    --------
    >>> round(positions_read(np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])), 6)
    1.5
    """
    return float(np.exp(entr(weights).sum(axis=1)).mean())


def _pearson(left: NDArray, right: NDArray) -> float | None:
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def _solve_sequence(split: Split, settings: StudentTeacherSettings) -> ConvexSequenceRegressor:
    """The certified student whose alpha validates best."""
    tokens, y = split.train.tensors(settings.device)
    alpha_max = sequence_program(tokens, y, alpha=1.0, fit_intercept=True).alpha_max
    best, best_r2 = ConvexSequenceRegressor(), -math.inf
    for ratio in settings.map_alpha_ratios:
        model = ConvexSequenceRegressor(ratio * alpha_max, tol=settings.search_tol, device=settings.device)
        model.fit(*split.train)
        r2 = _r2(model.predict(split.validation.tokens), split.validation)
        if r2 > best_r2:
            best, best_r2 = model, r2
    return best


def _r2(outputs: NDArray, part: Part) -> float:
    return r2_and_error(outputs.reshape(part.y.shape), part.y)[0]


@torch.no_grad()
def _mean_attention(network: SoftmaxAttention, tokens: NDArray[np.float32], device: str | None) -> NDArray[np.float64]:
    """Mean attention over samples and heads."""
    parts = torch.as_tensor(tokens).split(_AT_ONCE)
    return np.sum([network.attention(part.to(device)).double().mean(1).sum(0).cpu() for part in parts], 0) / len(tokens)

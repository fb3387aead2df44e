"""Baselines of the convex students: softmax attention, ridge regression and a group lasso of another package."""

from __future__ import annotations

import math
import time
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Ridge

from convexformer.heads.attention import Heads
from convexformer.nn import SoftmaxAttention, TrainingHistory, train
from convexformer.nn.modules.softmax_attention import DecayOn

from .convex_students import Solved, row_of_heads
from .data import Part, Split, r2_and_error
from .rows import Curve, Row
from .settings import StudentTeacherSettings
from .watch import TestScores, outputs_of

SOFTMAX, RIDGE = "softmax attention", "ridge regression"
DECAYS: tuple[DecayOn, ...] = ("all", "values", "none")
_GROUP_LASSO = "celer"


class SoftmaxChoice(NamedTuple):
    """Settings of a trained softmax student.

    Attributes
    ----------
    decay_on : {"all", "values", "none"}
        Weights with decay.
    alpha, learning_rate : float
        As chosen; the alpha per output.
    validation_r2 : float
        What they reached; minus infinity where training diverged.
    """

    decay_on: DecayOn
    alpha: float
    learning_rate: float
    validation_r2: float


def train_softmax(
    decay_on: DecayOn, split: Split, settings: StudentTeacherSettings, seed: int
) -> tuple[Row, Curve, SoftmaxChoice]:
    """Train softmax attention for one position with every learning rate and alpha, and keep what validates best.

    The number of steps, too, is chosen on the validation sentences, as early stopping.

    Parameters
    ----------
    decay_on : {"all", "values", "none"}
        Weights with decay.
    split : Split
        The data.
    settings : StudentTeacherSettings
        Grids, budget and size.
    seed : int
        Of the initial weights.

    Returns
    -------
    row, curve, choice
    """
    best: tuple[SoftmaxAttention, TrainingHistory, float, TestScores] | None = None
    seconds = 0.0
    for alpha in (0.0,) if decay_on == "none" else settings.softmax_alphas:
        scores = TestScores(split.test, settings.device, settings.n_steps)
        network = _new_network(split, settings, decay_on, seed, position=settings.target_position)
        history = _fit(network, split, settings, alpha, settings.softmax_learning_rates, scores)
        seconds += history.total_seconds
        if best is None or history.score < best[1].score:
            best = network, history, alpha, scores
    assert best is not None
    network, history, alpha, scores = best
    test_r2, test_error = r2_and_error(outputs_of(network, split.test.tokens, settings.device), split.test.y)
    validation = outputs_of(network, split.validation.tokens, settings.device)
    row = Row(
        model=SOFTMAX,
        method=f"Adam, decay on {decay_on}",
        seed=seed,
        alpha=alpha * split.train.y.shape[1],
        learning_rate=history.lr,
        objective=history.final_objective,
        choice_seconds=seconds - history.seconds[-1],
        fit_seconds=history.seconds[-1],
        steps=history.kept_step,
        heads=settings.softmax_heads,
        tokens=split.train.tokens.shape[1],  # no weight of a softmax is zero
        validation_r2=r2_and_error(validation, split.validation.y)[0],
        test_r2=test_r2,
        test_error=test_error,
    )
    if history.diverged:
        row = row.of_diverged()
    curve = Curve(row.model, row.method, [], [], *scores.curve(history, row.test_r2))
    validation_r2 = -math.inf if row.validation_r2 is None else row.validation_r2
    return row, curve, SoftmaxChoice(decay_on, alpha, history.lr, validation_r2)


def train_softmax_sequence(
    choice: SoftmaxChoice, split: Split, settings: StudentTeacherSettings, seed: int
) -> SoftmaxAttention | None:
    """Train softmax attention for all positions with the settings that were chosen for one.

    Parameters
    ----------
    choice : SoftmaxChoice
        The settings.
    split : Split
        The data, with targets at all positions.
    settings : StudentTeacherSettings
        Budget and size.
    seed : int
        Of the initial weights.

    Returns
    -------
    SoftmaxAttention or None
        None where training diverged.
    """
    network = _new_network(split, settings, choice.decay_on, seed, position=None)
    history = _fit(network, split, settings, choice.alpha, (choice.learning_rate,))
    return None if history.diverged else network


def _new_network(
    split: Split, settings: StudentTeacherSettings, decay_on: DecayOn, seed: int, position: int | None
) -> SoftmaxAttention:
    return SoftmaxAttention(
        split.train.tokens.shape[2],
        split.train.y.shape[-1],
        n_heads=settings.softmax_heads,
        head_width=settings.softmax_head_width,
        position=position,
        decay_on=decay_on,
        seed=seed,
    ).to(settings.device)


def _fit(
    network: SoftmaxAttention,
    split: Split,
    settings: StudentTeacherSettings,
    alpha: float,
    rates: tuple[float, ...],
    scores: TestScores | None = None,
) -> TrainingHistory:
    return train(
        network,
        *split.train.tensors(settings.device),
        alpha=alpha * split.train.y[0].size,
        lr=rates,
        n_steps=settings.n_steps,
        validation=split.validation.tensors(settings.device),
        patience=settings.n_steps + 1,  # never stops, but keeps what validates best
        callback=None if scores is None else scores.of(network),
    )


def fit_ridge(own_token: bool, split: Split, settings: StudentTeacherSettings, seed: int) -> Row:
    """Ridge regression on the flattened tokens, or on the token at the target's position alone.

    Parameters
    ----------
    own_token : bool
        Whether only that token is seen.
    split : Split
        The data.
    settings : StudentTeacherSettings
        Grid.
    seed : int
        Of the split, for the row.

    Returns
    -------
    Row
    """

    def features(part: Part) -> NDArray:
        return part.tokens[:, settings.target_position] if own_token else part.tokens.reshape(len(part.tokens), -1)

    best, best_r2, seconds = Ridge(), -math.inf, []
    for alpha in settings.ridge_alphas:
        began = time.perf_counter()
        model = Ridge(alpha).fit(features(split.train).astype(np.float64), split.train.y)
        seconds.append(time.perf_counter() - began)
        validation_r2 = r2_and_error(_columns(model.predict(features(split.validation))), split.validation.y)[0]
        if validation_r2 > best_r2:
            best, best_r2 = model, validation_r2
    fit_seconds = seconds[settings.ridge_alphas.index(best.alpha)]
    test_r2, test_error = r2_and_error(_columns(best.predict(features(split.test))), split.test.y)
    return Row(
        model=RIDGE,
        method="own token" if own_token else "all tokens",
        seed=seed,
        alpha=best.alpha,
        choice_seconds=sum(seconds) - fit_seconds,
        fit_seconds=fit_seconds,
        tokens=1 if own_token else split.train.tokens.shape[1],
        validation_r2=best_r2,
        test_r2=test_r2,
        test_error=test_error,
    )


def _columns(outputs: NDArray) -> NDArray:
    """Predictions with an axis of outputs, which Ridge drops for a single one."""
    return outputs.reshape(len(outputs), -1)


def missing_group_lasso() -> str | None:
    """Why no group lasso of another package is run, or None if one is."""
    return None if find_spec(_GROUP_LASSO) else f"group lasso of {_GROUP_LASSO}: not installed (pip install celer)"


def fit_group_lasso(solved: Solved, split: Split, settings: StudentTeacherSettings) -> Row:
    """Solve the program with l1-output decay by ``celer``, which it separates into one group lasso per output.

    Parameters
    ----------
    solved : Solved
        The certified student of that class, whose ``alpha`` is taken.
    split : Split
        The data.
    settings : StudentTeacherSettings
        Tolerance.

    Returns
    -------
    Row
    """
    model = solved.model
    shape = split.train.tokens.shape[1:]
    began = time.perf_counter()
    flat = split.train.tokens.reshape(len(split.train.tokens), -1).astype(np.float64)
    coef, intercept = _celer(flat, split.train.y, shape[1], model.alpha, settings.tol)
    seconds = time.perf_counter() - began
    heads = Heads.from_coef(coef.reshape(*shape, -1), intercept, alpha=model.alpha, penalty=model.penalty_)
    return row_of_heads(
        heads,
        lambda part: heads.predict(part.tokens),
        solved,
        split,
        method=f"{_GROUP_LASSO}, per output",
        choice_seconds=0.0,
        fit_seconds=seconds,
    )


def _celer(X: NDArray, y: NDArray, width: int, alpha: float, tol: float) -> tuple[NDArray, NDArray]:
    """Coefficients and bias; centred data stand in for the bias."""
    package: Any = import_module(_GROUP_LASSO)
    mean_x, mean_y = X.mean(0), y.mean(0)
    centred = np.asfortranarray(X - mean_x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the objective says how far it came
        model = package.GroupLasso(groups=width, alpha=alpha, tol=tol, max_iter=1000, fit_intercept=False)
        coef = np.stack([model.fit(centred, column).coef_ for column in (y - mean_y).T], axis=1)
    return coef, mean_y - mean_x @ coef

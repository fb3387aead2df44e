"""Students with fixed attention: certified solutions of three convex programs, and the same networks under Adam."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import check_random_state

from convexformer.estimators.attention import ConvexAttentionRegressor
from convexformer.gates import Gates, GaussianGates, TrainingData
from convexformer.heads.attention import Heads
from convexformer.nn import ConvexAttention, TrainingHistory, train
from convexformer.programs.attention import attention_program
from convexformer.programs.build import attention_map
from convexformer_solvers import LinearMap, Progress, alpha_grid, get_solver, iterate_path

from .data import Part, Split, r2_and_error
from .rows import Curve, Row
from .settings import StudentTeacherSettings
from .watch import TestScores, outputs_of


@dataclass(frozen=True)
class ProgramClass:
    """A class of networks that a convex program solves.

    Attributes
    ----------
    name : str
        For people.
    penalty : str
        Convex form of the decay.
    gated : bool
        Whether heads have fixed gates.
    """

    name: str
    penalty: str
    gated: bool = False


CLASSES = (
    ProgramClass("attention, l1-output decay", "group_l2"),
    ProgramClass("attention, standard decay", "nuclear"),
    ProgramClass("gated attention, l1-output decay", "group_l2", gated=True),
)
CERTIFIED, TUNED, SAME_SECONDS = "convex, certified", "Adam", "Adam, seconds of convex"


@dataclass(frozen=True)
class Solved:
    """A certified student.

    Attributes
    ----------
    row, curve : Row, Curve
        What is reported.
    model : ConvexAttentionRegressor
        The fitted estimator.
    """

    row: Row
    curve: Curve
    model: ConvexAttentionRegressor


def solve_class(kind: ProgramClass, split: Split, settings: StudentTeacherSettings, seed: int) -> Solved:
    """Choose ``alpha`` on the validation sentences along a path, then solve from zero to ``settings.tol``.

    Parameters
    ----------
    kind : ProgramClass
        Which class of networks.
    split : Split
        The data.
    settings : StudentTeacherSettings
        Grids and tolerances.
    seed : int
        Draws the gates.

    Returns
    -------
    Solved
    """
    began = time.perf_counter()
    gates = _draw_gates(split.train, settings.n_gates, seed) if kind.gated else None
    alpha, validation_r2 = _choose_alpha(kind, gates, split, settings)
    choice_seconds = time.perf_counter() - began
    options: dict[str, Any] = {"penalty": kind.penalty, "device": settings.device}
    if gates is not None:
        options |= {"activation": "gated_relu", "gates": gates}
    watch = _Watch(_linear_map(split.test, gates, settings.device), split.test.y)
    model = ConvexAttentionRegressor(alpha, tol=settings.tol, callback=watch, **options).fit(*split.train)
    seconds = time.perf_counter() - watch.began
    certificate = model.certificate_
    test_r2, test_error = r2_and_error(model.predict(split.test.tokens), split.test.y)
    row = Row(
        model=kind.name,
        method=CERTIFIED,
        seed=seed,
        alpha=alpha,
        objective=certificate.primal,
        dual_bound=certificate.dual,
        ratio=1.0,
        excess=certificate.gap,
        choice_seconds=choice_seconds,
        fit_seconds=seconds,
        steps=model.n_iter_,
        heads=len(model.heads_),
        tokens=int(np.count_nonzero(model.token_norms_)),
        validation_r2=validation_r2,
        test_r2=test_r2,
        test_error=test_error,
    )
    curve = Curve(
        kind.name,
        CERTIFIED,
        [*watch.seconds, seconds],
        [*(primal - certificate.dual for primal in watch.primal), certificate.gap],
        [*watch.seconds, seconds],
        [*watch.scores, test_r2],
    )
    return Solved(row, curve, model)


def train_class(
    kind: ProgramClass, solved: Solved, split: Split, settings: StudentTeacherSettings, seed: int
) -> tuple[list[Row], list[Curve]]:
    """Train the network with the heads, gates and ``alpha`` of the certified solution by Adam.

    Once with ``settings.n_steps`` for each learning rate, once with the seconds of the convex fit for each, and a
    cosine that falls to zero within them.

    Parameters
    ----------
    kind : ProgramClass
        Which class of networks.
    solved : Solved
        Its certified student.
    split : Split
        The data.
    settings : StudentTeacherSettings
        Grids and budget.
    seed : int
        Of the initial weights.

    Returns
    -------
    rows, curves
        Objectives are computed in float64 from the heads of the trained network.
    """
    scores = TestScores(split.test, settings.device, settings.n_steps)
    network, history = _train(kind, solved, split, settings, seed, n_steps=settings.n_steps, scores=scores)
    tuned = _network_row(TUNED, network, history, solved, split, settings)
    per_step = history.seconds[-1] / history.steps[-1] if history.steps[-1] else math.inf
    seconds = solved.row.fit_seconds
    n_steps = max(1, math.ceil(seconds / per_step))
    limited_network, limited = _train(kind, solved, split, settings, seed, n_steps=n_steps, seconds=seconds)
    rows = [tuned, _network_row(SAME_SECONDS, limited_network, limited, solved, split, settings)]
    # the last objective of a run that diverged is infinite or nan, which JSON does not have
    finite = [math.isfinite(value) for value in history.objective]
    excess = [value - solved.model.certificate_.dual for value in compress(history.objective, finite)]
    curve = Curve(
        kind.name, TUNED, list(compress(history.seconds, finite)), excess, *scores.curve(history, tuned.test_r2)
    )
    return rows, [curve]


def _draw_gates(train_part: Part, n_gates: int, seed: int) -> Gates:
    """Gates that differ on the training samples and let some through."""
    tokens = torch.as_tensor(train_part.tokens)
    drawn = GaussianGates(n_gates).make(TrainingData(tokens), check_random_state(seed))
    return drawn.select(drawn.distinct(drawn.masks(tokens)))


def _linear_map(part: Part, gates: Gates | None, device: str | None) -> LinearMap:
    """From coefficients to outputs of the network on some samples."""
    tokens = torch.as_tensor(part.tokens, device=device)
    return attention_map(tokens, gates)


def _choose_alpha(
    kind: ProgramClass, gates: Gates | None, split: Split, settings: StudentTeacherSettings
) -> tuple[float, float]:
    """The alpha with the best validation R2, and that R2; the solutions of the path are not kept."""
    tokens = torch.as_tensor(split.train.tokens, device=settings.device)
    program = attention_program(tokens, split.train.y, alpha=1.0, penalty=kind.penalty, gates=gates, fit_intercept=True)
    alphas = alpha_grid(program.alpha_max, settings.n_alphas, settings.alpha_ratio)
    validation_map = _linear_map(split.validation, gates, settings.device)
    scores = []
    for result in iterate_path(program, get_solver("auto"), alphas, tol=settings.search_tol):
        outputs = _outputs(validation_map, result.coef, result.intercept)
        scores.append(r2_and_error(outputs, split.validation.y)[0])
    best = int(np.argmax(scores))
    return alphas[best], scores[best]


def _outputs(linear_map: LinearMap, coef: torch.Tensor, intercept: torch.Tensor) -> NDArray[np.float64]:
    return (linear_map.matvec(coef.to(linear_map.dtype)) + intercept).cpu().double().numpy()


class _Watch:
    """Callback of a convex fit: seconds without its own, objectives and test scores."""

    def __init__(self, test_map: LinearMap, targets: NDArray[np.float64]) -> None:
        self.test_map, self.targets = test_map, targets
        self.seconds: list[float] = []
        self.primal: list[float] = []
        self.scores: list[float] = []
        self.began = time.perf_counter()  # later by what each call takes

    def __call__(self, progress: Progress) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.primal.append(progress.certificate.primal)
        self.scores.append(r2_and_error(_outputs(self.test_map, progress.coef, progress.intercept), self.targets)[0])
        self.began += time.perf_counter() - now


def _train(
    kind: ProgramClass,
    solved: Solved,
    split: Split,
    settings: StudentTeacherSettings,
    seed: int,
    *,
    n_steps: int,
    seconds: float | None = None,
    scores: TestScores | None = None,
) -> tuple[ConvexAttention, TrainingHistory]:
    heads = solved.model.heads_
    network = ConvexAttention(
        heads.w1.shape[1],
        heads.w2.shape[1],
        heads.w3.shape[1],
        n_heads=max(1, len(heads)),
        gates=heads.gates,
        gate_index=heads.gate_index if len(heads) else None,
        seed=seed,
    ).to(settings.device)
    history = train(
        network,
        *split.train.tensors(settings.device),
        penalty=kind.penalty,
        alpha=heads.alpha,
        lr=settings.learning_rates,
        n_steps=n_steps,
        seconds=seconds,
        callback=None if scores is None else scores.of(network),
    )
    return network, history


def _network_row(
    method: str,
    network: ConvexAttention,
    history: TrainingHistory,
    solved: Solved,
    split: Split,
    settings: StudentTeacherSettings,
) -> Row:
    model = solved.model
    row = row_of_heads(
        Heads.from_torch(network, alpha=model.alpha, loss=model.loss_, penalty=model.penalty_),
        lambda part: outputs_of(network, part.tokens, settings.device),
        solved,
        split,
        method=method,
        learning_rate=history.lr,
        choice_seconds=history.total_seconds - history.seconds[-1],
        fit_seconds=history.seconds[-1],
        steps=history.steps[-1],
    )
    return row.of_diverged() if history.diverged else row


def row_of_heads(heads: Heads, predict: Callable[[Part], NDArray], solved: Solved, split: Split, **own: Any) -> Row:
    """Row of a network of the class of a certified student, with what else is known of it.

    Parameters
    ----------
    heads : Heads
        The network, of which the objective is taken.
    predict : callable
        Gives its outputs on a part of the split.
    solved : Solved
        The certified student.
    split : Split
        The data.
    **own
        Method, seconds and other entries of the row.

    Returns
    -------
    Row
    """
    certificate, objective = solved.model.certificate_, heads.objective(*split.train)
    test_r2, test_error = r2_and_error(predict(split.test), split.test.y)
    return Row(
        model=solved.row.model,
        seed=solved.row.seed,
        alpha=solved.model.alpha,
        objective=objective,
        dual_bound=certificate.dual,
        ratio=objective / certificate.primal,
        excess=objective - certificate.dual,
        heads=len(heads),
        tokens=int(heads.w1.any(axis=0).sum()),
        validation_r2=r2_and_error(predict(split.validation), split.validation.y)[0],
        test_r2=test_r2,
        test_error=test_error,
        **own,
    )

"""Methods that learn an embedding under a convex block; the block alone is convex."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.embedded import EmbeddedProblem, EmbeddedState, random_tables, train_by_projection, train_jointly
from convexformer.gates import FourierGates, TrainingData
from convexformer.solvers import get_loss, get_penalty

from .data import Split
from .settings import GrokkingSettings
from .watch import Watch

STRUCTURE = (
    "none of the group: the embedding is learned; gates that each look at one pair of its features at one token; "
    "sizes, alpha and learning rates were set by hand, by test accuracy on seeds 10 to 13 for p = 97, and not searched"
)


def project(
    split: Split, settings: GrokkingSettings, seed: int, choice: tuple[float, float] | None, watch: Watch
) -> dict[str, Any]:
    """Variable projection: the block is solved at each step of the embedding. Its steps are those of the embedding.

    An embedding is found under much decay, which keeps the block from memorising. What is looked at is the block solved
    on it once more with little, to a certified gap; those iterations are counted.
    """
    problem = _problem(split, settings, seed)
    tables, largest = _start(problem, seed)
    shown = _Shown(watch, settings, settings.learned_last_ratio * largest)
    state = train_by_projection(
        problem,
        tables,
        alpha=settings.learned_first_ratio * largest,
        n_steps=watch.n_steps,
        lr=settings.projection_rate,
        head_steps=settings.head_steps,
        callback=shown,
    )
    return _described(state) | {
        "alpha": shown.alpha,
        "relative_gap": shown.relative_gap,
        "certified_steps": state.step,
        "certified_seconds": watch.looks[-1].seconds,
    }


class _Shown:
    """Shows blocks of little decay on embeddings to the watch, and counts what they take."""

    def __init__(self, watch: Watch, settings: GrokkingSettings, alpha: float) -> None:
        self.watch, self.settings, self.alpha = watch, settings, alpha
        self.n_iterations, self.relative_gap = 0, 0.0

    def __call__(self, state: EmbeddedState) -> None:
        between = state.step % self.settings.projection_look_every and state.step < self.watch.n_steps
        if between or state.step == 0:  # a block on random tokens takes long to solve and memorises
            return
        result = state.certified_head(self.settings.greedy_tol, self.alpha, max_iter=self.settings.max_iter)
        self.n_iterations += result.n_iter
        self.relative_gap = max(self.relative_gap, result.certificate.relative_gap)
        _look(
            replace(
                state,
                problem=state.problem.double(),
                tables=state.tables.double(),
                coef=result.coef,
                head_steps=state.head_steps + self.n_iterations,
                gradient_evaluations=state.gradient_evaluations + self.n_iterations,
            ),
            self.watch,
        )


def join(
    split: Split, settings: GrokkingSettings, seed: int, choice: tuple[float, float] | None, watch: Watch
) -> dict[str, Any]:
    """Embedding and block trained together, the block by proximal Adam as in the paper, the embedding by Muon."""
    problem = _problem(split, settings, seed)
    tables, largest = _start(problem, seed)
    state = train_jointly(
        problem,
        tables,
        alpha=settings.learned_last_ratio * largest,
        first_alpha=settings.learned_first_ratio * largest,
        hold_steps=settings.joint_hold,
        fall_steps=settings.joint_hold,
        n_steps=watch.n_steps,
        optimizer="muon",
        lr=settings.joint_rate,
        head_lr=settings.joint_head_rate,
        seed=seed,
        look_every=watch.look_every,
        callback=lambda state: _look(state, watch),
    )
    return _described(state)


def _problem(split: Split, settings: GrokkingSettings, seed: int) -> EmbeddedProblem:
    shape = TrainingData(torch.zeros(1, 2, settings.learned_width))
    gates = FourierGates(settings.learned_gates).make(shape, np.random.RandomState(seed))
    loss, penalty = get_loss("softmax"), get_penalty("nuclear")
    return EmbeddedProblem(split.train.symbols, split.targets, gates, loss, penalty, split.p)


def _start(problem: EmbeddedProblem, seed: int) -> tuple[Tensor, float]:
    """Random embedding, and the weight of the penalty from which on the block on it is zero."""
    tables = random_tables(problem, seed)
    return tables, problem.program(tables, 1.0).alpha_max


def _look(state: EmbeddedState, watch: Watch) -> bool:
    return watch.look(
        lambda: (state.outputs(), state.outputs(watch.split.test.symbols)),
        step=state.step,
        head_steps=state.head_steps,
        gradient_evaluations=round(state.gradient_evaluations),
    )


def _described(state: EmbeddedState) -> dict[str, Any]:
    return {
        "alpha": state.alpha,
        "batch_size": len(state.problem.symbols),
        "parameters": math.prod(state.coef.shape) + state.tables.numel(),
        "structure": STRUCTURE,
    }

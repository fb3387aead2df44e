"""Methods that learn an embedding under a convex block; the block alone is convex."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.embedded import (
    EmbeddedProblem,
    EmbeddedState,
    random_tables,
    train_by_projection,
    train_jointly,
)
from convexformer.gates import FourierGates, TrainingData
from convexformer.solvers import get_loss, get_penalty

from .data import Split
from .settings import GrokkingSettings
from .watch import Watch

# Steps of the embedding between looks; each holds many of the block.
_LOOK_EVERY = 5

STRUCTURE = (
    "none of the group: the embedding is learned; gates that each look at one pair of its features at one token; alpha "
    "and the learning rate were set by hand on seed 0 and not searched"
)


def project(
    split: Split, settings: GrokkingSettings, seed: int, choice: tuple[float, float] | None, watch: Watch
) -> dict[str, Any]:
    """Variable projection: the block is solved at each step of the embedding. Its steps are those of the embedding.

    The last look is at the block solved once more, to a certified gap and with less decay than the embedding needed.
    """
    problem = _problem(split, settings, seed)
    tables, largest = _start(problem, seed)
    alpha = settings.learned_last_ratio * largest

    def look(state: EmbeddedState) -> None:
        if state.step % _LOOK_EVERY == 0:
            _look(state, watch)

    state = train_by_projection(
        problem,
        tables,
        alpha=settings.learned_first_ratio * largest,
        n_steps=watch.n_steps,
        lr=settings.projection_rate,
        head_steps=settings.head_steps,
        callback=look,
    )
    result = state.certified_head(settings.greedy_tol, alpha, max_iter=settings.max_iter)
    double = state.problem.double(), state.tables.double()
    last = replace(
        state,
        problem=double[0],
        tables=double[1],
        coef=result.coef,
        alpha=alpha,
        head_steps=state.head_steps + result.n_iter,
        gradient_evaluations=state.gradient_evaluations + result.n_iter,
    )
    _look(last, watch)
    return _described(last) | {
        "relative_gap": result.certificate.relative_gap,
        "certified_steps": state.step,
        "certified_seconds": watch.looks[-1].seconds,
    }


def join(
    split: Split, settings: GrokkingSettings, seed: int, choice: tuple[float, float] | None, watch: Watch
) -> dict[str, Any]:
    """Embedding and block trained together by proximal Adam, as in the paper."""
    problem = _problem(split, settings, seed)
    tables, largest = _start(problem, seed)
    rows = len(problem.symbols)
    state = train_jointly(
        problem,
        tables,
        alpha=settings.learned_last_ratio * largest,
        first_alpha=settings.learned_first_ratio * largest,
        hold_steps=settings.joint_hold,
        fall_steps=settings.joint_hold,
        n_steps=watch.n_steps,
        batch_size=settings.batch_size if settings.batch_size < rows else None,
        seed=seed,
        look_every=watch.look_every,
        callback=lambda state: _look(state, watch),
    )
    return _described(state) | {"batch_size": min(settings.batch_size, rows)}


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

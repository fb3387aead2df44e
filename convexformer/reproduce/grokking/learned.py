"""Methods that learn an embedding under a convex block; the block alone is convex."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

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
    """Variable projection: the block is solved at each step of the embedding. Its steps are those of the embedding."""
    problem = _problem(split, settings, seed)
    state = train_by_projection(
        problem,
        **_common(problem, settings, seed),
        hold_steps=settings.projection_hold,
        fall_steps=settings.projection_fall,
        n_steps=watch.n_steps,
        lr=settings.projection_rate,
        head_steps=settings.head_steps,
        callback=lambda state: _look(state, watch) if state.step % _LOOK_EVERY == 0 else None,
    )
    # Embedding and gates held, the block is a convex program.
    certificate = state.certified_head(settings.greedy_tol, max_iter=settings.max_iter).certificate
    return _described(state, settings) | {"relative_gap": certificate.relative_gap}


def join(
    split: Split, settings: GrokkingSettings, seed: int, choice: tuple[float, float] | None, watch: Watch
) -> dict[str, Any]:
    """Embedding and block trained together by proximal Adam, as in the paper."""
    problem = _problem(split, settings, seed)
    rows = len(problem.symbols)
    state = train_jointly(
        problem,
        **_common(problem, settings, seed),
        hold_steps=settings.joint_hold,
        fall_steps=settings.joint_hold,
        n_steps=watch.n_steps,
        batch_size=settings.batch_size if settings.batch_size < rows else None,
        look_every=watch.look_every,
        callback=lambda state: _look(state, watch),
    )
    return _described(state, settings) | {"batch_size": min(settings.batch_size, rows)}


def _problem(split: Split, settings: GrokkingSettings, seed: int) -> EmbeddedProblem:
    shape = TrainingData(torch.zeros(1, 2, settings.learned_width))
    gates = FourierGates(settings.learned_gates).make(shape, np.random.RandomState(seed))
    loss, penalty = get_loss("softmax"), get_penalty("nuclear")
    return EmbeddedProblem(split.train.symbols, split.targets, gates, loss, penalty, split.p)


def _common(problem: EmbeddedProblem, settings: GrokkingSettings, seed: int) -> dict[str, Any]:
    tables = random_tables(problem, seed)
    largest = problem.program(tables, 1.0).alpha_max
    ratios = settings.learned_last_ratio, settings.learned_first_ratio
    return {"tables": tables, "seed": seed, "alpha": ratios[0] * largest, "first_alpha": ratios[1] * largest}


def _look(state: EmbeddedState, watch: Watch) -> bool:
    return watch.look(
        lambda: (state.outputs(), state.outputs(watch.split.test.symbols)),
        step=state.step,
        head_steps=state.head_steps,
        gradient_evaluations=round(state.gradient_evaluations),
    )


def _described(state: EmbeddedState, settings: GrokkingSettings) -> dict[str, Any]:
    return {
        "alpha": state.alpha,
        "batch_size": len(state.problem.symbols),
        "parameters": math.prod(state.coef.shape) + state.tables.numel(),
        "structure": STRUCTURE,
    }

"""Methods that are convex programs on given tokens: waves over discrete logarithms, and gates of one frequency each."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from convexformer import GreedyConvexTransformerClassifier
from convexformer.gates import FourierGates, Gates, TrainingData
from convexformer.programs.attention import attention_program
from convexformer.programs.build import attention_map
from convexformer.solvers import Fista, Program, Progress, solve

from .data import Split
from .settings import GrokkingSettings
from .watch import Watch


def structure(p: int, n_gates: int, frequencies: tuple[int, ...], root: int) -> str:
    """What a convex program was told of the task.

    Examples
    --------
    >>> structure(97, 60, (1, 3), 5)  # doctest: +ELLIPSIS
    'the multiplicative group modulo 97 through discrete logarithms to base 5 (tokens are waves of frequencies 1, 3 ...'
    """
    shown = ", ".join(map(str, frequencies))
    return (
        f"the multiplicative group modulo {p} through discrete logarithms to base {root} (tokens are waves of "
        f"frequencies {shown} over them, and a column that marks zero), and {n_gates} gates per layer that each look "
        "at one frequency of one token; not the operation, nor which gates or frequencies go with which label"
    )


class _Problem(NamedTuple):
    tokens: Tensor
    test: Tensor
    source: FourierGates
    gates: Gates
    program: Program
    description: dict[str, Any]


def _problem(split: Split, settings: GrokkingSettings, n_gates: int, seed: int) -> _Problem:
    """Tokens, gates and the program of a layer, with `alpha` as the settings want it."""
    waves = split.waves()
    assert waves.frequencies is not None
    assert waves.primitive_root is not None
    tokens, test = (torch.as_tensor(X, device=split.device) for X in (waves.X_train, waves.X_test))
    source = FourierGates(n_gates, frequencies=range(len(waves.frequencies)))
    gates = source.make(TrainingData(tokens), np.random.RandomState(seed))
    program = attention_program(
        tokens, split.targets.double(), alpha=1.0, loss="softmax", penalty="nuclear", gates=gates
    )
    program = replace(program, alpha=settings.alpha_ratio * program.alpha_max)
    description = {
        "alpha": program.alpha,
        "batch_size": len(tokens),
        "structure": structure(split.p, n_gates, waves.frequencies, waves.primitive_root),
    }
    return _Problem(tokens, test, source, gates, program, description)


def solve_fourier(
    split: Split, settings: GrokkingSettings, seed: int, choice: tuple[float, float] | None, watch: Watch
) -> dict[str, Any]:
    """Solve the fully convex program to its certified gap; its steps are iterations of FISTA."""
    problem = _problem(split, settings, settings.n_gates, seed)
    test_map = attention_map(problem.test, problem.gates, n_outputs=split.p)

    def look(progress: Progress) -> None:
        coef = progress.coef
        watch.look(lambda: (problem.program.map.matvec(coef), test_map.matvec(coef)), step=progress.iteration)

    result = solve(problem.program, Fista(), tol=settings.tol, max_iter=watch.n_steps, callback=look)
    return {
        "relative_gap": result.certificate.relative_gap,
        "certified_steps": result.n_iter,
        "certified_seconds": watch.looks[-1].seconds,
        "parameters": math.prod(result.coef.shape),
        **problem.description,
    }


def solve_greedy(
    n_layers: int, split: Split, settings: GrokkingSettings, seed: int, choice: tuple[float, float] | None, watch: Watch
) -> dict[str, Any]:
    """Train layers one after another, each a convex program on the tokens and what the layers before say.

    There is one look per layer; its steps are the iterations of all layers so far.
    """
    problem = _problem(split, settings, settings.greedy_gates, seed)
    ends: list[float] = []
    began = time.perf_counter()

    def note(progress: Progress) -> None:
        if progress.iteration <= last[0]:
            ends.append(last[1])
        last[:] = progress.iteration, time.perf_counter() - began

    last = [0.0, 0.0]
    model = GreedyConvexTransformerClassifier(
        problem.program.alpha,
        n_layers=n_layers,
        loss="softmax",
        penalty="nuclear",
        gates=problem.source,
        solver="fista",
        tol=settings.greedy_tol,
        max_iter=watch.n_steps,
        fit_intercept=False,
        random_state=seed,
        callback=note,
    ).fit(problem.tokens, split.train.labels.cpu().numpy())
    steps = np.cumsum([layer.n_iter_ for layer in model.layers_]).tolist()
    for number, step in enumerate(steps, start=1):
        watch.look(partial(_both, model.first_layers(number), problem, split.p), step=step)
    watch.correct_seconds(steps, [*ends, last[1]])
    return {
        "relative_gap": max(certificate.relative_gap for certificate in model.certificates_),
        "certified_steps": steps[-1],
        "certified_seconds": last[1],
        "parameters": sum(math.prod(layer.coef_.shape) for layer in model.layers_),
        **problem.description,
    }


def _both(model: Any, problem: _Problem, p: int) -> tuple[Tensor, Tensor]:
    return _all_labels(model, problem.tokens, p), _all_labels(model, problem.test, p)


def _all_labels(model: Any, tokens: Tensor, p: int) -> Tensor:
    """Outputs for all labels; one that no row to train on has gets the least output of all."""
    scores = torch.as_tensor(model.decision_function(tokens), device=tokens.device)
    outputs = scores.min(1, keepdim=True).values.repeat(1, p)
    outputs[:, torch.as_tensor(model.classes_, device=scores.device)] = scores
    return outputs

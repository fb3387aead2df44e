"""Random programs of odd shapes, with the faults that data have, and some that are hard for one reason each."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from convexformer_solvers import LOSSES, PENALTIES, DenseMap, GatedMap, LinearMap, Program, get_loss, get_penalty

from .cells import simulate

FAULTS = ["none", "badly scaled columns", "duplicated tokens", "constant token", "zero rows", "collinear groups"]
# Samples, tokens, features, outputs, gates.
SHAPES = [(5, 1, 1, 1, 0), (30, 12, 7, 2, 0), (200, 3, 4, 3, 0), (40, 4, 5, 1, 9), (150, 2, 3, 2, 4)]


class Case(NamedTuple):
    """A program with its name and the family that it is of."""

    family: str
    name: str
    program: Program


def random_program(
    shape: tuple[int, ...], loss: str, penalty: str, fault: str, ratio: float, intercept: bool, seed: int
) -> Program:
    """A program of a shape (samples, tokens, features, outputs, gates) with one fault, at a share of alpha_max."""
    n_samples, n_tokens, d, c, n_gates = shape
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn((n_samples, n_tokens, d), generator=generator, dtype=torch.float64)
    data = _spoiled(data + 0.5 * data[:, :1], fault, generator)
    linear_map: LinearMap = DenseMap(data)
    if n_gates:
        linear_map = GatedMap(data, torch.rand((n_samples, n_gates), generator=generator) < 0.5)
    y = get_loss(loss).example_target(n_samples, c if loss != "softmax" else max(c, 2), generator)
    return _program(linear_map, y, loss, penalty, ratio, intercept)


def _program(linear_map: LinearMap, y: Tensor, loss: str, penalty: str, ratio: float, intercept: bool) -> Program:
    program = Program(linear_map, y, get_loss(loss), get_penalty(penalty), 1.0, fit_intercept=intercept)
    # Where nothing but the constant is left to explain, alpha_max is rounding.
    return program.with_alpha(ratio * max(program.alpha_max, 1e-6))


def _spoiled(data: Tensor, fault: str, generator: torch.Generator) -> Tensor:
    if fault == "badly scaled columns":
        return data * 10.0 ** torch.empty(data.shape[1:]).uniform_(-3, 3, generator=generator).double()
    if fault == "duplicated tokens":
        return data[:, torch.randint(data.shape[1], (data.shape[1],), generator=generator)]
    if fault == "constant token":
        data[:, 0] = 1.0
    if fault == "zero rows":
        data[: len(data) // 3] = 0.0
    if fault == "collinear groups":
        mixing = torch.randn((data.shape[2], data.shape[2]), generator=generator, dtype=data.dtype)
        data[:, -1] = data[:, 0] @ mixing
    return data


def _correlated(n_samples: int, n_tokens: int, d: int, correlation: float, seed: int) -> tuple[Tensor, torch.Generator]:
    """Tokens that follow each other with a correlation, and where more randomness comes from."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn((n_samples, n_tokens, d), generator=generator, dtype=torch.float64)
    for token in range(1, n_tokens):
        data[:, token] = correlation * data[:, token - 1] + (1 - correlation**2) ** 0.5 * data[:, token]
    return data, generator


def large_shapes(count: int, largest_size: float) -> Iterator[tuple[int, int, int, int, int]]:
    """Shapes drawn evenly on a logarithmic scale whose data, coefficients and gated products are not too large."""
    stream = random.Random(0)

    def drawn(low: int, high: int) -> int:
        return round(math.exp(stream.uniform(math.log(low), math.log(high))))

    while count:
        n_samples, n_tokens, d, c = drawn(100, 50_000), drawn(1, 512), drawn(1, 768), drawn(1, 100)
        n_gates = drawn(1, 1000) if stream.random() < 0.3 else 0
        sizes = (n_samples * n_tokens * d, n_tokens * d * c * (n_gates or 1), n_samples * c * (n_gates or 1))
        if max(sizes) <= largest_size < 100 * max(sizes):
            count -= 1
            yield n_samples, n_tokens, d, c, n_gates


def small() -> Iterator[Case]:
    """Every fault, shape and penalty, with two of the losses each."""
    for fault, shape, penalty in itertools.product(FAULTS, SHAPES, PENALTIES):
        for seed, loss in enumerate(LOSSES):
            if (seed + FAULTS.index(fault) + SHAPES.index(shape)) % 3 == 0:
                program = random_program(shape, loss, penalty, fault, (0.1, 0.01)[seed % 2], bool(seed % 3), seed)
                yield Case("small", f"{fault} {shape} {penalty} {loss}", program)


def large(count: int = 24, largest_size: float = 1e6) -> Iterator[Case]:
    """Random large shapes."""
    for number, shape in enumerate(large_shapes(count, largest_size)):
        loss, fault = list(LOSSES)[number % len(LOSSES)], FAULTS[(number // 2) % len(FAULTS)]
        ratio, intercept = (0.1, 0.01)[number % 2], bool(number % 3)
        program = random_program(shape, loss, "group_l2", fault, ratio, intercept, number)
        yield Case("large", f"{shape} {loss} {fault}", program)


def weak() -> Iterator[Case]:
    """Correlated tokens at weak regularisation, all losses and penalties."""
    shapes = ((80, 10, 4, 3), (300, 16, 16, 5))
    for (n, tokens, d, c), loss, penalty, ratio in itertools.product(shapes, LOSSES, PENALTIES, (1e-2, 1e-3, 1e-4)):
        data, generator = _correlated(n, tokens, d, 0.8, 0)
        y = get_loss(loss).example_target(n, c, generator)
        yield Case("weak", f"{n} {loss} {penalty} {ratio}", _program(DenseMap(data), y, loss, penalty, ratio, True))


def far_targets() -> Iterator[Case]:
    """Huber's loss with targets many thresholds away."""
    shapes = ((500, 16, 8), (200, 20, 16), (1000, 8, 8))
    for (n, tokens, d), spread, ratio in itertools.product(shapes, (10, 1e2, 1e3, 1e4, 1e5), (0.1, 0.01)):
        data, generator = _correlated(n, tokens, d, 0.5, 1)
        data = data + 0.5 * data[:, :1]
        y = data.flatten(1) @ torch.randn((tokens * d, 1), generator=generator, dtype=torch.float64)
        y = spread * (y / y.std() + 0.5 * torch.randn((n, 1), generator=generator, dtype=torch.float64))
        program = _program(DenseMap(data), y, "huber", "group_l2", ratio, True)
        yield Case("far targets", f"{n} {spread:g} {ratio}", program)


def other_losses() -> Iterator[Case]:
    """The cells with other losses, and their gated data in three classes."""
    for cell, ratio in itertools.product("EF", (0.1, 0.01)):
        scores, linear_map = simulate("E").y[:, 0], simulate(cell).program(ratio).map
        labels = np.digitize(scores, np.quantile(scores, (1 / 3, 2 / 3)))
        y = torch.as_tensor(np.eye(3)[labels])
        program = _program(linear_map, y, "softmax", "group_l2", ratio, True)
        yield Case("other losses", f"{cell} softmax {ratio}", program)
    for cell, loss, ratio in itertools.product("ABEF", ("huber", "squared_hinge", "logistic"), (0.1, 0.01)):
        instance = simulate(cell)
        y = torch.as_tensor(instance.y)
        y = y - y.median()
        y = 4 * y / y.std() if loss == "huber" else torch.where(y > 0, 1.0, -1.0).double()
        linear_map = instance.program(ratio).map
        yield Case("other losses", f"{cell} {loss} {ratio}", _program(linear_map, y, loss, "group_l2", ratio, False))


def odd_units() -> Iterator[Case]:
    """One feature in another unit than all others, and features with large means."""
    for seed, factor, loss in itertools.product(range(2), (1e2, 1e3, 1e5), ("squared", "logistic")):
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn((60, 5, 3), generator=generator, dtype=torch.float64)
        y = data[:, 2] @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
        data[:, :, 0] *= factor
        y = y + 0.1 * torch.randn(60, 1, generator=generator)
        y = y if loss == "squared" else torch.where(y > 0, 1.0, -1.0).double()
        program = Program(DenseMap(data), y, get_loss(loss), get_penalty("group_l2"), alpha=0.05)
        program = program.with_alpha(min(0.05, 0.5 * program.alpha_max))
        yield Case("odd units", f"factor {factor:g} {loss} {seed}", program)
    losses = ("squared", "huber", "logistic", "squared_hinge", "softmax")
    for mean, loss, shape in itertools.product((30, 1e3, 1e5, 1e8), losses, ((100, 5, 4), (1000, 40, 16))):
        if mean <= 1e4 or shape[0] == 100:
            data, generator = _correlated(*shape, 0.3, 2)
            y = get_loss(loss).example_target(shape[0], 2, generator)
            program = _program(DenseMap(data + mean), y, loss, "group_l2", 0.05, True)
            yield Case("odd units", f"mean {mean:g} {loss} {shape[0]}", program)


def one_output() -> Iterator[Case]:
    """The squared loss with one output, tokens that have a part in common, few blocks and many, all regularisations."""
    shapes = ((300, 128, 1), (1000, 32, 16), (3000, 512, 4), (20_000, 8, 16))
    for (n, tokens, d), ratio in itertools.product(shapes, (0.3, 0.1, 0.03, 0.01, 0.001)):
        generator = torch.Generator().manual_seed(3)
        own, common, noise = (torch.randn(s, generator=generator).double() for s in ((n, tokens, d), (n, 1, d), (n, 1)))
        data, mixing = own + common, torch.randn((3, d, 1), generator=generator).double()
        signal = (data[:, :3, None] @ mixing).sum((1, 2))
        program = _program(DenseMap(data), signal / signal.std() + 0.7 * noise, "squared", "group_l2", ratio, True)
        yield Case("one output", f"{(n, tokens, d)} {ratio}", program)


FAMILIES = {
    "small": small,
    "large": large,
    "weak": weak,
    "far targets": far_targets,
    "other losses": other_losses,
    "odd units": odd_units,
    "one output": one_output,
}


def sweep() -> Iterator[Case]:
    """All families, one after the other."""
    return itertools.chain.from_iterable(family() for family in FAMILIES.values())

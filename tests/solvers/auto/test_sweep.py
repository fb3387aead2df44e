"""The default solver on random programs of odd shapes and with the faults that data have."""

import math
import random
import warnings

import pytest
import torch

from convexformer_solvers import LOSSES, PENALTIES, Auto, DenseMap, GatedMap, Program, get_loss, get_penalty, solve

FAULTS = ["none", "badly scaled columns", "duplicated tokens", "constant token", "zero rows", "collinear groups"]
PARTS = (get_loss("squared"), get_penalty("group_l2"))
SHAPES = [(5, 1, 1, 1, 0), (30, 12, 7, 2, 0), (200, 3, 4, 3, 0), (40, 4, 5, 1, 9), (150, 2, 3, 2, 4)]


def spoiled(data: torch.Tensor, fault: str, generator: torch.Generator) -> torch.Tensor:
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


def random_program(shape, loss, penalty, fault, ratio, intercept, seed):
    n_samples, n_tokens, d, c, n_gates = shape
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn((n_samples, n_tokens, d), generator=generator, dtype=torch.float64)
    data = spoiled(data + 0.5 * data[:, :1], fault, generator)
    linear_map = DenseMap(data)
    if n_gates:
        masks = torch.rand((n_samples, n_gates), generator=generator) < 0.5
        linear_map = GatedMap(data, masks)
    y = get_loss(loss).example_target(n_samples, c if loss != "softmax" else max(c, 2), generator)
    program = Program(linear_map, y, get_loss(loss), get_penalty(penalty), 1.0, fit_intercept=intercept)
    # Where nothing but the constant is left to explain, alpha_max is rounding.
    return program.with_alpha(ratio * max(program.alpha_max, 1e-6))


def large_shapes(count, largest_size):
    """Shapes drawn evenly on a logarithmic scale whose data, coefficients and gated products are not too large."""
    generator = random.Random(0)

    def drawn(low, high):
        return round(math.exp(generator.uniform(math.log(low), math.log(high))))

    while count:
        n_samples, n_tokens, d, c = drawn(100, 50_000), drawn(1, 512), drawn(1, 768), drawn(1, 100)
        n_gates = drawn(1, 1000) if generator.random() < 0.3 else 0
        sizes = (n_samples * n_tokens * d, n_tokens * d * c * (n_gates or 1), n_samples * c * (n_gates or 1))
        if max(sizes) <= largest_size < 100 * max(sizes):
            count -= 1
            yield n_samples, n_tokens, d, c, n_gates


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("penalty", list(PENALTIES))
def test_auto_reaches_1e_6_or_says_why_not(fault, shape, penalty):
    for seed, loss in enumerate(LOSSES):
        if (seed + FAULTS.index(fault) + SHAPES.index(shape)) % 3:  # each loss with each fault and shape in turn
            continue
        ratio, intercept = (0.1, 0.01)[seed % 2], bool(seed % 3)
        program = random_program(shape, loss, penalty, fault, ratio, intercept, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = solve(program, Auto(), tol=1e-6, max_iter=20_000)
        assert result.certificate.relative_gap <= 1e-6
        assert bool(torch.isfinite(result.coef).all())


def pytest_generate_tests(metafunc):
    if "large_shape" in metafunc.fixturenames:
        count, size = metafunc.config.getoption("large_shapes"), metafunc.config.getoption("large_size")
        metafunc.parametrize(("number", "large_shape"), list(enumerate(large_shapes(count, size))))


def test_auto_reaches_1e_6_on_large_shapes(number, large_shape):
    """More and larger ones: ``pytest tests/solvers/auto/test_sweep.py --large-shapes 50 --large-size 3e7``."""
    loss, fault = list(LOSSES)[number % len(LOSSES)], FAULTS[(number // 2) % len(FAULTS)]
    ratio, intercept = (0.1, 0.01)[number % 2], bool(number % 3)
    program = random_program(large_shape, loss, "group_l2", fault, ratio, intercept, number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = solve(program, Auto(), tol=1e-6, max_iter=20_000)
    assert result.certificate.relative_gap <= 1e-6
    assert bool(torch.isfinite(result.coef).all())


@pytest.mark.parametrize("factor", [1e2, 1e3, 1e5, 1e9])
@pytest.mark.parametrize("seed", range(2))
def test_one_feature_of_another_unit_in_all_tokens(seed, factor):
    # The groups of a solution then differ in size by that factor, which no single rho serves.
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn((60, 5, 3), generator=generator, dtype=torch.float64)
    y = data[:, 2] @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    data[:, :, 0] *= factor
    program = Program(DenseMap(data), y + 0.1 * torch.randn(60, 1, generator=generator), *PARTS, alpha=0.05)
    assert solve(program, Auto(), tol=1e-6).certificate.relative_gap <= 1e-6


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("factor", [1e7, 1e9, 1e12])
def test_one_sample_beyond_what_its_precision_tells_apart_still_gives_a_finite_point(factor):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn((60, 5, 3), generator=generator)
    y = (data[:, 2] @ torch.tensor([[1.0], [-2.0], [0.5]])).double()
    data[-1] *= factor
    result = solve(Program(DenseMap(data), y, *PARTS, alpha=0.05, fit_intercept=True), Auto(), max_iter=600)
    assert bool(torch.isfinite(result.coef).all())
    assert result.certificate.relative_gap <= 1

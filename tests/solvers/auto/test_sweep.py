"""The default solver on random programs of odd shapes and with the faults that data have."""

import itertools
import warnings

import pytest
import torch
from benchmark_utils.sweep import FAULTS, SHAPES, large_shapes, random_program
from covering import covering

from convexformer_solvers import LOSSES, PENALTIES, Auto, DenseMap, Program, get_loss, get_penalty, solve

PARTS = (get_loss("squared"), get_penalty("group_l2"))


# Every fault on every shape with every penalty; every loss with every fault, and on every shape with every penalty.
@pytest.mark.parametrize(
    ("fault", "loss", "shape_and_penalty"), covering(FAULTS, LOSSES, itertools.product(SHAPES, PENALTIES))
)
def test_auto_reaches_1e_6_or_says_why_not(fault, loss, shape_and_penalty):
    (shape, penalty), seed = shape_and_penalty, list(LOSSES).index(loss)
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

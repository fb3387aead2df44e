"""What every reduction promises: both values of a point are kept, points go there and back, alpha may change."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from solver_cases import LOSS_NAMES, PENALTY_NAMES, PROPERTY, accepts, make_program, randn

from convexformer_solvers import DenseMap, Fista, GroupNuclear, PerTarget, Point, get_loss, solve
from convexformer_solvers.linalg.gram import SupportGram
from convexformer_solvers.points import dual_of, gap_estimate, objective, own_predictions, with_own_correlation
from convexformer_solvers.reductions.base import Chain
from convexformer_solvers.reductions.blocks import Compress, Restrict
from convexformer_solvers.reductions.center import Center
from convexformer_solvers.reductions.precision import Cast, SinglePrecision
from convexformer_solvers.reductions.weights import DropZeroWeights, SimplePenalty, Targets

BLOCKS = torch.tensor([3, 0, 2])


def compression(program):
    """The squared loss on some blocks, by products of their columns with each other and with the targets."""
    means = program.map.rmatvec(program.weight[:, None])[..., 0].reshape(-1, program.coef_shape[-2])
    means = means if program.fit_intercept else None
    gram = SupportGram(program.map, means).of(BLOCKS, program.weight)
    target = program.null_correlation.reshape(-1, *program.coef_shape[-2:])[BLOCKS].flatten(0, 1)
    return (Compress(BLOCKS, gram, target, None if means is None else means[BLOCKS].flatten()),)


# Each reduction by itself.
SINGLE = {
    "drop_zero_weights": (DropZeroWeights(),),
    "targets": (Targets(),),
    "targets_of_map": (Targets(of_map=True),),
    "simple_penalty": (SimplePenalty(),),
    "center": (Center(),),
    "cast": (Cast(torch.float32),),
    "single_precision": (SinglePrecision(),),
    "restrict": (Restrict(BLOCKS),),
    "compress": compression,
}
# What `solve` and the stages of a plan make of a program.
FIRST = (DropZeroWeights(), SimplePenalty(), Targets())
CHAINS = {
    "in_double": (*FIRST, Center()),
    "in_single": (*FIRST, Center(), SinglePrecision()),
    "cast_at_last": (*FIRST, Cast(torch.float32)),
    "gradient_steps": (DropZeroWeights(), SimplePenalty(), Targets(of_map=True)),
    "on_a_set": (*FIRST, Center(), Restrict(BLOCKS), Center(), SinglePrecision()),
}
NAMES = [*SINGLE, *CHAINS]
FEWER = settings(PROPERTY, max_examples=14)  # for each of as many chains
ON_BLOCKS = ("restrict", "compress", "on_a_set")


@st.composite
def chains(draw, name):
    """A program and the chain of that name, which changes it."""
    loss = "squared" if name == "compress" else draw(st.sampled_from(LOSS_NAMES))
    n_outputs, penalty = draw(st.sampled_from([1, 2])), draw(st.sampled_from(PENALTY_NAMES))
    assume(accepts(get_loss(loss), n_outputs))
    if name == "simple_penalty":
        penalty = GroupNuclear() if n_outputs == 1 else PerTarget(GroupNuclear(), 2)
    gated, intercept = draw(st.booleans()), name == "center" or draw(st.booleans())
    program = make_program(
        loss,
        penalty,
        gated=gated,
        intercept=intercept,
        weighted=True,
        n=draw(st.sampled_from([24, 40])),
        blocks=4,
        c=n_outputs,
        seed=draw(st.integers(0, 50)),
        scale=0.5,
    )
    mean = draw(st.sampled_from([0.0, 10.0]))
    if intercept and not gated:
        program = dataclasses.replace(program, map=DenseMap(program.map.data + mean))
    if name in SINGLE and name != "drop_zero_weights":
        program = program.drop_zero_weights()  # the others come after that
    if name == "targets" or (name in CHAINS and draw(st.booleans())):
        program = program.to(torch.float32)
    if name == "targets_of_map":
        program = dataclasses.replace(program, map=program.map.to(torch.float32))
    reductions = {**SINGLE, **CHAINS}[name]
    chain = Chain.of(program, compression(program) if name == "compress" else reductions)
    assert chain.links
    return chain


def some_point(program, seed, blocks=None):
    """Coefficients, on some blocks, beside the dual point of others; with predictions of each."""
    both = []
    for k in range(2):
        coef = 0.5 * randn(*program.coef_shape, seed=2 * seed + k).to(program.y)
        if blocks is not None:
            others = torch.ones(math.prod(program.coef_shape[:-2]), dtype=torch.bool)
            others[blocks] = False
            coef.view(-1, *coef.shape[-2:])[others] = 0.0
        both.append(coef)
    fitted, pred = (own_predictions(program, coef) for coef in both)
    return with_own_correlation(program, Point(both[0], pred=pred, fitted=fitted))


def rounding_of(chain):
    """Some roundings of the coarsest numbers in a chain; more where roots of Gram matrices are solved with."""
    programs = [chain.original, *(link.program for link in chain.links)]
    n_roundings = 500 if any(isinstance(link.reduction, Compress) for link in chain.links) else 16
    return n_roundings * max(torch.finfo(part.dtype).eps for program in programs for part in (program.y, program.map))


def size_of(program, point):
    """How large the terms of a point's values are, and what a rounding of predictions does to them."""
    y, total = program.y.double(), program.alpha * float(program.penalty.value(point.coef.double()))
    for pred in (point.fitted.double(), point.pred.double()):
        slope = program.loss.gradient(pred, y).abs()
        curvature = program.loss.hessian_product(pred, y, torch.ones_like(pred)).abs()
        sensitive = ((1 + slope + curvature) * (1 + pred.abs() + y.abs()) ** 2).sum(1)
        total += float(program.mean(program.loss.value(pred, y).abs() + sensitive))
    return total


def size_of_products(program, point):
    """The same of the sums that predictions are."""
    numbers = 1 + point.coef.double().abs().sum() + point.pred.double().abs().max() + point.fitted.double().abs().max()
    return float(numbers) * max(1.0, program.map.largest())


def size_of_correlations(program, point):
    """The same of the sums that correlations are, and what a rounding of predictions does to them."""
    pred, y = point.pred.double(), program.y.double()
    slope = float(program.loss.gradient(pred, y).abs().max())
    curvature = float(program.loss.hessian_product(pred, y, torch.ones_like(pred)).abs().max())
    return max(1.0, program.map.largest()) * (slope + (1 + curvature) * size_of_products(program, point))


def values_of(program, point):
    """Objective and dual value, computed in double precision: in single some dual points are outside the domain."""
    exact, point = program.with_float64_targets(), point.in_precision(torch.float64)
    return objective(exact, point), float(exact.dual(dual_of(exact, point)))


def assert_near(found, wanted, bound):
    assert found.shape == wanted.shape
    assert float((found.double() - wanted.double()).abs().max()) <= bound


def assert_is_of(program, point, rounding):
    """Predictions are those of the coefficients and an intercept, the correlation is that of the dual point."""
    counts, exact, point = program.weight > 0, program.with_float64_targets(), point.in_precision(torch.float64)
    shift = (point.fitted - program.map.matvec(point.coef))[counts]
    constant = shift.mean(0) if program.fit_intercept else torch.zeros_like(shift[0])
    assert_near(shift, constant.expand_as(shift), rounding * size_of_products(program, point))
    if point.correlation is not None:
        own = exact.weighted_adjoint(dual_of(exact, point))
        known = point.correlation != 0  # nothing is known of blocks that were left out
        assert_near(point.correlation[known], own[known], rounding * size_of_correlations(program, point))


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(data=st.data(), seed=st.integers(0, 100))
def test_values_of_a_point_are_those_of_its_inverse(name, data, seed):
    chain = data.draw(chains(name))
    program, easier, rounding = chain.original, chain.program, rounding_of(chain)
    point = some_point(easier, seed)
    back = chain.invert(point)
    assert back.coef.shape == program.coef_shape
    bound = rounding * (size_of(easier, point) + size_of(program, back))
    for found, wanted in zip(values_of(program, back), values_of(easier, point), strict=True):
        assert found == pytest.approx(wanted, rel=0, abs=bound)
    assert_is_of(program, back, rounding)


def assert_same_points(found, wanted, counts, blocks, program, rounding):
    """Parts that both have are the same, on samples that count and blocks that are there."""
    of_products, of_correlations = size_of_products(program, wanted), size_of_correlations(program, wanted)
    assert_near(found.coef, wanted.coef, rounding * (1 + float(wanted.coef.abs().max())))
    for name in ("pred", "fitted"):
        values = getattr(found, name)
        if values is not None:
            assert_near(values[counts], getattr(wanted, name)[counts], rounding * of_products)
    if found.correlation is not None:
        parts = (part.reshape(-1, *part.shape[-2:])[blocks] for part in (found.correlation, wanted.correlation))
        assert_near(*parts, rounding * of_correlations)
    assert found.intercept is None
    assert found.dual is None


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(data=st.data(), seed=st.integers(0, 100))
def test_points_come_back(name, data, seed):
    chain = data.draw(chains(name))
    program, rounding = chain.original, rounding_of(chain)
    blocks = BLOCKS if name in ON_BLOCKS else None
    point = some_point(program, seed, blocks)
    back = chain.invert(chain.restrict(point))
    blocks = torch.arange(math.prod(program.coef_shape[:-2])) if blocks is None else blocks
    assert_same_points(back, point, program.weight > 0, blocks, program, rounding)


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(data=st.data(), seed=st.integers(0, 100))
def test_points_of_the_easier_program_come_back(name, data, seed):
    chain = data.draw(chains(name))
    program, rounding = chain.program, rounding_of(chain)
    point = some_point(program, seed)
    back = chain.invert(point)
    if back.correlation is None:  # a reduction that does not hand it on may ask for it on the way there
        back = with_own_correlation(chain.original.with_float64_targets(), back)
    there = chain.restrict(back)
    # The sample of a compressed program that no feature reaches has a prediction of no meaning.
    counts = slice(None) if program.map.rows_are_samples else slice(-1)
    blocks = torch.arange(math.prod(program.coef_shape[:-2]))
    assert_same_points(there, point, counts, blocks, program, rounding)


def products(program):
    """Products of a program's map with some numbers."""
    coef, values = randn(*program.coef_shape, seed=8), randn(*program.y.shape, seed=9)
    return program.map.matvec(coef), program.map.rmatvec(values)


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(data=st.data(), factor=st.sampled_from([0.1, 0.5, 2.0]))
def test_a_chain_at_another_alpha_is_a_fresh_one(name, data, factor):
    chain = data.draw(chains(name))
    reductions = [link.reduction for link in chain.links]
    other = chain.original.with_alpha(factor * chain.original.alpha)
    moved, fresh = chain.with_alpha(other.alpha), Chain.of(other, reductions)
    known = Chain.of(other, reductions, chain)
    assert moved.original.alpha == other.alpha
    point = some_point(chain.program, seed=3)
    for each in (moved, known):
        assert len(each.links) == len(fresh.links)
        for link, afresh, before in zip(each.links, fresh.links, chain.links, strict=True):
            assert link.program.map is before.program.map
            assert link.reduction is afresh.reduction
            here, there = link.program, afresh.program
            assert here.alpha == there.alpha
            assert (here.loss, here.fit_intercept) == (there.loss, there.fit_intercept)
            assert type(here.penalty) is type(there.penalty)
            assert torch.equal(here.y, there.y)
            assert torch.equal(here.weight, there.weight)
            assert here.null_value == there.null_value
            for found, wanted in zip(products(here), products(there), strict=True):
                torch.testing.assert_close(found, wanted)
        for found, wanted in zip(each.invert(point), fresh.invert(point), strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_BLOCKS])
@FEWER
@given(data=st.data())
def test_programs_are_equivalent(name, data):
    chain = data.draw(chains(name))
    program, easier, rounding = chain.original, chain.program, rounding_of(chain)
    constant = Point(torch.zeros(program.coef_shape, dtype=torch.float64))
    pred = program.null_intercept.double().expand_as(program.y)
    size = size_of(program, constant._replace(pred=pred, fitted=pred))
    assert easier.null_value == pytest.approx(program.null_value, rel=0, abs=rounding * size)
    size = size_of_correlations(program, constant._replace(pred=pred, fitted=pred))
    assert easier.alpha_max == pytest.approx(program.alpha_max, rel=0, abs=rounding * size)


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("name", list(CHAINS))
def test_certificates_of_both_programs_bracket_one_optimum(name, loss):
    program = make_program(loss, n=40, blocks=4, intercept=True, weighted=True, scale=0.5)
    if name == "on_a_set":  # whose optimum is that of the others at zero
        program = Chain.of(program, (Restrict(BLOCKS),)).program
    chain = Chain.of(program, CHAINS[name][: 4 if name == "on_a_set" else None])
    here, there = (solve(each, Fista(), tol=1e-5, max_iter=20_000).certificate for each in (program, chain.program))
    rounding = rounding_of(chain) * (1 + abs(here.primal))
    assert here.dual <= there.primal + rounding
    assert there.dual <= here.primal + rounding


@pytest.mark.parametrize("name", list(CHAINS))
@FEWER
@given(data=st.data(), seed=st.integers(0, 100))
def test_the_part_of_a_chain_in_double_precision(name, data, seed):
    chain = data.draw(chains(name))
    if name == "gradient_steps":
        assume(chain.program.y.dtype == torch.float64)
    exact, easier = chain.in_double, chain.program
    assert exact.program.y.dtype == torch.float64
    assert exact.links == chain.links[: len(exact.links)]
    point = some_point(easier, seed)
    between = chain.point_in_double(point)
    for found, wanted in zip(exact.invert(between), chain.invert(point), strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)
    # The gap is that of the easier program, but for rounding there.
    bound = 4 * rounding_of(chain) * (size_of(easier, point) + size_of(exact.program, between))
    wanted = gap_estimate(easier.with_float64_targets(), point.in_precision(torch.float64))
    assert gap_estimate(exact.program, between) == pytest.approx(wanted, rel=0, abs=bound)
    # Products rounded to the precision of the easier one are those of the same program.
    rounded = chain.rounded
    assert rounded.y.dtype == torch.float64
    assert (rounded.alpha, rounded.loss) == (exact.program.alpha, exact.program.loss)
    wanted = exact.program.map.matvec(between.coef)
    found = rounded.map.matvec(between.coef)
    if exact.program.fit_intercept:  # which may have taken the means of the features away
        found, wanted = (values - rounded.weight @ values for values in (found, wanted))
    assert_near(found, wanted, rounding_of(chain) * size_of_products(exact.program, between))


def test_what_two_chains_begin_with_is_made_once():
    program = make_program("squared", n=40, blocks=4, intercept=True, weighted=True)

    def maps(chain):
        return [id(link.program.map) for link in chain.links]

    single = Chain.of(program, CHAINS["in_single"])
    double = Chain.of(program, CHAINS["in_double"], single)
    n_links = len(double.links)
    assert maps(double) == maps(single)[:n_links]
    again = Chain.of(program, CHAINS["in_single"], double)
    assert maps(again)[:n_links] == maps(double)
    assert again.program.map is not single.program.map  # which the chain in double precision does not know
    # Steps that come after another one are made anew.
    assert Chain.of(program, (Center(),), single).program.map is not double.program.map


def test_dual_points_keep_their_digits_where_targets_are_in_single_precision():
    program = make_program("logistic", n=40, blocks=4, intercept=True).to(torch.float32)
    chain = Chain.of(program, (Targets(),))
    point = some_point(chain.program, seed=0)
    back = chain.invert(point)
    assert back.coef.dtype == torch.float32
    assert torch.equal(back.pred, point.pred)
    assert torch.equal(back.fitted, point.fitted)
    assert back.pred.dtype == torch.float64

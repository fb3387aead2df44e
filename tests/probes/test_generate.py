"""The search for weightings: what its ascent raises, and how it sees some of the samples."""

import numpy as np
import pytest
import torch
from probe_cases import ragged_samples
from sklearn.base import BaseEstimator

from convexformer.nn import QueryWeights
from convexformer.preprocessing.checking import check_sequences
from convexformer.probes import generate
from convexformer.probes.generate import DualPoint, Generation, find_weightings
from convexformer.solvers import get_penalty

N = 60


def dual_point(*, unit=1.0, shift=0.0, n_outputs=2, scaled=False):
    samples = check_sequences(BaseEstimator(), [unit * (part + shift) for part in ragged_samples(N)], reset=True)
    values = torch.as_tensor(np.random.default_rng(1).normal(size=(N, n_outputs))) / N
    return DualPoint(samples, values, torch.full((N,), 1 / N).double(), get_penalty("nuclear"), 1e-3 * unit, scaled)


def search(point, kind, **options):
    return find_weightings(point, kind, Generation(**options), 4, np.random.RandomState(0))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kind", "unit"), [("queries", 1.0), ("gates", 1.0), ("gates", 2.0**-12), ("gates", 2.0**12)])
def test_the_ascent_raises_the_dual_norm(kind, unit, scaled):
    point = dual_point(unit=unit, scaled=scaled)
    stays = search(point, kind, step_lengths=(1e-12, 1e-12))
    assert search(point, kind).violation > 1.05 * stays.violation


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shift", [1e2, 1e4])
def test_the_ascent_of_gates_goes_by_the_spread_of_tokens_that_are_far_from_zero(shift, scaled):
    point = dual_point(shift=shift, scaled=scaled)
    stays = search(point, "gates", step_lengths=(1e-12, 1e-12))
    assert search(point, "gates").violation > 1.05 * stays.violation > 0


def test_samples_that_are_drawn_by_their_dual_values_count_by_one_over_their_odds():
    point = dual_point(n_outputs=1)
    some = torch.arange(N)[:, None] % 2  # others are not drawn
    point = point._replace(values=point.values.abs() * some)
    batch = generate._batch(point, Generation(n_samples=20), np.random.RandomState(0))
    torch.testing.assert_close(batch.values, point.values.sum().expand(20, 1) / 20)
    assert batch.weight.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("scaled", [False, True])
def test_all_samples_together_give_the_norms_that_judge(scaled):
    point = dual_point(shift=1.0, scaled=scaled)
    part = QueryWeights(np.random.default_rng(2).normal(size=(5, 4)), 1.0)
    sums, factors = generate._correlations(part, point)
    batch = generate._batch(point, Generation(), np.random.RandomState(0))
    norms = generate._norms_of(batch, point, part(batch.tokens, batch.mask))
    torch.testing.assert_close(norms, generate._dual_norms(point.penalty, sums * factors[:, None, None]))

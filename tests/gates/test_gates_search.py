"""The search for violated constraints: units, parts of the restarts, and what counts as a violation."""

import numpy as np
import pytest
import torch

from convexformer.gates import Gates
from convexformer.gates.search import DualPoint, GateSearch, _directions_between, _smoothed_norms, gate_norms
from convexformer.gates.sources import separating_directions
from convexformer.solvers import get_penalty

N = 40
KNOWN = torch.ones(N, 1, dtype=torch.bool)


def a_point(unit_of_tokens=1.0, unit_of_values=1.0):
    rng = np.random.default_rng(0)
    tokens, values = (torch.as_tensor(rng.normal(size=shape)) for shape in ((N, 3, 2), (N, 2)))
    alpha = 8.0 * unit_of_tokens * unit_of_values
    weight = torch.full((N,), 1 / N, dtype=torch.float64)
    return DualPoint(unit_of_tokens * tokens, unit_of_values * values, get_penalty("nuclear"), alpha, weight)


def search(point, tol=1e-3, **options):
    counts = {"n_restarts": 12, "n_wanted": 6, "random_state": np.random.RandomState(0)}
    return GateSearch(**options).violated(point, KNOWN, None, tol=tol, **counts)


@pytest.mark.parametrize("units", [(2.0**20, 1.0), (2.0**-20, 1.0), (1.0, 2.0**20), (1.0, 2.0**-20)])
def test_units_do_not_matter(units):
    plain, other = search(a_point()), search(a_point(*units))
    assert other.violation == pytest.approx(plain.violation, rel=1e-12)
    tokens = a_point().tokens
    assert torch.equal(other.gates.masks(tokens), plain.gates.masks(tokens))


@pytest.mark.parametrize("name", ["step_lengths", "widths", "trial_lengths"])
def test_pairs_of_integers_that_numpy_does_not_have_are_read_as_floats(name):
    found, expected = (search(a_point(), **{name: (size, 1)}) for size in (10**30, 1e30))
    assert found.violation == expected.violation


def test_restarts_that_ascend_in_parts_find_what_they_find_together():
    together, apart = search(a_point()), search(a_point(), temporary=1)
    assert apart.violation == pytest.approx(together.violation, rel=1e-9)
    tokens = a_point().tokens
    assert torch.equal(apart.gates.masks(tokens), together.gates.masks(tokens))


@pytest.mark.parametrize("tol", [1e-3, 0.2])
def test_violations_are_by_more_than_the_tolerance_and_the_largest_comes_first(tol):
    point = a_point()
    found = search(point, tol)
    excess = gate_norms(point, found.gates.masks(point.tokens)) / point.alpha - 1
    assert found.violation == pytest.approx(float(excess[0]), rel=1e-12)
    assert bool((excess > tol).all())
    assert excess.tolist() == sorted(excess.tolist(), reverse=True)
    assert search(point, 1.01 * found.violation).gates is None


@pytest.mark.parametrize("part", ["tokens", "values"])
def test_where_all_is_zero_nothing_is_violated(part):
    point = a_point()
    found = search(point._replace(**{part: torch.zeros_like(getattr(point, part))}))
    assert found.gates is None
    assert found.violation == -1.0


def test_gates_that_differ_on_exactly_the_share_are_apart():
    point = a_point()
    for n in range(10, 60):
        for k in (2, 3, 7):
            masks = torch.zeros(n, 2, dtype=torch.bool)
            masks[:, 0], masks[k:, 1] = True, True
            alike = point._replace(weight=torch.full((n,), 1 / n, dtype=torch.float64))
            arguments = alike, masks, torch.zeros(n, 1, dtype=torch.bool), torch.tensor([1.0, 2.0]), 0.5, 2
            assert GateSearch(apart=k / n)._most_violating(*arguments) == [1, 0]
            assert GateSearch(apart=(k + 0.1) / n)._most_violating(*arguments) == [1]


def test_gates_that_the_program_has_are_not_found_again():
    point = a_point()
    known = search(point).gates.masks(point.tokens)
    again = GateSearch().violated(
        point, known, None, n_restarts=12, n_wanted=6, tol=1e-3, random_state=np.random.RandomState(0)
    )
    patterns = again.gates.masks(point.tokens)
    assert not bool((patterns[:, :, None] == known[:, None]).all(0).any())


def test_a_third_of_the_restarts_begin_as_far_from_gates_in_use_as_the_noise_is_long():
    point, length = a_point(), 0.1
    in_use = Gates(u1=[[3.0, 0.0, 0.0]], u2=[[0.0, 0.5]])  # whose lengths do not matter
    begins = GateSearch(perturbation=length)._starting_directions(point, in_use, 300, np.random.RandomState(0))
    cosines = torch.stack([begins[0][:, 0], begins[1][:, 1]])
    for directions in begins:
        torch.testing.assert_close(directions.square().sum(1), torch.ones(300, dtype=torch.float64))
    sines = (1 - cosines.square()).clamp_min(0).sqrt()
    near = ((sines <= length * (1 + 1e-9)) & (cosines > 0)).all(0)
    assert 100 <= int(near.sum()) < 110
    assert bool((sines[:, near].amax(1) > 0.95 * length).all())  # both directions are moved


def test_restarts_near_gates_in_use_are_near_each_of_them():
    in_use = Gates(u1=[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], u2=[[0.0, 1.0], [1.0, 0.0]])
    u1, u2 = GateSearch(perturbation=1e-9)._starting_directions(a_point(), in_use, 60, np.random.RandomState(0))
    cosines = (u1 @ torch.as_tensor(in_use.u1).T).minimum(u2 @ torch.as_tensor(in_use.u2).T)
    assert (cosines > 1 - 1e-12).sum(0).min() > 0


def directions(count):
    rng = np.random.default_rng(1)
    return tuple(torch.nn.functional.normalize(torch.as_tensor(rng.normal(size=(count, width)))) for width in (3, 2))


@pytest.mark.parametrize("width", [1e-9, 0.3])
def test_smoothed_dual_norms_are_those_of_sigmoids_as_wide_as_a_share_of_the_spread(width):
    point = a_point()
    u1, u2 = directions(20)
    side = torch.einsum("ikd,jk,jd->ij", point.tokens, u1, u2)
    spread = (point.weight[:, None] * side**2).sum(0).sqrt()
    sums = torch.einsum("ij,ikd,ic->jkdc", torch.sigmoid(side / (width * spread)), point.tokens, point.values)
    found = _smoothed_norms(point, point.tokens.flatten(1), u1, u2, width)
    torch.testing.assert_close(found, torch.linalg.matrix_norm(sums, 2).amax(1), rtol=1e-12, atol=0.0)
    if width == 1e-9:
        torch.testing.assert_close(found, gate_norms(point, Gates(u1, u2).masks(point.tokens)), rtol=1e-12, atol=0.0)


def test_an_ascent_raises_the_smoothed_dual_norm():
    point, start = a_point(), directions(20)
    ends = GateSearch(n_steps=5, widths=(0.5, 0.5), step_lengths=(1e-3, 1e-3))._ascended(point, *start)
    before, after = (_smoothed_norms(point, point.tokens.flatten(1), *pair, 0.5) for pair in (start, ends))
    assert bool((after > before).all())


def test_an_ascent_narrows_the_sigmoid_and_shortens_its_steps():
    point, start = a_point(), directions(20)
    whole = GateSearch(n_steps=2, widths=(1.0, 0.02), step_lengths=(0.3, 0.1))._ascended(point, *start)
    for width, length in ((1.0, 0.3), (0.02, 0.1)):
        one = GateSearch(n_steps=1, widths=(width, width), step_lengths=(length, length))
        start = one._ascended(point, *start)
    torch.testing.assert_close(whole, start, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_trials", [1, 30])
def test_a_climb_ends_no_lower_than_it_begins_on_either_side(n_trials):
    point = a_point()
    u1, u2 = (torch.as_tensor(np.random.default_rng(1).normal(size=(50, width))) for width in (3, 2))
    norms = [gate_norms(point, Gates(*pair).masks(point.tokens)) for pair in ((u1, u2), (-u1, u2))]
    ends = GateSearch(n_trials=n_trials)._climbed(point, [(u1, u2)], np.random.RandomState(0))
    found = gate_norms(point, Gates(*ends).masks(point.tokens))
    assert bool((found >= torch.maximum(*norms) * (1 - 1e-12)).all())
    assert bool((found > torch.maximum(*norms)).any())


@pytest.mark.parametrize("seed", range(8))
def test_a_search_finds_no_less_than_where_its_restarts_begin(seed):
    rng = np.random.default_rng(seed)
    tokens, values = (torch.as_tensor(rng.normal(size=shape)) for shape in ((5, 1, 2), (5, 2)))
    weight = torch.full((5,), 0.2, dtype=torch.float64)
    point = DualPoint(tokens, values, get_penalty("group_l2"), 1.0, weight)
    begins = GateSearch()._starting_directions(point, None, 12, np.random.RandomState(0))
    assert search(point).violation >= float(gate_norms(point, Gates(*begins).masks(tokens)).max()) - 1 - 1e-12


def test_a_climb_goes_on_from_the_best_trial_so_far():
    point, start, lengths = a_point(), directions(20), (0.5, 0.5)  # so that few trials are the first of many
    before = torch.zeros(20, dtype=torch.float64)
    for n_trials in range(1, 30):
        search = GateSearch(n_trials=n_trials, trial_lengths=lengths)
        found = Gates(*search._climbed(point, [start], np.random.RandomState(0)))
        norms = gate_norms(point, found.masks(point.tokens))
        assert bool((norms >= before).all())
        before = norms


def test_a_trial_is_as_far_away_as_it_is_said_to_be():
    point, start, length = a_point(), directions(300), 0.01
    search = GateSearch(n_trials=1, trial_lengths=(length, length))
    for before, after in zip(start, search._climbed(point, [start], np.random.RandomState(0)), strict=True):
        sines = (1 - (before * after).sum(1).square()).clamp_min(0).sqrt()  # the opposite is as good a start
        assert length / 2 < sines.max() <= length * (1 + 1e-9)


def test_restarts_lie_between_samples_that_have_dual_values():
    point = a_point()
    values = torch.zeros_like(point.values)
    values[[3, 7]] = point.values[[3, 7]]
    first, second = (point.tokens[index] for index in ([3, 3, 7, 7], [3, 7, 3, 7]))
    possible = separating_directions(first, second)
    found = _directions_between(point._replace(values=values), 20, np.random.RandomState(0))
    for one, several in zip(found, possible, strict=True):
        assert bool(torch.isclose(one[:, None], several, rtol=1e-12, atol=1e-12).all(2).any(1).all())


def test_one_restart_is_drawn_at_random_whatever_gates_are_in_use():
    in_use = Gates(u1=[[1.0, 0.0, 0.0]], u2=[[0.0, 1.0]])
    for gates in (None, in_use):
        begins = GateSearch()._starting_directions(a_point(), gates, 1, np.random.RandomState(0))
        assert [begin.shape for begin in begins] == [(1, 3), (1, 2)]

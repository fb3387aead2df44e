"""Greedy gradient steps before other algorithms, where features are nearly independent."""

import dataclasses
import math

import pytest
import torch
from solver_cases import LOSS_NAMES, many_blocks, randn, valid_target

from convexformer_solvers import Auto, DenseMap, Fista, GatedMap, GroupL2, Point, Program, get_loss, get_penalty, solve
from convexformer_solvers.algorithms.fista import GreedyFista
from convexformer_solvers.algorithms.stage import begun, stepped
from convexformer_solvers.algorithms.working_set import WorkingSet
from convexformer_solvers.auto import AutoConfig, plan
from convexformer_solvers.linalg.eigenvalue_ratio import eigenvalue_ratio
from convexformer_solvers.points import null_point, objective
from convexformer_solvers.reductions.blocks import Restrict

pytestmark = pytest.mark.usefixtures("steady_rates")  # plans go by these
BOUNDED = [loss for loss in LOSS_NAMES if loss not in ("poisson", "softmax")]
# As if the Gram matrix of all features took long, so that the plan looks at how independent these are.
LOOKS = AutoConfig(costly_gram=0.0)


def wide_program(loss="squared", data=None, ratio=0.1, intercept=False):
    data = randn(300, 20, 40) if data is None else data
    loss = get_loss(loss)
    y = valid_target(loss, len(data), 1, torch.Generator().manual_seed(1))
    program = Program(DenseMap(data), y, loss, GroupL2(), 1.0, fit_intercept=intercept)
    return program.with_alpha(ratio * program.alpha_max)


def correlated(data, common=0.9, own=0.44):
    """Tokens that share most of their variance with their neighbours."""
    data = data.clone()
    for token in range(1, data.shape[1]):
        data[:, token] = common * data[:, token - 1] + own * data[:, token]
    return data


def cross_entropy(data, penalty="group_l2"):
    y = torch.nn.functional.one_hot(data[:, 0, 0].gt(0) + 1 * data[:, 1, 0].gt(0), 3).double()
    program = Program(DenseMap(data), y, get_loss("softmax"), get_penalty(penalty), 1.0, fit_intercept=True)
    return program.with_alpha(0.1 * program.alpha_max)


def takes_greedy_steps(algorithm):
    inner = algorithm.inner.algorithm if isinstance(algorithm, WorkingSet) else None
    return isinstance(inner, GreedyFista)


def begins_with_them(program, config=LOOKS):
    return takes_greedy_steps(plan(program, config=config)[0].algorithm)


def greedy_stage(program):
    """The stage of the plan, on whatever features."""
    anywhere = AutoConfig(costly_gram=0.0, independent=math.inf, gradient_steps=0.0)
    stage = plan(program, config=anywhere)[0]
    assert takes_greedy_steps(stage.algorithm)
    return stage


class TestNearlyIndependent:
    @pytest.mark.parametrize("shape", [(50, 20, 40), (300, 20, 40), (3000, 4, 10), (300, 1, 1)])
    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
    def test_independent_features_are(self, shape, scale):
        assert begins_with_them(wide_program("logistic", data=scale * randn(*shape)))

    def test_with_the_squared_loss_where_the_gram_matrix_takes_longer(self):
        # The steps grow with the root of the regularisation, those of alternating directions hardly.
        for shape, ratio, wanted in (
            ((300, 20, 40), 0.05, True),
            ((300, 20, 40), 0.01, False),
            ((50, 20, 40), 0.05, False),
        ):
            assert begins_with_them(wide_program(data=randn(*shape), ratio=ratio)) == wanted

    def test_correlated_tokens_and_common_means_are_not(self):
        data = randn(300, 20, 40)
        for other in (correlated(data), data + 1):
            assert not begins_with_them(wide_program(data=other, ratio=0.3))

    def test_an_intercept_takes_means_away(self):
        assert begins_with_them(wide_program(data=randn(300, 20, 40) + 1, intercept=True))

    @pytest.mark.parametrize("loss", ["squared", "logistic"])
    @pytest.mark.parametrize("gated", [False, True])
    def test_gated_and_slightly_uneven_ones_are_where_the_regularisation_is_strong(self, loss, gated):
        data = randn(300, 20, 40)
        linear_map = (
            GatedMap(data, randn(300, 25, seed=4) > 0) if gated else DenseMap(data * torch.arange(1, 41) ** -0.5)
        )
        program = dataclasses.replace(wide_program(loss, data), map=linear_map)
        assert 1.15 < eigenvalue_ratio(program) < 1.7
        for ratio, wanted in ((0.3, True), (0.01, False)):
            assert begins_with_them(program.with_alpha(ratio * program.alpha_max)) == wanted

    def test_sorted_samples(self):
        data = randn(2000, 5, 8)
        data = data[data[:, 0, 0].argsort()] * torch.linspace(0.1, 3, 2000)[:, None, None]
        shuffled = data[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
        assert begins_with_them(wide_program(data=data)) == begins_with_them(wide_program(data=shuffled))

    def test_coupled_outputs_bear_more_correlation(self):
        program = cross_entropy(correlated(randn(200, 65, 8), common=0.7, own=0.7))
        assert 1.3 < eigenvalue_ratio(program) < 1.7
        assert begins_with_them(program)
        weak = dataclasses.replace(program, alpha=0.1 * program.alpha)
        assert begins_with_them(weak)
        assert not begins_with_them(dataclasses.replace(weak, loss=get_loss("squared")))


@pytest.mark.parametrize("loss", BOUNDED)
@pytest.mark.parametrize("intercept", [False, True])
def test_they_lead_near_the_optimum_of_independent_features(loss, intercept):
    program = wide_program(loss, randn(150, 10, 40), ratio=0.3, intercept=intercept)
    state = begun(greedy_stage(program), program, null_point(program))
    gaps = []
    while not state.is_over and len(gaps) < 100:
        state = stepped(state)
        gaps.append(state.gap / program.null_value)
    optimum = solve(program, Auto(), tol=1e-9).certificate.primal
    assert min(gaps) < 1e-3
    point = state.result()
    assert optimum <= objective(program, point) * (1 + 1e-6)  # its predictions are in single precision
    assert objective(program, point) - optimum <= 1e-3 * program.null_value
    # Predictions belong to the point, in the precision of the program.
    shift = point.fitted - program.map.matvec(point.coef)
    assert float((shift - shift.mean()).abs().max()) < 1e-4


def test_a_step_goes_on_by_all_of_the_last_move():
    program, solver = wide_program("logistic"), GreedyFista()
    state = solver.step(program, solver.init(program, null_point(program)))
    assert solver._next_momentum(state.momentum) == (2.0, 1.0)
    assert solver._next_momentum(1.0) == (2.0, 0.0)  # after a restart


def test_steps_on_more_blocks_go_on_from_the_last_move():
    program, solver = wide_program(ratio=0.3, intercept=True), GreedyFista()
    few = program.with_map(program.map.restricted(torch.arange(12)))
    state = solver.init(few, null_point(few))
    for _ in range(4):
        state = solver.step(few, state)

    def on_all(coef):
        return torch.cat([coef, torch.zeros_like(coef[:8])])

    start = Point(on_all(state.coef), state.intercept, fitted=state.pred + state.intercept)
    again = solver.init_again(program, start, solver.on_other_blocks(state, on_all))
    same = state._replace(coef=on_all(state.coef), previous=on_all(state.previous))
    found, wanted = solver.step(program, again), solver.step(program, same)
    assert wanted.momentum > 1
    torch.testing.assert_close(found.coef, wanted.coef, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.pred, wanted.pred, rtol=0, atol=1e-12)


def test_more_momentum_needs_fewer_steps():
    n_steps = {True: 0, False: 0}
    for loss in ("squared", "logistic", "huber"):
        for ratio in (0.3, 0.1, 0.03):
            program = wide_program(loss, ratio=ratio)
            for greedy in n_steps:
                solver = (GreedyFista if greedy else Fista)(power_steps=2)
                n_steps[greedy] += solve(program, solver, tol=1e-4, callback=lambda progress: False).n_iter
    assert n_steps[True] < 0.95 * n_steps[False]


@pytest.mark.parametrize("gated", [False, True])
def test_they_give_up_where_they_do_not_lead_on(gated):
    program = wide_program(data=correlated(randn(300, 20, 40)) * torch.arange(1, 41) ** -1.0, ratio=0.01)
    if gated:
        program = dataclasses.replace(program, map=GatedMap(program.map.data, randn(300, 5, seed=4) > 0))
    stage = greedy_stage(program)
    state = begun(stage, program, null_point(program))
    while not state.is_over:
        state = stepped(state)
    assert state.n_steps <= 1.5 * stage.patience.grace
    assert objective(program, state.result()) < program.null_value


def run_greedy_steps(program, n_steps=200, goal=1e-5, start=None):
    """The states of steps, never given up."""
    stage = dataclasses.replace(greedy_stage(program), patience=None)
    states = [begun(stage, program, null_point(program) if start is None else start)]
    while len(states) <= n_steps and not (states[-1].gap or math.inf) <= goal * program.null_value:
        states.append(stepped(states[-1]))
    return states


class TestSetsOfBlocks:
    @pytest.mark.parametrize("loss", ["squared", "logistic", "huber"])
    @pytest.mark.parametrize("gated", [False, True])
    def test_they_end_at_the_solution_of_all_blocks_with_the_active_ones_in_the_set(self, loss, gated):
        program = many_blocks(loss, gated, ratio=0.3)
        states, optimum = run_greedy_steps(program), solve(program, Auto(), tol=1e-9)
        assert states[-1].gap <= 1e-5 * program.null_value
        assert objective(program, states[-1].result()) - optimum.certificate.primal <= 1e-5 * program.null_value
        active = optimum.coef.flatten(0, -3).flatten(1).norm(dim=1) > 1e-2 * float(optimum.coef.norm())
        blocks = states[-1].inner.blocks.tolist()
        assert set(active.nonzero()[:, 0].tolist()) <= set(blocks)
        assert 0 < len(blocks) < 0.6 * 160

    def test_the_first_set_is_that_of_the_largest_dual_norms(self):
        program = many_blocks()
        blocks = run_greedy_steps(program, n_steps=0)[0].inner.blocks
        norms = program.penalty.group_dual_norms(program.weighted_adjoint(program.null_dual_point)).flatten()
        others = torch.ones(len(norms), dtype=torch.bool)
        others[blocks] = False
        assert 150 <= len(blocks) * 8 <= 160
        assert float(norms[blocks].min()) >= float(norms[others].max()) * (1 - 1e-5)

    def test_sets_whose_last_moves_go_on_need_fewer_steps(self, monkeypatch):
        def n_steps():
            return sum(len(run_greedy_steps(many_blocks(loss, ratio=0.1))) for loss in ("squared", "logistic"))

        kept = n_steps()
        monkeypatch.setattr(GreedyFista, "init_again", Fista.init_again)
        assert kept < 0.9 * n_steps()

    def test_a_given_start_stays_in_the_set(self):
        program = many_blocks()
        coef = torch.zeros(program.coef_shape, dtype=torch.float64)
        coef[7:60] = 0.1
        (state,) = run_greedy_steps(program, n_steps=0, start=Point(coef, program.null_intercept))
        assert torch.equal(state.result().coef, coef.float().double())

    def test_a_set_that_is_solved_grows_where_others_violate(self):
        # Blocks that are zero at the optimum: as a set they are solved at once.
        program = many_blocks(ratio=0.5)
        active = solve(program, Auto(), tol=1e-9).coef.flatten(1).any(dim=1)
        (state,) = run_greedy_steps(program, n_steps=0)
        blocks, working_set, reduced = (~active).nonzero()[:3, 0], state.stage.algorithm, state.chain.program
        solves_set = dataclasses.replace(working_set.inner, reductions=(Restrict(blocks),))
        inner = state.inner._replace(blocks=blocks, inner=begun(solves_set, reduced, state.inner.whole))
        state = state._replace(inner=inner)
        while not state.is_over and not (state.gap or math.inf) <= 1e-5 * program.null_value:
            state = stepped(state)
            assert state.n_steps < 200
        assert state.gap <= 1e-5 * program.null_value

    def test_all_blocks_take_its_place_where_most_matter(self):
        n_blocks = [len(state.inner.blocks) for state in run_greedy_steps(many_blocks(ratio=1e-3), n_steps=60)]
        assert n_blocks[0] < 0.2 * 160
        assert n_blocks[-1] == 160

    @pytest.mark.parametrize(
        ("shape", "size"), [((300, 20, 20), 20), ((60, 1, 900), 1), ((60, 4, 300), 1), ((60, 7, 5), 7), ((1, 50, 3), 1)]
    )
    def test_no_set_is_empty_and_few_features_have_none(self, shape, size):
        assert len(run_greedy_steps(wide_program(data=randn(*shape)), n_steps=0)[0].inner.blocks) == size


def test_auto_takes_them_for_large_independent_features_alone():
    data = randn(600, 20, 60)
    taken = []
    for other in (data, correlated(data)):
        program = wide_program(data=other, ratio=0.3)
        taken.append(begins_with_them(program, config=None))
        assert solve(program, Auto(), tol=1e-6).certificate.relative_gap <= 1e-6
    assert taken == [True, False]
    assert not begins_with_them(wide_program(data=data[:, :1, :20]), config=None)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_a_cross_entropy_starts_with_them_on_independent_features_alone(penalty):
    data, taken = randn(200, 65, 8), []
    for tokens in (data, correlated(data)):
        program = cross_entropy(tokens, penalty)
        taken.append(begins_with_them(program, config=None))
        assert solve(program, Auto(), tol=1e-6).certificate.relative_gap <= 1e-6
    assert taken == [True, False]


def test_they_hand_a_cross_entropy_on_where_single_precision_ends():
    program, names = cross_entropy(randn(300, 65, 8)), []

    class Watched(Auto):
        def step(self, program, state):
            state = super().step(program, state)
            names.append(state.running.stage.algorithm.name)
            return state

    assert solve(program, Watched(), tol=1e-13).certificate.relative_gap <= 1e-13
    assert names[0] == "working_set(greedy_fista)"
    assert "admm" in names

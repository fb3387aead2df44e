"""Convex blocks on learned embeddings: envelope theorem, descent, exact zeros, certificates."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from stand_in_device import NAME, stand_in

from convexformer.embedded import (
    EmbeddedProblem,
    EmbeddingInterrupted,
    optimal_value,
    random_tables,
    train_by_projection,
    train_jointly,
)
from convexformer.embedded.course import MovingTables
from convexformer.embedded.joint import _ProximalAdam
from convexformer.embedded.problem import along_sphere
from convexformer.embedded.schedule import FallingAlpha
from convexformer.gates import Gates
from convexformer.solvers import get_loss, get_penalty, get_solver, solve

P = 5
TRAINERS = pytest.mark.parametrize("train", [train_by_projection, train_jointly])


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_problem(loss="softmax", penalty="nuclear", dtype=torch.float64, n_gates=4, width=3):
    """Addition modulo five."""
    symbols = torch.cartesian_prod(torch.arange(P), torch.arange(P))
    target = torch.eye(P, dtype=dtype)[symbols.sum(1) % P]
    gates = Gates(torch.eye(2)[torch.arange(n_gates) % 2].numpy(), randn(n_gates, width, seed=3).numpy())
    return EmbeddedProblem(symbols, target, gates, get_loss(loss), get_penalty(penalty), P)


def test_the_default_device_of_torch_changes_no_batches():
    problem, options = make_problem(), {"alpha": 0.1, "n_steps": 2, "batch_size": 3}
    wanted = train_jointly(problem, **options)
    with stand_in(), torch.device(NAME):
        state = train_jointly(problem, **options)
    torch.testing.assert_close(state.coef, wanted.coef)
    torch.testing.assert_close(state.tables, wanted.tables)


class TestEnvelopeTheorem:
    @pytest.mark.parametrize("loss", ["squared", "softmax"])
    @pytest.mark.parametrize("penalty", ["nuclear", "group_l2"])
    def test_the_gradient_of_the_optimal_value_is_its_finite_difference(self, loss, penalty):
        problem = make_problem(loss, penalty)
        tables, direction = random_tables(problem, seed=1), randn(2, P, 3, seed=2)
        alpha = 0.1 * problem.program(tables, 1.0).alpha_max
        value, gradient = optimal_value(problem, tables, alpha, tol=1e-11)
        step = 1e-4
        either_side = [tables + sign * step * direction for sign in (1, -1)]
        masks = [problem.map(side).masks for side in either_side]
        assert torch.equal(*masks)
        above, below = (optimal_value(problem, side, alpha, tol=1e-11)[0] for side in either_side)
        slope = (above - below) / (2 * step)
        assert abs(slope) > 1e-3 * value
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=2e-4)

    def test_at_other_coefficients_the_partial_gradient_is_not_that_of_the_optimal_value(self):
        problem = make_problem()
        tables = random_tables(problem, seed=1)
        alpha = 0.1 * problem.program(tables, 1.0).alpha_max
        rough = optimal_value_after(problem, tables, alpha, n_steps=1)
        exact = optimal_value(problem, tables, alpha)[1]
        better = optimal_value_after(problem, tables, alpha, n_steps=200)
        assert (better - exact).norm() < 1e-3 * exact.norm() < (rough - exact).norm()


def optimal_value_after(problem, tables, alpha, n_steps):
    """Partial gradient after so many solver steps from zero."""
    from convexformer.embedded.projection import _solved, partial_gradient

    program = problem.program(tables, alpha)
    coef, pred = _solved(program, tables.new_zeros(problem.coef_shape), n_steps)
    return partial_gradient(program, coef, pred)


class TestProjection:
    def test_the_optimal_value_falls(self):
        problem = make_problem()
        tables = random_tables(problem, seed=1)
        alpha = 0.1 * problem.program(tables, 1.0).alpha_max
        state = train_by_projection(problem, tables, alpha=alpha, n_steps=30, lr=0.05, head_steps=30)
        before, after = (optimal_value(problem, where, alpha, tol=1e-6)[0] for where in (tables, state.tables))
        assert after < 0.95 * before

    def test_with_the_defaults_the_optimal_value_falls(self):
        problem = make_problem()
        tables = random_tables(problem, seed=1)
        alpha = 0.1 * problem.program(tables, 1.0).alpha_max
        state = train_by_projection(problem, tables, alpha=alpha, n_steps=30)
        before, after = (optimal_value(problem, where, alpha, tol=1e-6)[0] for where in (tables, state.tables))
        assert after < 0.9 * before

    def test_the_block_is_close_to_its_certified_optimum(self):
        problem = make_problem()
        state = train_by_projection(problem, alpha=0.01, n_steps=10, head_steps=100)
        result = state.certified_head(1e-8)
        assert result.certificate.relative_gap <= 1e-8
        assert result.certificate.dual <= state.objective() <= result.certificate.primal * (1 + 1e-3)

    def test_the_certified_head_starts_from_the_block(self):
        state = train_by_projection(make_problem(), alpha=0.01, n_steps=10, head_steps=100)
        with pytest.warns(ConvergenceWarning):
            head = state.certified_head(1e-12, max_iter=1)
        assert head.certificate.primal <= state.objective() * (1 + 1e-12)

    def test_work_is_counted(self):
        states = []
        train_by_projection(make_problem(), alpha=0.01, n_steps=4, head_steps=7, callback=states.append)
        assert [state.step for state in states] == [0, 1, 2, 3, 4]
        assert [state.head_steps for state in states] == [7, 14, 21, 28, 35]
        assert [state.gradient_evaluations for state in states] == [7, 15, 23, 31, 39]

    def test_steps_on_the_block_go_on_from_those_before(self):
        problem = make_problem()
        alpha = 0.1 * problem.program(random_tables(problem), 1.0).alpha_max
        state = train_by_projection(problem, alpha=alpha, n_steps=40, lr=1e-12, head_steps=5)
        assert state.objective() <= state.certified_head(1e-3).certificate.primal * (1 + 1e-2)

    def test_more_steps_on_the_block_lead_further_in_as_many_of_the_embedding(self):
        problem = make_problem()
        alpha = 0.05 * problem.program(random_tables(problem), 1.0).alpha_max
        few, many = (
            train_by_projection(
                problem, alpha=alpha, n_steps=20, optimizer="adam", lr=0.02, head_steps=n
            ).certified_head(1e-6)
            for n in (1, 50)
        )
        assert many.certificate.primal < few.certificate.dual


class TestJoint:
    def test_the_objective_falls_and_zeros_are_exact(self):
        problem = make_problem()
        alpha = 0.2 * problem.program(random_tables(problem), 1.0).alpha_max
        states = []
        state = train_jointly(problem, alpha=alpha, n_steps=300, callback=states.append, look_every=100)
        assert [seen.step for seen in states] == [0, 100, 200, 300]
        assert state.objective() < 0.9 * states[0].objective()
        singular = torch.linalg.svdvals(state.coef)
        assert (singular[..., -1] < 1e-12).any()
        assert (singular[..., 0] > 1e-2).any()

    def test_the_first_step_is_that_of_adam_followed_by_the_proximal_step(self):
        problem, tables = make_problem(), random_tables(make_problem(), seed=1)
        states = []
        train_jointly(problem, tables, alpha=0.1, n_steps=1, lr=0.02, head_lr=0.05, callback=states.append)
        first, second = states
        program = problem.program(tables, 0.1)
        slope = -program.weighted_adjoint(-program.loss.gradient(program.map.matvec(first.coef), program.y))
        size = 0.05 / slope.square().mean((-2, -1), keepdim=True).sqrt()
        moved, wanted = first.coef - size * slope, torch.empty_like(first.coef)
        for gate, token in torch.cartesian_prod(torch.arange(4), torch.arange(2)).tolist():
            scale = float(size[gate, token])
            wanted[gate, token] = problem.penalty.prox(moved[gate, token][None], scale * 0.1)[0]
        torch.testing.assert_close(second.coef, wanted)

    def test_steps_on_the_block_are_those_of_adam_where_each_block_is_a_number(self):
        coef = randn(4, 2, 1, 1, seed=6)
        head, theirs = _ProximalAdam(coef, get_penalty("nuclear"), 0.05), torch.nn.Parameter(coef.clone())
        optimizer = torch.optim.Adam([theirs], lr=0.05, eps=1e-12)
        for seed in range(5):
            theirs.grad = randn(4, 2, 1, 1, seed=seed)
            optimizer.step()
            coef = head.step(coef, theirs.grad, 0.0)
            torch.testing.assert_close(coef, theirs.detach())

    def test_a_step_on_the_block_has_the_weight_of_its_own_step(self):
        problem, tables = make_problem(), random_tables(make_problem(), seed=1)
        falling, held, low = (
            train_jointly(problem, tables, alpha=alpha, first_alpha=first, fall_steps=1, n_steps=1)
            for alpha, first in ((0.1, 1.0), (1.0, None), (0.1, None))
        )
        assert torch.equal(falling.coef, held.coef)
        assert not torch.equal(falling.coef, low.coef)

    def test_where_all_samples_are_alike_batches_lead_where_all_do(self):
        problem = make_problem().rows(torch.full((12,), 7))
        whole, part = (train_jointly(problem, alpha=0.1, n_steps=3, head_lr=0.1, batch_size=size) for size in (None, 3))
        torch.testing.assert_close(part.coef, whole.coef)

    def test_a_step_on_a_batch_moves_the_rows_of_its_symbols_alone(self):
        problem, tables, drawn = make_problem(), random_tables(make_problem()), set()
        for seed in range(8):
            state = train_jointly(problem, tables, alpha=1e-3, n_steps=1, batch_size=1, seed=seed)
            moved = ((state.tables - tables).abs() > 1e-6).any(-1)
            assert moved.sum(1).max() <= 1
            if bool(moved.any(1).all()):  # gates may keep a token from moving
                drawn.add(tuple(moved.long().argmax(1).tolist()))
        assert len(drawn) > 2  # the seed draws which

    def test_the_last_state_is_seen_too(self):
        states = []
        train_jointly(make_problem(), alpha=0.1, n_steps=5, look_every=3, callback=states.append)
        assert [state.step for state in states] == [0, 3, 5]

    def test_the_seed_draws_the_coefficients_to_begin_with(self):
        problem, tables, states = make_problem(), random_tables(make_problem()), []
        for seed in (0, 0, 1):
            train_jointly(problem, tables, alpha=0.1, n_steps=1, seed=seed, callback=states.append)
        first, again, other = (state.coef for state in states[::2])
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_where_it_stops_the_block_is_optimal(self):
        problem = make_problem()
        alpha = 0.2 * problem.program(random_tables(problem), 1.0).alpha_max
        state = train_jointly(problem, alpha=alpha, n_steps=600, lr=1e-9, head_lr=3e-3)
        best = state.certified_head(1e-6).certificate
        assert best.dual <= state.objective() <= best.primal * 1.01

    def test_batches_are_drawn_by_seed(self):
        problem = make_problem()
        first, again, other = (
            train_jointly(problem, random_tables(problem), alpha=1e-3, n_steps=5, batch_size=10, seed=seed).coef
            for seed in (0, 0, 1)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


@TRAINERS
class TestBoth:
    def test_rows_of_the_embedding_have_length_one(self, train):
        state = train(make_problem(), 3 * random_tables(make_problem()), alpha=1e-3, n_steps=3)
        torch.testing.assert_close(state.tables.norm(dim=-1), torch.ones(2, P, dtype=torch.float64))

    def test_the_embedding_given_is_left_alone(self, train):
        tables = random_tables(make_problem())
        copy = tables.clone()
        train(make_problem(), tables, alpha=1e-3, n_steps=2)
        assert torch.equal(tables, copy)

    def test_alpha_falls_as_asked(self, train):
        seen = []
        train(
            make_problem(),
            alpha=0.01,
            first_alpha=0.1,
            hold_steps=2,
            fall_steps=2,
            n_steps=5,
            callback=lambda state: seen.append(state.alpha),
        )
        assert seen == pytest.approx([0.1, 0.1, 0.1, 0.1 * 0.1**0.5, 0.01, 0.01])

    def test_a_step_of_muon_moves_all_directions_of_a_table_alike_and_by_the_rate(self, train):
        problem, tables = make_problem(), random_tables(make_problem())
        state = train(problem, tables, alpha=1e-3, n_steps=1, optimizer="muon", lr=0.01)
        for moved in state.tables - tables:
            spread = torch.linalg.svdvals(moved)
            assert spread[0] < 3 * spread[-1]  # by Adam they are far apart
            assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=0.3)

    @pytest.mark.parametrize("optimizer", ["adam", "muon"])
    def test_the_rate_falls_to_zero_along_a_cosine_or_not_at_all(self, train, optimizer):
        last = {}
        for schedule in ("constant", "cosine"):
            states = []
            options = {"optimizer": optimizer, "lr": 0.01, "schedule": schedule}
            train(make_problem(), alpha=1e-3, n_steps=20, callback=states.append, **options)
            moves = [(after.tables - before.tables).norm() for before, after in itertools.pairwise(states)]
            last[schedule] = float(moves[-1] / moves[0])
        # The rate of step 20 of 20 is (1 + cos(19 pi / 20)) / 2 = .006 of the first.
        assert last["cosine"] < 0.02 < 0.1 < last["constant"]

    def test_true_from_the_callback_stops(self, train):
        assert train(make_problem(), alpha=1e-3, n_steps=9, callback=lambda state: state.step == 3).step == 3

    @pytest.mark.parametrize("answer", [np.True_, 1])
    def test_whatever_counts_as_true_stops(self, train, answer):
        assert train(make_problem(), alpha=1e-3, n_steps=9, callback=lambda state: answer).step < 9

    def test_soft_labels_in_single_precision_are_certified(self, train):
        problem = make_problem(dtype=torch.float32)
        soft = 0.9 * problem.target + 0.1 / P
        problem = dataclasses.replace(problem, target=soft / soft.sum(1, keepdim=True))
        certificate = train(problem, alpha=1e-3, n_steps=2).certified_head(1e-3).certificate
        assert -1e-12 <= certificate.gap <= certificate.primal

    def test_an_interrupt_keeps_the_last_step(self, train):
        def interrupt(state):
            if state.step == 2:
                raise KeyboardInterrupt

        with pytest.raises(EmbeddingInterrupted, match="after 2 steps") as caught:
            train(make_problem(), alpha=1e-3, n_steps=9, callback=interrupt)
        assert caught.value.state.outputs().shape == (P * P, P)
        assert torch.equal(pickle.loads(pickle.dumps(caught.value)).state.tables, caught.value.state.tables)

    def test_an_interrupt_in_a_step_keeps_the_one_before(self, train, monkeypatch):
        def move(moving, gradient):
            moved.append(gradient)
            if len(moved) == 4:
                raise KeyboardInterrupt
            original(moving, gradient)

        # The one before, though no callback was to see it.
        options = {"look_every": 5} if train is train_jointly else {}
        original, moved, states = MovingTables.move, [], []
        train(make_problem(), alpha=1e-3, n_steps=9, callback=states.append)
        monkeypatch.setattr(MovingTables, "move", move)
        with pytest.raises(EmbeddingInterrupted, match="after 3 steps") as caught:
            train(make_problem(), alpha=1e-3, n_steps=9, **options)
        assert torch.equal(caught.value.state.tables, states[3].tables)
        assert torch.equal(caught.value.state.coef, states[3].coef)

    def test_single_precision_stays(self, train):
        state = train(make_problem(dtype=torch.float32), alpha=1e-3, n_steps=2)
        assert state.tables.dtype == state.coef.dtype == torch.float32
        assert state.certified_head(1e-2).coef.dtype == torch.float64

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"alpha": 0.0}, "alpha must be a positive finite number"),
            ({"alpha": 1.0, "first_alpha": 0.5}, "first_alpha must be at least alpha"),
            ({"alpha": 1.0, "first_alpha": np.inf}, "first_alpha must be a positive finite number"),
            ({"alpha": 1.0, "n_steps": 0}, "n_steps must be a positive integer"),
            ({"alpha": 1.0, "lr": -1.0}, "lr must be a positive finite number"),
            ({"alpha": 1.0, "schedule": "linear"}, r"schedule must be one of \['constant', 'cosine'\], got 'linear'"),
            ({"alpha": 1.0, "optimizer": "sgd"}, r"optimizer must be one of \['adam', 'muon'\], got 'sgd'"),
            ({"alpha": 1.0, "hold_steps": -1}, "hold_steps must be an integer of at least 0"),
        ],
    )
    def test_bad_arguments_are_named(self, train, arguments, message):
        with pytest.raises(ValueError, match=message):
            train(make_problem(), **arguments)

    def test_a_callback_that_cannot_be_called_is_named(self, train):
        with pytest.raises(TypeError, match="callback must be None or callable with an EmbeddedState, got 3"):
            train(make_problem(), alpha=1.0, callback=3)
        with pytest.raises(TypeError, match="callback must return True, False or None, got ndarray"):
            train(make_problem(), alpha=1.0, callback=lambda state: np.zeros(2))


def test_outputs_are_those_of_the_gated_heads_on_looked_up_tokens():
    problem = make_problem()
    tables, coef = random_tables(problem), randn(*problem.coef_shape)
    other = torch.tensor([[4, 0], [2, 2]])
    tokens = torch.stack([tables[0, other[:, 0]], tables[1, other[:, 1]]], 1)
    masks = problem.gates.masks(tokens).double()
    wanted = torch.einsum("ig,ikd,gkdc->ic", masks, tokens, coef)
    torch.testing.assert_close(problem.outputs(tables, coef, other), wanted)


def test_some_of_the_samples_keep_their_own_targets():
    some = make_problem().rows(torch.tensor([7, 3, 20]))
    assert some.target.argmax(1).tolist() == (some.symbols.sum(1) % P).tolist() == [3, 3, 4]


def test_gradients_along_the_sphere_do_not_change_lengths():
    tables, gradient = random_tables(make_problem()), randn(2, P, 3)
    assert (along_sphere(tables, gradient) * tables).sum(-1).abs().max() < 1e-14


def test_weight_without_a_first_one_is_constant():
    alphas = FallingAlpha(0.1, None, 3, 0)
    assert [alphas(step) for step in (0, 3, 100)] == [0.1, 0.1, 0.1]
    assert FallingAlpha(0.1, 1.0, 2, 0)(1) == 1.0
    assert FallingAlpha(0.1, 1.0, 2, 0)(2) == 0.1
    assert FallingAlpha(0.1, 0.1, 2, 2)(3) == 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"symbols": torch.zeros(4, 2)}, "symbols must be int64"),
        ({"n_symbols": 4}, "symbols must be from 0 to below n_symbols=4"),
        ({"target": torch.zeros(3, P)}, "target must be floating and of shape"),
        ({"gates": Gates([[1.0]], [[1.0]])}, "gates: u1 must have n_tokens=2 columns"),
        ({"target": torch.full((P * P, P), torch.nan), "loss": "squared"}, "target must be finite"),
        ({"symbols": torch.zeros(0, 2).long(), "target": torch.zeros(0, P)}, r"\(n_samples, n_tokens\), .* \(0, 2\)"),
        ({"symbols": torch.zeros(P * P).long()}, r"symbols must be int64 .* of shape \(25,\)"),
        ({"target": torch.zeros(P * P, P, device="meta")}, "target must be on cpu like the symbols, got meta"),
        ({"target": -torch.ones(P * P, P)}, "probabilities"),
        ({"n_symbols": 5.5}, "n_symbols must be a positive integer, got 5.5"),
        ({"target": torch.zeros(P * P), "loss": "squared"}, r"target must be floating .* of shape \(25,\)"),
        ({"target": torch.zeros(P * P, P).long(), "loss": "squared"}, "target must be floating .* got torch.int64"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_problem(), **change)


def test_loss_and_penalty_may_be_names():
    problem = dataclasses.replace(make_problem(), loss="squared", penalty="group_l2")
    assert (problem.loss, problem.penalty) == (get_loss("squared"), get_penalty("group_l2"))


def test_a_head_is_certified_at_another_weight():
    problem = make_problem()
    state = train_by_projection(problem, alpha=0.1, n_steps=1)
    for alpha in (1e-2, 2e-2):
        primal = solve(problem.program(state.tables, alpha), get_solver("fista"), tol=1e-6).certificate.primal
        assert state.certified_head(1e-6, alpha=alpha).certificate.primal == pytest.approx(primal, rel=1e-5)


@TRAINERS
def test_the_largest_seed_is_taken(train):
    assert train(make_problem(), alpha=0.1, n_steps=1, seed=2**64 - 1).step == 1


def test_a_batch_is_drawn_from_the_samples():
    with pytest.raises(ValueError, match="batch_size must be at most the number of samples, 25"):
        train_jointly(make_problem(), alpha=1.0, batch_size=26)


def test_gradients_of_a_batch_count_as_its_share_of_the_samples():
    state = train_jointly(make_problem(), alpha=0.1, n_steps=10, batch_size=5)
    assert state.gradient_evaluations == pytest.approx(10 * 2 * 5 / 25)


def test_steps_and_rates_of_the_block_are_positive():
    for options, message in (
        ({"head_lr": 0.0}, "head_lr must be a positive finite number, got 0.0"),
        ({"batch_size": 0}, "batch_size must be a positive integer or None, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            train_jointly(make_problem(), alpha=0.1, **options)
    with pytest.raises(ValueError, match="head_steps must be a positive integer, got 0"):
        train_by_projection(make_problem(), alpha=0.1, head_steps=0)


def test_an_optimal_value_that_is_not_reached_in_time_is_warned_of():
    with pytest.warns(ConvergenceWarning):
        optimal_value(make_problem(), random_tables(make_problem()), 1e-3, max_iter=1)


def test_steps_between_calls_are_a_positive_integer():
    with pytest.raises(ValueError, match="look_every must be a positive integer"):
        train_jointly(make_problem(), alpha=0.1, look_every=0)


def test_an_embedding_to_begin_with_has_a_row_for_each_symbol():
    problem = make_problem()
    with pytest.raises(ValueError, match=r"tables must have shape \(2, 5, 3\), got \(2, 4, 3\)"):
        train_by_projection(problem, tables=randn(2, 4, 3), n_steps=1, alpha=0.1)
    with pytest.raises(TypeError, match="symbols must be a torch tensor"):
        dataclasses.replace(problem, symbols=problem.symbols.numpy())


@pytest.mark.parametrize("train", [train_by_projection, train_jointly])
def test_an_embedding_to_begin_with_has_no_row_of_zeros(train):
    tables = torch.ones(2, P, 3)
    tables[1, 2] = 0
    with pytest.raises(ValueError, match="tables must have no row of zeros"):
        train(make_problem(), tables, n_steps=1, alpha=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": np.zeros((P * P, P))}, "target must be a torch tensor"),
        ({"gates": ([[1.0, 1.0]], [[1.0, 1.0, 1.0]])}, r"gates must be a Gates, as Gates\(u1, u2\) makes one"),
    ],
)
def test_parts_of_another_kind_are_named(change, message):
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(make_problem(), **change)


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ([[0, P]], "symbols must be from 0 to below n_symbols=5"),
        ([[0, -1]], "symbols must be from 0 to below n_symbols=5"),
        ([[0, 1, 2]], r"symbols must be int64 of shape \(n_samples, 2\), got torch.int64 of shape \(1, 3\)"),
        ([[0.0, 1.0]], r"symbols must be int64 of shape \(n_samples, 2\), got torch.float32"),
    ],
)
def test_other_symbols_must_be_those_of_the_problem(symbols, message):
    problem = make_problem()
    with pytest.raises(ValueError, match=message):
        problem.outputs(random_tables(problem), torch.zeros(problem.coef_shape).double(), torch.tensor(symbols))


@TRAINERS
def test_tables_may_be_a_parameter_and_stay_as_they_are(train):
    problem = make_problem()
    begin = torch.nn.Parameter(random_tables(problem, seed=4))
    copied = begin.detach().clone()
    state = train(problem, begin, n_steps=2, alpha=0.1)
    assert torch.equal(state.tables, train(problem, copied, n_steps=2, alpha=0.1).tables)
    assert torch.equal(begin, copied)
    assert begin.grad is None
    assert not state.tables.requires_grad


@TRAINERS
def test_whether_there_is_a_bar_is_true_or_false(train):
    with pytest.raises(ValueError, match="verbose must be True or False, got 'no'"):
        train(make_problem(), alpha=0.1, verbose="no")


def test_the_gradient_of_the_optimal_value_is_a_number_of_its_own():
    problem = make_problem()
    tables = torch.nn.Parameter(random_tables(problem, seed=4).float())
    value, gradient = optimal_value(problem, tables, 0.1)
    assert not gradient.requires_grad
    expected, slopes = optimal_value(problem, tables.detach().double(), 0.1)
    assert value == expected
    assert torch.equal(gradient, slopes)


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        (np.ones((2, P, 3)), TypeError, "tables must be a torch tensor"),
        (torch.full((2, P, 3), torch.nan), ValueError, "tables must be finite"),
        (torch.ones(2, P, 4), ValueError, r"tables must have shape \(2, 5, 3\), got \(2, 5, 4\)"),
    ],
)
def test_tables_are_checked(tables, error, message):
    for use in (train_by_projection, train_jointly, optimal_value):
        with pytest.raises(error, match=message):
            use(make_problem(), tables, alpha=0.1)

"""Column generation of gates: against all gates there are, round by round, its ends, and in the estimators."""

import dataclasses
import inspect
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
    Gates,
    GaussianGates,
    attention_program,
    load_model,
    save_model,
)
from convexformer.gates import GeneratedGates, GenerationEnd, GenerationInterrupted, TrainingData, generate_gates
from convexformer.gates.search import DualPoint, Found, GateSearch
from convexformer.solvers import Fista, Status, certify, get_penalty, get_solver, solve

ALPHA = 0.1
# Few restarts, for tests of anything but what the search finds; no bias, as in the programs to compare with.
QUICK = {"alpha": ALPHA, "n_restarts": 8, "solver": "fista", "random_state": 0, "fit_intercept": False}


def planted(n_samples=14, seed=0):
    """Targets that three gates of rank one make of tokens so few that all masks can be listed."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_samples, 2, 2))
    gates = Gates(rng.normal(size=(3, 2)), rng.normal(size=(3, 2)))
    masks = gates.masks(torch.as_tensor(X)).numpy().astype(float)
    return X, np.einsum("ig,ikd,gkd->i", masks, X, rng.normal(size=(3, 2, 2))), gates


def all_gates(X, n_angles=120):
    """A gate for each mask, by a fine grid over the angles of both directions."""
    angles = np.stack(np.meshgrid(np.arange(n_angles), np.arange(2 * n_angles)), -1).reshape(-1, 2)
    first, second = np.pi / n_angles * (angles.T + np.array([[0.1], [0.2]]))
    gates = Gates(np.c_[np.cos(first), np.sin(first)], np.c_[np.cos(second), np.sin(second)])
    return gates.select(gates.distinct(gates.masks(torch.as_tensor(X))))


@pytest.fixture(scope="module")
def problem():
    return planted()


@pytest.fixture(scope="module")
def everything(problem):
    return all_gates(problem[0])


@pytest.fixture(scope="module")
def generated(problem):
    X, y, _ = problem
    return generate_gates(X, y, alpha=ALPHA, fit_intercept=False, max_gates=40, tol=1e-5, random_state=0)


@pytest.fixture(scope="module")
def three(problem):
    return generate_gates(*problem[:2], max_gates=3, per_round=1, **QUICK)


def assert_certified(result, X, y, alpha=ALPHA, tol=1e-5, **parts):
    """The result's figures are those of a program that is built anew from its gates alone."""
    program = attention_program(X, y, alpha=alpha, gates=result.gates, **parts)
    coef, intercept = result.solution.coef, result.solution.intercept
    anew = certify(program, coef, intercept, result.certificate.dual_point)
    assert anew.primal == pytest.approx(result.certificate.primal, rel=1e-10)
    assert anew.dual == pytest.approx(result.certificate.dual, rel=1e-6)
    assert anew.relative_gap <= 1.01 * tol


def assert_lower_every_round(result):
    objectives = [step.objective for step in result.rounds]
    assert all(after < before for before, after in itertools.pairwise(objectives))
    counts = [step.n_gates for step in result.rounds]
    assert all(after > before for before, after in itertools.pairwise(counts))
    assert result.rounds[-1].objective == result.certificate.primal
    assert result.rounds[-1].n_gates == len(result.gates) == result.solution.coef.shape[0]


# Against all gates that there are


def test_generated_gates_do_as_well_as_all_gates_together(problem, everything, generated):
    X, y, own = problem
    assert len(everything) > 200
    program = attention_program(X, y, alpha=ALPHA, gates=everything)
    best = solve(program, get_solver("auto"), tol=1e-5, max_iter=50_000).certificate
    known = solve(attention_program(X, y, alpha=ALPHA, gates=own), Fista(), tol=1e-6).certificate
    assert best.primal < known.primal
    assert generated.certificate.primal < known.dual  # better than the gates that made the targets
    assert best.dual <= generated.certificate.primal <= best.primal + 1e-3 * best.reference
    assert len(generated.gates) < len(everything) / 5


def test_objective_falls_with_every_round_and_the_certificate_is_exact_for_the_gates(problem, generated):
    X, y, _ = problem
    assert generated.end is GenerationEnd.NONE_FOUND
    assert "does not prove" in generated.end.value
    assert len(generated.rounds) > 3
    assert_lower_every_round(generated)
    assert_certified(generated, X, y)


def test_the_first_round_is_the_network_without_gates(problem, generated):
    X, y, _ = problem
    linear = solve(attention_program(X, y, alpha=ALPHA), Fista(), tol=1e-6).certificate
    assert generated.rounds[0].n_gates == 1
    assert linear.dual <= generated.rounds[0].objective <= linear.primal + 1e-5 * linear.reference


def test_bounds_of_the_rounds(generated):
    for step in generated.rounds:
        assert step.estimated_bound <= step.dual <= step.objective
    # What the first round lacks most gates can give: its dual point is far from feasible for them.
    assert generated.rounds[0].violation > 0.5
    assert generated.rounds[0].estimated_bound < generated.certificate.dual


def test_masks_differ_and_none_is_closed(problem, generated):
    masks = generated.gates.masks(torch.as_tensor(problem[0])).numpy()
    assert masks.any(0).all()
    assert len(np.unique(masks, axis=1).T) == len(masks.T)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_search_finds_the_mask_of_the_largest_dual_norm(penalty, problem, everything):
    X = problem[0]
    values = np.random.default_rng(1).normal(size=(14, 2))
    masks = everything.masks(torch.as_tensor(X)).numpy()
    sums = np.einsum("ig,ikd,ic->gkdc", masks.astype(float), X, values)
    by_block = {
        "group_l2": np.linalg.norm(sums, axis=2).max(axis=(1, 2)),
        "nuclear": np.linalg.norm(sums, ord=2, axis=(2, 3)).max(axis=1),
    }
    weight = torch.full((14,), 1 / 14, dtype=torch.float64)
    point = DualPoint(torch.as_tensor(X), torch.as_tensor(values), get_penalty(penalty), 2.0, weight)
    known = torch.ones(14, 1, dtype=torch.bool)
    options = {"n_restarts": 64, "n_wanted": 3, "tol": 1e-3, "random_state": np.random.RandomState(0)}
    found = GateSearch(temporary=np.int64(1000)).violated(point, known, None, **options)
    assert found.violation == pytest.approx(by_block[penalty].max() / 2.0 - 1, rel=1e-9)
    first = found.gates.masks(torch.as_tensor(X)).numpy()[:, 0]
    assert (masks[:, by_block[penalty].argmax()] == first).all()
    # A mask that the program has is not found again.
    again = GateSearch().violated(point, torch.as_tensor(first)[:, None], None, **options)
    assert not (again.gates.masks(torch.as_tensor(X)).numpy() == first[:, None]).all(0).any()


def test_a_third_of_the_restarts_begins_near_the_gates_in_use(problem):
    tokens = torch.as_tensor(problem[0])
    point = DualPoint(tokens, torch.ones(14, 2).double(), get_penalty("nuclear"), 1.0, torch.ones(14).double())
    used = problem[2].select(np.array([0]))
    search, draws = GateSearch(perturbation=1e-6), np.random.RandomState
    alone, near = (search._starting_directions(point, gates, 9, draws(0)) for gates in (None, used))
    for directions, own in zip(near, (used.u1, used.u2), strict=True):
        cosines = (directions @ torch.as_tensor(own[0] / np.linalg.norm(own[0]))).numpy()
        assert (cosines > 1 - 1e-9).tolist() == 6 * [False] + 3 * [True]
    assert [len(directions) for directions in (*alone, *near)] == 4 * [9]
    for directions in (*alone, *near):
        torch.testing.assert_close(directions.norm(dim=1), torch.ones(9).double())


@pytest.mark.parametrize("seed", [2, 3])
def test_search_with_weights_is_that_with_repeated_samples(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(40, 2, 2))
    y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0) + 0.1 * rng.normal(size=40)
    weight = rng.integers(0, 4, size=40)
    index = np.repeat(np.arange(40), weight)
    options = {"alpha": 0.02, "max_gates": 9, "n_restarts": 24, "random_state": 0, "tol": 1e-6}
    weighted = generate_gates(X, y, sample_weight=weight, **options)
    repeated = generate_gates(X[index], y[index], **options)
    masks = [result.gates.masks(torch.as_tensor(X[index])).numpy() for result in (weighted, repeated)]
    np.testing.assert_array_equal(*masks)
    # Two points of one program, both within the tolerance of its optimum.
    within = 1e-6 * repeated.certificate.reference
    assert weighted.certificate.primal == pytest.approx(repeated.certificate.primal, rel=0, abs=within)


# Other programs


@pytest.mark.parametrize(
    ("loss", "penalty"), [("logistic", "group_l2"), ("softmax", "nuclear"), ("huber", "group_l2"), ("huber", "nuclear")]
)
def test_other_losses_and_penalties_with_weights_and_intercept(loss, penalty):
    rng = np.random.default_rng(0)
    X, weight = rng.normal(size=(24, 3, 2)), rng.uniform(0, 1, size=24)
    score = np.where(X[:, 0, 0] > 0, X[:, 1, 0], -X[:, 2, 1])
    classes = np.digitize(score, [-0.5, 0.5])
    y = {"logistic": np.sign(score)[:, None], "softmax": np.eye(3)[classes], "huber": np.c_[score, score**2]}[loss]
    parts = {"loss": loss, "penalty": penalty, "sample_weight": weight, "fit_intercept": True}
    result = generate_gates(X, y, max_gates=4, **{**QUICK, **parts})
    assert len(result.rounds) > 1
    assert_lower_every_round(result)
    assert_certified(result, X, y, tol=1e-4, **parts)


def test_samples_of_weight_zero_do_not_count(problem):
    X, y, _ = problem
    options = {**QUICK, "max_gates": 3, "per_round": 2}
    weight = np.r_[np.ones(10), np.zeros(4)]
    weighted, alone = generate_gates(X, y, sample_weight=weight, **options), generate_gates(X[:10], y[:10], **options)
    assert weighted.certificate.primal == pytest.approx(alone.certificate.primal, rel=1e-3)
    counted = weighted.gates.masks(torch.as_tensor(X[:10])).numpy()
    assert len(np.unique(counted, axis=1).T) == len(counted.T)


def test_single_precision(problem):
    X, y, _ = problem
    result = generate_gates(X.astype(np.float32), y, max_gates=4, **QUICK)
    assert result.solution.coef.dtype == torch.float32
    assert_lower_every_round(result)
    assert_certified(result, X.astype(np.float32), y, tol=1e-4)


def test_tensors_may_have_gradients(problem):
    X, y, _ = problem
    given = [torch.tensor(part, requires_grad=True) for part in (X, y, np.ones(len(y)))]
    result = generate_gates(*given[:2], sample_weight=given[2], max_gates=2, **QUICK)
    np.testing.assert_array_equal(result.gates.u1, generate_gates(X, y, max_gates=2, **QUICK).gates.u1)


def test_random_state_decides_the_gates(problem, three):
    X, y, _ = problem
    options = {**QUICK, "max_gates": 2, "per_round": 1}
    same, other = (generate_gates(X, y, **{**options, "random_state": state}) for state in (0, 1))
    np.testing.assert_array_equal(three.gates.u1[:2], same.gates.u1)
    assert not np.array_equal(three.gates.u1[:2], other.gates.u1)


# Starts and ends


@pytest.mark.parametrize(("max_gates", "per_round"), [(1, 3), (3, 1), (4, 3)])
def test_budget(problem, three, max_gates, per_round):
    X, y, _ = problem
    result = three if per_round == 1 else generate_gates(X, y, max_gates=max_gates, per_round=per_round, **QUICK)
    assert result.end is GenerationEnd.BUDGET
    assert len(result.gates) == max_gates
    assert result.rounds[-1].violation > 1e-4
    assert max(np.diff([step.n_gates for step in result.rounds]), default=0) <= per_round


@pytest.mark.parametrize("start", [GaussianGates(3), Gates([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [2.0, 0.0]])])
def test_other_starts(problem, start):
    X, y, _ = problem
    result = generate_gates(X, y, start=start, max_gates=4, **QUICK)
    # Of gates with equal masks one is left.
    assert result.rounds[0].n_gates == (3 if isinstance(start, GaussianGates) else 1)
    assert_lower_every_round(result)


def test_where_no_gate_could_help_none_is_found(problem):
    X, y, _ = problem
    largest = float(np.abs(X[:, :, :]).max() * 2 * np.abs(y).mean())  # bounds every mask's dual norm
    result = generate_gates(X, y, alpha=largest, fit_intercept=False, random_state=0)
    assert result.end is GenerationEnd.NONE_FOUND
    assert (len(result.gates), len(result.rounds)) == (1, 1)
    assert not result.solution.coef.any()
    assert result.rounds[0].violation < 0
    assert result.rounds[0].estimated_bound == result.certificate.dual


def test_targets_that_a_constant_meets_leave_nothing_to_violate(problem):
    result = generate_gates(problem[0][:8], np.full(8, 2.0), **{**QUICK, "fit_intercept": True})
    assert result.end is GenerationEnd.NONE_FOUND
    (only,) = result.rounds
    assert (only.violation, only.estimated_bound, only.objective) == (-1.0, 0.0, 0.0)


def test_found_gates_that_do_not_lower_the_objective_are_dropped_and_the_gap_is_made_smaller_twice(problem):
    class FindsWhatThereIs(GateSearch):
        def violated(self, point, known, in_use, **options):
            return Found(Gates(np.zeros((1, 2)), np.zeros((1, 2))), 1.0)

    result = generate_gates(*problem[:2], search=FindsWhatThereIs(), tol=1e-2, **QUICK)
    assert result.end is GenerationEnd.NONE_FOUND
    assert len(result.gates) == len(result.rounds) == 1
    assert result.certificate.relative_gap <= 1e-2 * 1e-4


def test_callback_sees_every_round_and_can_stop_and_a_bar_shows_them(problem, capsys):
    X, y, _ = problem
    seen = []
    options = {"per_round": 1, "max_gates": 4, "verbose": True}
    result = generate_gates(X, y, callback=lambda step: seen.append(step) or len(seen) == 2, **QUICK, **options)
    assert result.end is GenerationEnd.STOPPED
    assert seen == result.rounds
    assert len(seen) == 2
    shown = capsys.readouterr().err
    assert "gates:  50%" in shown
    assert "violation" in shown


class InterruptedFista(Fista):
    """Ctrl-C in the first step of the third solve."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "n_solves", 0)

    def init(self, program, start):
        object.__setattr__(self, "n_solves", self.n_solves + 1)
        return super().init(program, start)

    def step(self, program, state):
        if self.n_solves == 3:
            raise KeyboardInterrupt
        return super().step(program, state)


def press_ctrl_c(step):
    if step.n_gates > 1:
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["search", "solve"])
def test_ctrl_c_keeps_what_there_is(problem, where):
    X, y, _ = problem
    options = {"callback": press_ctrl_c} if where == "search" else {"solver": InterruptedFista()}
    with pytest.raises(GenerationInterrupted, match="gates") as caught:
        generate_gates(X, y, per_round=2, **{**QUICK, **options})
    result = caught.value.result
    assert result.end is GenerationEnd.INTERRUPTED
    assert caught.value.gates is result.gates
    sent = pickle.loads(pickle.dumps(caught.value))  # from a process of joblib
    assert str(sent) == str(caught.value)
    assert np.array_equal(sent.gates.u1, result.gates.u1)
    assert len(result.gates) == (3 if where == "search" else 5)
    assert result.certificate.primal <= result.rounds[-1].objective
    assert_certified(result, X, y, tol=1.0)


def test_ctrl_c_before_anything_is_solved_stays_one(problem):
    class Interrupted(GaussianGates):
        def make(self, data, random_state):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        generate_gates(*problem[:2], start=Interrupted(2), **QUICK)
    assert caught.type is KeyboardInterrupt


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_unit_of_the_targets_does_not_matter_to_what_is_generated(problem, unit):
    X, y, _ = problem
    plain = generate_gates(X, y, max_gates=5, **QUICK)
    scaled = generate_gates(X, unit * y, max_gates=5, **{**QUICK, "alpha": unit * ALPHA})
    assert len(scaled.gates) == len(plain.gates) > 2
    assert scaled.end is plain.end
    assert scaled.certificate.primal == pytest.approx(unit**2 * plain.certificate.primal, rel=1e-3)


def test_ctrl_c_in_an_estimator_leaves_it_usable(problem):
    X, y, _ = problem
    source = GeneratedGates(n_restarts=8, callback=press_ctrl_c)
    model = ConvexAttentionRegressor(ALPHA, activation="gated_relu", gates=source)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    assert len(model.gates_) > 1
    assert model.status_ is Status.INTERRUPTED  # though solved with the gates that there are
    assert model.heads_.objective(X, y) == pytest.approx(model.certificate_.primal, rel=1e-9)
    np.testing.assert_allclose(model.predict(X), model.heads_.predict(X)[:, 0], atol=1e-12)


def test_wrong_starts_and_callbacks_are_named_before_anything_is_solved(problem):
    X, y, _ = problem
    with pytest.raises(TypeError, match=r"start must be None, Gates\(u1, u2\) or a source of gates, got 'gaussian'"):
        generate_gates(X, y, alpha=ALPHA, start="gaussian")
    with pytest.raises(TypeError, match="callback must be None or callable with a GenerationRound, got 3"):
        generate_gates(X, y, alpha=ALPHA, callback=3)


def test_answers_of_callbacks_that_are_neither_true_nor_false_are_named(problem):
    X, y, _ = problem
    with pytest.raises(TypeError, match="callback must return True, False or None, got ndarray"):
        generate_gates(X, y, alpha=ALPHA, callback=lambda step: np.zeros(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gates": 0}, "max_gates must be a positive integer, got 0"),
        ({"n_restarts": 1.5}, r"n_restarts must be a positive integer, got 1\.5"),
        ({"per_round": True}, "per_round must be a positive integer, got True"),
        ({"tol": -1}, "tol must be a non-negative number"),
        ({"alpha": 0}, "alpha must be positive"),
        ({"start": GaussianGates(5), "max_gates": 3}, "max_gates=3 is less than the 5 gates of start"),
        ({"start": Gates(np.ones((1, 3)), np.ones((1, 2)))}, r"\(n_tokens, n_features\) = \(2, 2\), got \(3, 2\)"),
        ({"solver": "nonsense", "max_gates": 1}, "solver must be"),
        ({"sample_weight": -np.ones(14)}, "sample_weight must be non-negative, got -1"),
        ({"fit_intercept": "no"}, "fit_intercept must be True or False, got 'no'"),
        ({"verbose": "no"}, "verbose must be True or False, got 'no'"),
        ({"tol": None}, "tol must be a non-negative number"),
    ],
)
def test_errors_name_the_argument(problem, options, message):
    X, y, _ = problem
    with pytest.raises(ValueError, match=message):
        generate_gates(X, y, **{"alpha": ALPHA, "random_state": 0, **options})


# In the estimators


def test_the_source_has_the_parameters_of_the_function():
    options = {name: p.default for name, p in inspect.signature(generate_gates).parameters.items() if p.kind == 3}
    of_source = {field.name: field.default for field in dataclasses.fields(GeneratedGates)}
    program = {"alpha", "loss", "penalty", "sample_weight", "fit_intercept", "random_state"}
    assert of_source == {name: default for name, default in options.items() if name not in program}


def test_an_estimator_with_generated_gates_attains_what_was_generated(problem, tmp_path):
    X, y, _ = problem
    options = {"activation": "gated_relu", "gates": "generated", "random_state": 0}
    model = ConvexAttentionRegressor(ALPHA, n_gates=3, **options).fit(X, y)
    result = generate_gates(X, y, alpha=ALPHA, fit_intercept=True, max_gates=3, random_state=0)
    np.testing.assert_array_equal(model.gates_.u1, result.gates.u1)
    assert model.certificate_.primal == pytest.approx(result.certificate.primal, rel=1e-3)
    save_model(model, tmp_path / "m.npz")
    again = load_model(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_an_instance_with_its_own_parameters_and_its_clone(problem):
    X, y, _ = problem
    source = GeneratedGates(3, per_round=2, n_restarts=8)
    labels = np.where(y > 0, "up", "down")
    model = ConvexAttentionClassifier(ALPHA, activation="gated_relu", gates=source, random_state=0)
    first, second = model.fit(X, labels), clone(model).fit(X, labels)
    assert 1 < len(first.gates_) <= 3
    np.testing.assert_array_equal(first.coef_, second.coef_)


def test_a_grid_of_alphas_is_refused(problem):
    X, y, _ = problem
    options = {"activation": "gated_relu", "gates": "generated"}
    with pytest.raises(ValueError, match=r"gates='generated' depend on alpha.*generate_gates"):
        ConvexAttentionRegressor(**options).path(X, y)
    with pytest.raises(ValueError, match="depend on alpha"):
        ConvexAttentionRegressorCV(**options).fit(X, y)
    # Gates that would not be used are refused for that.
    with pytest.raises(ValueError, match="gates='generated' is for activation='gated_relu'"):
        ConvexAttentionRegressorCV(gates="generated", alphas=2, cv=2).fit(X, y)


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_the_gates_that_the_refusal_of_a_grid_advises_give_what_a_fit_with_generated_gates_gives(fit_intercept):
    X, y, _ = planted()
    y = y + 3.0
    options = {"activation": "gated_relu", "fit_intercept": fit_intercept, "random_state": 0}
    generated = ConvexAttentionRegressor(ALPHA, gates="generated", n_gates=3, **options)
    with pytest.raises(ValueError, match=f"fit_intercept={fit_intercept}"):
        generated.path(X, y)
    gates = generate_gates(X, y, alpha=ALPHA, fit_intercept=fit_intercept, max_gates=3, random_state=0).gates
    beforehand = ConvexAttentionRegressor(ALPHA, gates=gates, **options).fit(X, y)
    assert beforehand.certificate_.primal == pytest.approx(generated.fit(X, y).certificate_.primal, rel=1e-3)


def test_gates_are_generated_for_the_bias_that_estimators_have_by_default():
    X, y, _ = planted()
    result = generate_gates(X, y + 3.0, alpha=ALPHA, max_gates=3, random_state=0)
    model = ConvexAttentionRegressor(ALPHA, activation="gated_relu", gates=result.gates).fit(X, y + 3.0)
    assert result.certificate.primal == pytest.approx(model.certificate_.primal, rel=1e-3)


def test_generated_gates_need_a_program():
    for parts in ({}, {"target": torch.zeros(5, 1), "alpha": 0.1}):
        with pytest.raises(ValueError, match="need data with target, loss, penalty and alpha"):
            GeneratedGates(4).make(TrainingData(torch.zeros(5, 2, 2), **parts), np.random.RandomState(0))
    with pytest.raises(ValueError, match="max_gates must be a positive integer"):
        GeneratedGates(0)


def test_solves_that_do_not_converge_warn_but_the_certificate_stays_true(problem):
    X, y, _ = problem
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = generate_gates(X, y, max_iter=3, max_gates=4, **{**QUICK, "alpha": 0.01})
    assert any("did not converge" in str(warning.message) for warning in caught)
    assert_lower_every_round(result)
    assert_certified(result, X, y, alpha=0.01, tol=result.certificate.relative_gap)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"n_steps": 0}, "n_steps"),
        ({"widths": 0.5}, "widths must be a pair"),
        ({"trial_lengths": (0.5, 0.0)}, r"trial_lengths\[1\]"),
        ({"apart": -0.1}, "apart must be a positive finite number"),
        ({"gap_factor": 1.0}, "gap_factor must be below 1"),
        ({"temporary": 0}, "temporary must be a positive integer"),
    ],
)
def test_numbers_of_a_search_are_checked_by_name(numbers, message):
    with pytest.raises(ValueError, match=message):
        GateSearch(**numbers)


def test_a_search_of_fewer_steps_is_taken_and_of_another_kind_refused():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 2, 2))
    y = np.where(X[:, 0, 0] >= 0, X[:, 1, 0], 0.0)
    options = {"alpha": 0.05, "max_gates": 4, "random_state": 0}
    usual, short = (generate_gates(X, y, search=search, **options) for search in (None, GateSearch(n_steps=1)))
    assert not np.array_equal(usual.gates.u2, short.gates.u2)
    with pytest.raises(TypeError, match="search must be a GateSearch"):
        generate_gates(X, y, search={"n_steps": 1}, **options)

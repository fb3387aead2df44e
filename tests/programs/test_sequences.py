"""Networks for sequence targets: programs, heads, the estimator."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import Lasso

from convexformer import (
    ConvexAttentionRegressor,
    ConvexSequenceRegressor,
    SequenceAttention,
    SequenceHeads,
    attention_program,
    load_model,
    optimality_gap,
    save_model,
    sequence_program,
)
from convexformer.nn import train
from convexformer.programs.sequence import HeadWeights, get_form
from convexformer.solvers import ColumnGeneration, Status, certify, get_penalty, solve

FORMS = ["single_row", "stochastic", "substochastic"]
KINDS = [
    ("single_row", "group_l2"),
    ("single_row", "nuclear"),
    ("stochastic", "group_l2"),
    ("substochastic", "group_l2"),
]


def data(n_samples=30, n=4, d=3, n_targets=3, c=2, seed=0, dtype=np.float64):
    """Targets that mix tokens by one row-stochastic matrix."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_samples, n, d))
    mixing = rng.dirichlet(0.5 * np.ones(n), size=n_targets)
    Y = np.einsum("tk,ikd,dc->itc", mixing, X, rng.normal(size=(d, c))) + 0.3 * rng.normal(
        size=(n_samples, n_targets, c)
    )
    return X.astype(dtype), (Y + 1).astype(dtype)


def test_counterexample_of_the_printed_theorem():
    # X = [1; 1], Y = [1; 0], beta = .01: equal row sums cannot treat the two rows apart, unequal ones can.
    X, Y = np.ones((1, 2, 1)), np.array([[[1.0], [0.0]]])
    fits = {form: ConvexSequenceRegressor(0.01, form=form, fit_intercept=False, tol=1e-8).fit(X, Y) for form in FORMS}
    assert fits["stochastic"].certificate_.primal == pytest.approx(0.254975, abs=1e-8)
    assert fits["stochastic"].certificate_.dual == pytest.approx(0.254975, abs=1e-8)
    assert fits["substochastic"].certificate_.primal == pytest.approx(0.00995, abs=1e-8)


@pytest.mark.parametrize(("form", "penalty"), KINDS)
def test_heads_are_the_solution(form, penalty):
    X, Y = data()
    model = ConvexSequenceRegressor(0.05, form=form, penalty=penalty, tol=1e-7).fit(X, Y)
    heads = model.heads_
    assert len(heads) > 0
    assert heads.objective(X, Y) == pytest.approx(model.certificate_.primal, rel=1e-11)
    np.testing.assert_allclose(heads.predict(X), model.predict(X), atol=1e-11)
    np.testing.assert_allclose(heads.to_coef(), model.coef_, atol=1e-12)
    by_hand = np.einsum("tkdc,ikd->itc", model.coef_, X) + model.intercept_
    np.testing.assert_allclose(model.predict(X), by_hand, atol=1e-11)
    np.testing.assert_allclose(model.attention_map_, heads.attention_map(), atol=1e-12)
    sums = heads.w1.sum(2)
    if form == "stochastic":
        np.testing.assert_allclose(sums, 1, atol=1e-9)
        np.testing.assert_allclose(model.attention_map_.sum(1), 1, atol=1e-9)
        assert len(heads) <= 2 * 2 * 3
    elif form == "substochastic":
        assert sums.max() <= 1 + 1e-9
    else:
        assert ((sums == 0) | (sums == 1)).all()
        assert model.attention_map_.sum() == pytest.approx(1)


@pytest.mark.parametrize(("form", "penalty"), KINDS)
def test_going_back_from_heads_keeps_the_certified_objective(form, penalty):
    X, Y = data()
    model = ConvexSequenceRegressor(0.05, form=form, penalty=penalty, tol=1e-7).fit(X, Y)
    program = sequence_program(X, Y, alpha=0.05, form=form, penalty=penalty, fit_intercept=True)
    again = certify(program, model.heads_.program_coef(), torch.as_tensor(model.intercept_).flatten())
    assert again.primal == pytest.approx(model.certificate_.primal, rel=1e-11)


def test_classes_of_networks_are_ordered():
    # Every row-stochastic matrix is sub-stochastic. One row at a time costs once per row, so it is no smaller class.
    X, Y = data()
    value = {form: ConvexSequenceRegressor(0.05, form=form, tol=1e-8).fit(X, Y).certificate_.primal for form in FORMS}
    assert value["substochastic"] < value["stochastic"]
    one_row = {
        form: ConvexSequenceRegressor(0.05, form=form, tol=1e-8).fit(X[..., :1], Y[:, :1, 0]).certificate_.primal
        for form in FORMS
    }
    # With one target row and tokens of width 1 the forms agree but for rows that look away, which cost nothing there.
    assert one_row["single_row"] == pytest.approx(one_row["stochastic"], rel=1e-6)
    assert one_row["single_row"] == pytest.approx(one_row["substochastic"], rel=1e-6)


def test_single_row_form_is_one_vector_program_per_target_row():
    X, Y = data()
    for penalty in ("group_l2", "nuclear"):
        together = ConvexSequenceRegressor(0.05, penalty=penalty, tol=1e-9).fit(X, Y)
        apart = [ConvexAttentionRegressor(0.05, penalty=penalty, tol=1e-9).fit(X, Y[:, t]) for t in range(3)]
        total = sum(model.certificate_.primal for model in apart)
        assert together.certificate_.primal == pytest.approx(total, rel=1e-7)
        np.testing.assert_allclose(together.coef_, np.stack([model.coef_ for model in apart]), atol=1e-3)


def test_one_row_and_one_output_is_the_lasso():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 6)), rng.normal(size=40)
    lasso = Lasso(alpha=0.1, tol=1e-12).fit(X, y)
    for form in FORMS:
        model = ConvexSequenceRegressor(0.1, form=form, tol=1e-10).fit(X, y)
        np.testing.assert_allclose(model.coef_[0, :, 0, 0], lasso.coef_, atol=1e-5)
        np.testing.assert_allclose(model.predict(X), lasso.predict(X), atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_no_trained_network_falls_below_the_bound(seed):
    X, Y = data(seed=seed)
    alpha = 0.05
    model = ConvexSequenceRegressor(alpha, form="stochastic", tol=1e-7).fit(X, Y)
    network = SequenceAttention(4, 3, 2, n_heads=12, n_targets=3, seed=seed).double()
    train(network, torch.as_tensor(X), torch.as_tensor(Y), alpha=alpha, lr=0.05, n_steps=600)
    heads = SequenceHeads.from_torch(network, alpha=alpha)
    assert heads.objective(X, Y) >= model.certificate_.dual
    with pytest.raises(ValueError, match="y must be finite"):
        heads.objective(X, np.where(Y[0, 0] == Y, np.nan, Y))
    assert heads.objective(X, Y) <= 1.1 * model.certificate_.primal  # with enough heads training comes near
    program = sequence_program(X, Y, alpha=alpha, form="stochastic", fit_intercept=True)
    inside = certify(program, heads.program_coef(), torch.as_tensor(heads.intercept).flatten())
    assert model.certificate_.dual <= inside.primal <= heads.objective(X, Y) + 1e-12


def test_torch_round_trip():
    X, Y = data()
    heads = ConvexSequenceRegressor(0.05, form="stochastic").fit(X, Y).heads_
    network = heads.to_torch()
    np.testing.assert_allclose(network(torch.as_tensor(X)).detach().numpy(), heads.predict(X), atol=1e-12)
    assert float(network.decay().detach()) == pytest.approx(heads.decay(), rel=1e-12)
    back = SequenceHeads.from_torch(network, alpha=0.05)
    assert back.objective(X, Y) == pytest.approx(heads.objective(X, Y), rel=1e-12)
    empty = ConvexSequenceRegressor(1e3, form="stochastic").fit(X, Y).heads_
    assert len(empty) == 0
    np.testing.assert_allclose(empty.to_torch()(torch.as_tensor(X)).detach().numpy(), empty.predict(X), atol=1e-12)
    assert (empty.attention_map() == 0).all()


def test_float32_data_are_solved_in_float64_where_rows_must_have_equal_sums():
    X, Y = data(dtype=np.float32)
    model = ConvexSequenceRegressor(0.05, form="stochastic", tol=1e-7).fit(X, Y)
    exact = ConvexSequenceRegressor(0.05, form="stochastic", tol=1e-7).fit(X.astype(float), Y.astype(float))
    assert model.certificate_.primal == pytest.approx(exact.certificate_.primal, rel=1e-6)
    assert model.predict(X).dtype == np.float32
    with pytest.raises(ValueError, match="dtype must be None or 'float64'"):
        clone(model).set_params(dtype="float32").fit(X, Y)
    single = ConvexSequenceRegressor(0.05).fit(X, Y)
    assert single.coef_.dtype == np.float32


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_heads_in_single_precision_are_the_model_in_any_units(size):
    X, Y = data()
    small, usual = (ConvexSequenceRegressor(0.05 * unit).fit((unit * X).astype(np.float32), Y) for unit in (size, 1.0))
    assert small.heads_.objective((size * X).astype(np.float32), Y) == pytest.approx(
        small.certificate_.primal, rel=1e-5
    )
    np.testing.assert_allclose(small.attention_map_, usual.attention_map_, atol=1e-3)


def test_solvers_agree():
    X, Y = data()
    values = {
        solver: ConvexSequenceRegressor(0.02, form="stochastic", solver=solver, tol=1e-6).fit(X, Y).certificate_.primal
        for solver in ("auto", "fista", "column_generation", "exact")
    }
    assert max(values.values()) - min(values.values()) <= 2e-6 * max(values.values())


def test_weights_are_repetitions():
    X, Y = data()
    weight = np.arange(len(X)) % 3
    for form in FORMS:
        weighted = ConvexSequenceRegressor(0.05, form=form, tol=1e-9).fit(X, Y, sample_weight=weight)
        plain = ConvexSequenceRegressor(0.05, form=form, tol=1e-9).fit(*(np.repeat(p, weight, axis=0) for p in (X, Y)))
        assert weighted.certificate_.primal == pytest.approx(plain.certificate_.primal, rel=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "rows"}, "form must be one of"),
        ({"penalty": "l1"}, "penalty must be one of"),
        ({"form": "stochastic", "penalty": "nuclear"}, r"penalty must be one of \['group_l2'\] with form='stochastic'"),
        ({"loss": "softmax"}, "loss must be a loss of numbers"),
        ({"loss": "logistic"}, "loss must be a loss of numbers"),
        ({"alpha": 0.0}, "alpha must be a positive finite number|alpha must be positive"),
        ({"tol": -1.0}, "tol"),
        ({"device": "nowhere"}, "device must be"),
    ],
)
def test_wrong_parameters_are_named(change, message):
    X, Y = data()
    with pytest.raises(ValueError, match=message):
        ConvexSequenceRegressor(**change).fit(X, Y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ndim", [1, 2])
def test_heads_read_targets_as_fit_does(form, ndim):
    X, Y = data()
    y = Y[:, 0, 0] if ndim == 1 else Y[..., 0]
    model = ConvexSequenceRegressor(0.05, form=form, tol=1e-6).fit(X, y)
    primal = model.certificate_.primal
    assert model.heads_.objective(X, y) == pytest.approx(primal, rel=1e-6)
    report = optimality_gap(model.heads_, X, y, tol=1e-6)
    assert report.objective == pytest.approx(primal, rel=1e-6)
    assert report.relative_gap <= 2e-6


def test_heads_are_made_of_arrays_as_of_tensors():
    X, Y = data()
    result = solve(sequence_program(X, Y, alpha=0.05, fit_intercept=True), ColumnGeneration(), tol=1e-4)
    options = {"n_targets": Y.shape[1], "alpha": 0.05, "form": "single_row"}
    tensors = SequenceHeads.from_coef(result.coef, result.intercept, **options)
    arrays = SequenceHeads.from_coef(result.coef.numpy(), result.intercept.numpy().tolist(), **options)
    np.testing.assert_array_equal(arrays.predict(X), tensors.predict(X))


def test_wrong_data_are_named():
    X, Y = data()
    with pytest.raises(ValueError, match="y must have shape"):
        ConvexSequenceRegressor().fit(X, Y[..., None])
    with pytest.raises(ValueError, match="y must have shape"):
        sequence_program(X, Y[:, 0], alpha=0.1)
    with pytest.raises(ValueError, match="y must have one row per sample, 30 as X, got 29"):
        ConvexSequenceRegressor().fit(X, Y[1:])
    with pytest.raises(ValueError, match=r"X must have shape \(n_samples, 4, 3\) as in fit"):
        ConvexSequenceRegressor().fit(X, Y).predict(X[:, :3])
    with pytest.raises(ValueError, match=r"y must have shape \(30, 3, 2\) as in fit, got \(30, 2, 3\)"):
        ConvexSequenceRegressor().fit(X, Y).score(X, Y.transpose(0, 2, 1))
    model = ConvexSequenceRegressor().fit(X, Y)
    with pytest.raises(ValueError, match="fit_intercept must be True or False, got 'no'"):
        sequence_program(X, Y, alpha=0.1, fit_intercept="no")
    with pytest.raises(ValueError, match="solver must be one of"):
        model.set_params(solver="nonsense").fit(X, Y[:, 0, 0])
    assert model.predict(X).shape == Y.shape  # that of the fit before
    assert model.score(torch.tensor(X, requires_grad=True), Y) == model.score(X, Y)
    eye = np.eye(2)[None]
    with pytest.raises(ValueError, match="rows of w1 must sum to 1"):
        SequenceHeads(0.5 * eye, [[1.0]], [[1.0]], np.zeros((2, 1)), alpha=0.1, form="stochastic")
    with pytest.raises(ValueError, match="one row in the simplex"):
        SequenceHeads(eye, [[1.0]], [[1.0]], np.zeros((2, 1)), alpha=0.1, form="single_row")
    with pytest.raises(ValueError, match="at most 1"):
        SequenceHeads(2 * eye, [[1.0]], [[1.0]], np.zeros((2, 1)), alpha=0.1, form="substochastic")
    with pytest.raises(ValueError, match="intercept must have shape"):
        SequenceHeads(eye, [[1.0]], [[1.0]], np.zeros(2), alpha=0.1, form="stochastic")
    with pytest.raises(ValueError, match="row-stochastic attention"):
        SequenceHeads(0.5 * eye, [[1.0]], [[1.0]], np.zeros((2, 1)), alpha=0.1, form="substochastic").to_torch()


def test_a_substochastic_head_has_no_row_above_one():
    w1 = [[[2.0, 0.0], [0.0, 0.5]]]
    with pytest.raises(ValueError, match="rows of w1 must sum to at most 1"):
        SequenceHeads(w1, [[1.0]], [[1.0]], np.zeros((2, 1)), alpha=0.1, form="substochastic")


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_saved_and_loaded(form, ndim, tmp_path):
    X, Y = data()
    target = [None, Y[:, 0, 0], Y[:, :, 0], Y][ndim]
    model = ConvexSequenceRegressor(0.05, form=form).fit(X, target)
    save_model(model, tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.attention_map_, model.attention_map_)
    assert again.get_params() == model.get_params()
    assert (again.certificate_.primal, again.certificate_.dual) == (model.certificate_.primal, model.certificate_.dual)
    assert len(again.heads_) == len(model.heads_)
    with pytest.raises(TypeError, match="model must be one of"):
        save_model(Lasso(), tmp_path / "other.npz")
    with pytest.raises(NotFittedError):
        save_model(ConvexSequenceRegressor(), tmp_path / "other.npz")


def test_an_interrupt_leaves_a_usable_estimator():
    X, Y = data()

    def stop(progress):
        raise KeyboardInterrupt

    model = ConvexSequenceRegressor(0.01, form="stochastic", callback=stop, tol=1e-9)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y)
    assert model.status_.name == "INTERRUPTED"
    assert model.predict(X).shape == Y.shape


@pytest.mark.parametrize("seed", [1, 6, 8])
def test_column_generation_ends_where_rounding_leaves_the_weights_alone(seed):
    # An atom violates its constraint by more than rounding and gets no weight: it came back until max_iter.
    rng = np.random.default_rng(seed)
    X, Y = rng.normal(size=(6, 3, 1)), 2 * rng.normal(size=(6, 2, 2))
    form, loss = ["substochastic", "stochastic"][seed % 2], ["huber", "squared"][seed // 2 % 2]
    program = sequence_program(X, Y, alpha=0.02, form=form, loss=loss)
    with pytest.warns(ConvergenceWarning, match="relative gap"):
        result = solve(program, ColumnGeneration(), tol=1e-13, max_iter=60)
    assert result.status is Status.STALLED
    assert result.certificate.relative_gap < 1e-5


def test_column_generation_refuses_a_penalty_without_atoms():
    X, Y = data()
    program = sequence_program(X, Y, alpha=0.05, penalty="nuclear")
    with pytest.raises(TypeError, match="violating_atoms"):
        solve(program, ColumnGeneration())


def test_program_of_one_target_row_is_the_attention_program():
    X, Y = data()
    one = sequence_program(X, Y[:, :1], alpha=0.05)
    other = attention_program(X, Y[:, 0], alpha=0.05)
    assert one.alpha_max == pytest.approx(other.alpha_max, rel=1e-12)


@pytest.mark.parametrize("weight", [-np.ones(3), np.ones(2), np.zeros(3)])
def test_objective_of_odd_weights_is_refused(weight):
    X, Y = np.random.default_rng(0).normal(size=(2, 3, 2, 1))
    heads = ConvexSequenceRegressor(0.05).fit(X, Y).heads_
    with pytest.raises(ValueError, match="sample_weight"):
        heads.objective(X, Y, weight)


@pytest.mark.parametrize("form", ["stochastic", "single_row"])
def test_weights_of_several_kinds_become_floating_point_numbers_of_one_precision(form):
    w1 = np.eye(2)[None] if form == "stochastic" else np.array([[[1.0, 0], [0, 0]]])
    heads = SequenceHeads(w1, [[2]], [[3]], np.zeros((2, 1), dtype=int), alpha=0.1, form=form)
    assert heads.to_coef().dtype == heads.w2.dtype == np.float64
    if form == "stochastic":
        assert heads.to_torch()(torch.ones(1, 2, 1, dtype=torch.float64)).flatten().tolist() == [6, 6]


def test_heads_that_cost_nothing_read_nothing():
    heads = SequenceHeads(np.eye(2)[None], [[0.0]], [[0.0]], np.zeros((2, 1)), alpha=0.1, form="stochastic")
    assert not heads.attention_map().any()


@pytest.mark.parametrize("shape", [(30, 0, 2), (30, 3, 0)])
def test_targets_without_rows_or_outputs_are_named(shape):
    with pytest.raises(ValueError, match="y must have at least one output"):
        ConvexSequenceRegressor().fit(data()[0], np.zeros(shape))


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 4, 2), (4, 3)])
def test_the_network_names_tokens_of_other_shapes(shape):
    with pytest.raises(ValueError, match=r"tokens must have shape \(n_samples, 4, 3\)"):
        SequenceAttention(4, 3, 2)(torch.zeros(shape))


def single_precision_heads(form, excess=0.0):
    """Heads of the class in float32, whose rows sum to `excess` more than they should at most."""
    generator = torch.Generator().manual_seed(0)
    w1 = torch.softmax(torch.randn(5, 3, 4, generator=generator), -1)
    if form == "single_row":
        w1 *= torch.nn.functional.one_hot(torch.arange(5) % 3)[..., None]
    return HeadWeights(w1 * (1 + excess), torch.eye(5, 2), torch.eye(5, 2).flip(1) - 0.5 * torch.eye(5, 2))


@pytest.mark.parametrize("form", ["stochastic", "substochastic"])
@pytest.mark.parametrize("excess", [0.0, 5e-6, -5e-6])
def test_coefficients_of_heads_in_single_precision_are_feasible_and_cost_no_more_than_their_decay(form, excess):
    form, penalty, weights = get_form(form), get_penalty("group_l2"), single_precision_heads(form, excess)
    form.check(weights.w1)
    coef = form.coef(weights)
    matrices = coef.unflatten(-1, (3, -1))  # (2, n, d, T, c)
    assert float(coef.min()) >= 0
    torch.testing.assert_close(matrices.sum(1), matrices.sum(1)[:, :, :1].expand(2, 2, 3, 2), rtol=1e-14, atol=0)
    assert float(form.penalty(penalty, 3).value(coef)) <= float(form.decay(penalty, weights).sum()) * (1 + 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_attention_weights_may_be_off_by_rounding_alone(form):
    kind = get_form(form)
    for excess in (0.0, 5e-6, -5e-6):
        kind.check(single_precision_heads(form, excess).w1)
    for excess in (1e-3, -1e-3)[: 1 if form == "substochastic" else 2]:
        with pytest.raises(ValueError, match=form):
            kind.check(single_precision_heads(form, excess).w1)


def test_scores_of_weighted_samples_are_those_of_repeated_ones():
    X, Y = data()
    model = ConvexSequenceRegressor(0.05).fit(X, Y)
    weight = np.arange(len(X)) % 3
    repeated = np.repeat(np.arange(len(X)), weight)
    assert model.score(X, Y, weight) == pytest.approx(model.score(X[repeated], Y[repeated]), rel=1e-12)
    assert model.score(X, Y, weight) != pytest.approx(model.score(X, Y), rel=1e-3)

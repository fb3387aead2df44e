"""Certified probes: invariances, certificates, explanations, generation, memory, saving and export."""

import io
import pickle
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from forks import Fork
from peak_memory import PeakMemory
from probe_cases import forms, padded, ragged_samples, signal
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from convexformer import (
    ConvexAttentionClassifier,
    ConvexProbeClassifier,
    ConvexProbeClassifierCV,
    ConvexProbeRegressor,
    ConvexProbeRegressorCV,
    load_model,
    save_model,
)
from convexformer.nn import AttentiveProbe, ProbeNetwork
from convexformer.preprocessing import (
    MaxPooling,
    MeanPooling,
    PoolingUnion,
    PrototypePooling,
    QueryPooling,
    RelativePositions,
    TokenGates,
    TokenPooling,
)
from convexformer.preprocessing.sequences import PoolingConfig
from convexformer.probes import Generation
from convexformer.programs.temporary_file import StoredMap, file_tensor
from convexformer.solvers import DenseMap, Program, SolverInterrupted, Status, certify, get_loss, get_penalty

SAMPLES = ragged_samples(n_samples=60)
Y = signal(SAMPLES)
LABELS = np.array(["low", "mid", "high"])[np.digitize(Y, np.quantile(Y, [0.3, 0.7]))]
SMALL = [MeanPooling(), QueryPooling(6), TokenGates(6), PrototypePooling(4)]


def regressor(alpha=0.01, **options):
    return ConvexProbeRegressor(alpha, **{"dictionary": SMALL, "random_state": 0, "tol": 1e-8} | options)


def classifier(alpha=0.01, **options):
    return ConvexProbeClassifier(alpha, **{"dictionary": SMALL, "random_state": 0, "tol": 1e-6} | options)


# Certificates and the network


@pytest.mark.parametrize("loss", ["squared", "huber"])
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_heads_on_pooled_tokens_have_the_certified_objective(loss, penalty):
    y = np.stack([Y, -(Y**2)], axis=1)
    model = regressor(loss=loss, penalty=penalty).fit(SAMPLES, y)
    assert model.certificate_.relative_gap <= 1e-8
    assert model.heads_.objective(model.pool(SAMPLES), y) == pytest.approx(model.certificate_.primal, abs=1e-12)
    np.testing.assert_allclose(model.heads_.predict(model.pool(SAMPLES)), model.predict(SAMPLES), atol=1e-12)
    program = model.heads_.program(model.pool(SAMPLES), y)
    again = certify(program, model.heads_.program_coef(), torch.as_tensor(model.intercept_))
    assert again.primal == pytest.approx(model.certificate_.primal, abs=1e-12)
    assert again.dual <= model.certificate_.primal


def test_the_mean_alone_is_the_linear_model_of_the_mean():
    mean = np.stack([sample.mean(0) for sample in SAMPLES])[:, None]
    probe = ConvexProbeRegressor(0.01, dictionary=MeanPooling(), standardize=False, tol=1e-10).fit(SAMPLES, Y)
    other = ConvexProbeRegressor(0.01, dictionary=MeanPooling(), standardize=False, tol=1e-10).fit(mean, Y)
    np.testing.assert_allclose(probe.coef_, other.coef_, atol=1e-7)
    binary = LABELS == "low"
    heads = ConvexProbeClassifier(0.01, dictionary=MeanPooling(), standardize=False, tol=1e-8).fit(SAMPLES, binary)
    plain = ConvexAttentionClassifier(0.01, tol=1e-8).fit(mean, binary)
    assert heads.certificate_.primal == pytest.approx(plain.certificate_.primal, abs=1e-8)


def test_more_weightings_never_have_a_larger_optimum():
    few = regressor(dictionary=MeanPooling()).fit(SAMPLES, Y)
    more = regressor().fit(SAMPLES, Y)
    assert more.certificate_.primal < few.certificate_.dual


def test_alpha_max_has_no_weighting_and_just_below_has_one():
    alpha = regressor().fit(SAMPLES, Y).alpha_max_
    assert not regressor(alpha * 1.001).fit(SAMPLES, Y).weighting_norms_.any()
    assert regressor(alpha * 0.99).fit(SAMPLES, Y).weighting_norms_.any()


# Invariances


@pytest.mark.parametrize("name", forms(SAMPLES))
def test_all_forms_give_the_same_model(name):
    model = regressor().fit(SAMPLES, Y)
    X = forms(SAMPLES)[name]
    np.testing.assert_allclose(regressor().fit(X, Y).predict(SAMPLES), model.predict(SAMPLES), atol=1e-10)
    np.testing.assert_allclose(model.predict(X), model.predict(SAMPLES), atol=1e-10)


def test_order_of_tokens_and_appended_padding_change_nothing():
    model = classifier().fit(SAMPLES, LABELS)
    expected = model.decision_function(SAMPLES)
    rng = np.random.default_rng(0)
    shuffled = [sample[rng.permutation(len(sample))] for sample in SAMPLES]
    array, lengths, _ = padded(SAMPLES)
    longer = np.concatenate([array, rng.normal(size=(len(array), 5, 4))], axis=1)
    for X in (shuffled, (longer, lengths)):
        np.testing.assert_allclose(model.decision_function(X), expected, atol=1e-10)
        np.testing.assert_allclose(classifier().fit(X, LABELS).decision_function(SAMPLES), expected, atol=1e-10)


def test_units_and_origins_of_features_change_no_prediction():
    model = regressor().fit(SAMPLES, Y)
    scale, shift = np.array([2.0**-20, 8.0, 1.0, 2.0**10]), np.array([0.0, -16.0, 4.0, 0.0])
    moved = [sample * scale + shift for sample in SAMPLES]
    # Draws are of other hashes: what does not draw must agree.
    options = {"dictionary": [MeanPooling(), RelativePositions([0])]}
    model = regressor(**options).fit(SAMPLES, Y)
    np.testing.assert_allclose(regressor(**options).fit(moved, Y).predict(moved), model.predict(SAMPLES), atol=1e-7)


def test_precision_of_the_data_is_kept():
    for given, kept in ((np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)):
        X = [sample.astype(given) for sample in SAMPLES]
        model = regressor(tol=1e-4).fit(X, Y)
        assert model.coef_.dtype == kept
        assert model.predict(X).dtype == kept


def test_weights_of_samples_and_classes_change_no_draw():
    def queries(X=SAMPLES, y=LABELS, **options):
        weight = options.pop("sample_weight", None)
        model = classifier(dictionary=QueryPooling(8), tol=1e-2, **options).fit(X, y, weight)
        tokens = model.pooler_.weightings[0].queries * model.pooler_.scale + model.pooler_.mean
        return tokens.numpy()

    expected = queries()
    weight = np.random.default_rng(0).uniform(0.5, 2, size=len(SAMPLES))
    np.testing.assert_allclose(queries(sample_weight=weight), expected, atol=1e-12)
    np.testing.assert_allclose(queries(class_weight="balanced"), expected, atol=1e-12)
    np.testing.assert_allclose(queries([sample.astype(np.float32) for sample in SAMPLES]), expected, atol=1e-5)


def test_the_default_dictionary_is_that_of_the_samples_that_count():
    single = [sample[:1] for sample in SAMPLES]
    weight = np.ones(len(SAMPLES))
    weight[0] = 0.0
    model = regressor(dictionary="auto").fit([np.ones((5, 4)), *single[1:]], Y, weight)
    alone = regressor(dictionary="auto").fit(single[1:], Y[1:])
    np.testing.assert_allclose(model.coef_, alone.coef_, atol=1e-6)


def test_the_default_dictionary_of_single_tokens_is_their_mean_alone():
    for length, n_weightings in ((1, 1), (2, 1 + 128 + 32)):
        X = np.random.default_rng(0).normal(size=(100, length, 4))
        assert len(regressor(1.0, dictionary="auto", tol=1e-2).fit(X, X[:, 0, 0]).coef_) == n_weightings


def test_a_pooling_with_random_numbers_of_its_own_draws_by_them_alone():
    directions = [
        regressor(dictionary=TokenGates(4, random_state=7), random_state=seed).fit(SAMPLES, Y).pooler_.weightings[0]
        for seed in (0, 1)
    ]
    expected = np.random.RandomState(7).standard_normal((4, 4))
    for gates in directions:
        np.testing.assert_array_equal(gates.directions, expected)


def test_a_refit_on_samples_of_tokens_forgets_the_names_of_columns():
    frame = pd.DataFrame(np.stack([sample[0] for sample in SAMPLES]), columns=list("abcd"))
    model = regressor(dictionary=MeanPooling(), tol=1e-2).fit(frame, Y)
    assert list(model.feature_names_in_) == list("abcd")
    assert not hasattr(model.fit(SAMPLES, Y), "feature_names_in_")


# Weights of tokens

KINDS = {"mean": slice(0, 1), "queries": slice(1, 7), "gates": slice(7, 13), "prototypes": slice(13, 17)}  # of SMALL


@pytest.fixture(scope="module", params=[True, False], ids=["standardised", "as they are"])
def looking(request):
    dictionary = [*SMALL, RelativePositions([0, -1], origin="end")]
    return regressor(dictionary=dictionary, standardize=request.param).fit(SAMPLES, Y)


@pytest.mark.parametrize("form", forms(SAMPLES).items(), ids=lambda form: form[0])
def test_weights_of_tokens_are_those_of_each_sample_alone(looking, form):
    name, X = form
    found = looking.token_weights(X)
    padding = 0 if name in ("list", "objects", "tensors", "nested") else 2
    assert found.shape == (len(SAMPLES), len(looking.coef_), max(map(len, SAMPLES)) + padding)
    assert found.dtype == np.float64
    for weights, sample in zip(found, SAMPLES, strict=True):
        np.testing.assert_allclose(weights[:, : len(sample)], looking.token_weights(sample[None])[0], atol=1e-12)
        assert not weights[:, len(sample) :].any()


def test_weights_of_tokens_pool_them_up_to_factors(looking):
    X, lengths, _ = padded(SAMPLES)
    tokens = looking.pooler_.standardized(torch.as_tensor(X)).numpy()
    pooled_by_them = looking.token_weights((X, lengths)) @ tokens
    factors = looking.pooler_.factors
    assert (factors is None) == (not looking.standardize)
    scale = 1.0 if factors is None else factors.numpy()[:, None]
    np.testing.assert_allclose(pooled_by_them * scale, looking.pool((X, lengths)), atol=1e-12)


def test_sums_of_weights_are_what_each_kind_says(looking):
    weights = looking.token_weights(SAMPLES)
    assert (weights >= 0).all()
    sums, lengths = weights.sum(2), np.array([len(sample) for sample in SAMPLES])
    np.testing.assert_allclose(sums[:, KINDS["mean"]], 1.0, atol=1e-12)
    np.testing.assert_allclose(sums[:, KINDS["queries"]], 1.0, atol=1e-12)
    np.testing.assert_array_equal(sums[:, -2:], np.stack([lengths > 0, lengths > 1], 1))
    gates = sums[:, KINDS["gates"]] * lengths[:, None]
    np.testing.assert_allclose(gates, gates.round(), atol=1e-12)  # so many tokens are on its side
    assert (gates <= lengths[:, None] + 1e-12).all()
    np.testing.assert_allclose(sums[:, KINDS["prototypes"]].sum(1), 1.0, atol=1e-12)


def test_weights_stand_where_the_mask_has_their_tokens(looking):
    X, _, mask = padded(SAMPLES)
    order = np.random.default_rng(0).permutation(X.shape[1] - 1)
    order = np.append(order, X.shape[1] - 1)  # no token is in the last place
    found = looking.token_weights((X[:, order], mask[:, order]))
    inner = slice(0, KINDS["prototypes"].stop)  # positions count real tokens
    expected = looking.token_weights((X, mask))[:, inner][..., order]
    np.testing.assert_allclose(found[:, inner], expected, atol=1e-12)
    assert not found.swapaxes(1, 2)[~mask[:, order]].any()


def test_weights_of_tokens_are_the_same_of_one_sample_at_a_time(looking, monkeypatch):
    every = {name: looking.token_weights(X) for name, X in forms(SAMPLES).items()}
    monkeypatch.setattr("convexformer.preprocessing.sequences.CONFIG", PoolingConfig(temporary=1))
    for name, X in forms(SAMPLES).items():
        np.testing.assert_allclose(looking.token_weights(X), every[name], atol=1e-12)


def test_weights_are_in_the_precision_of_the_samples_and_finite(looking):
    assert looking.token_weights([sample.astype(np.float32) for sample in SAMPLES]).dtype == np.float32
    with pytest.raises(ValueError, match="X is too large"):
        looking.token_weights([np.full((2, 4), 1e308)])
    with pytest.raises(ValueError, match="X has 3 features"):
        looking.token_weights([sample[:, :3] for sample in SAMPLES])
    with pytest.raises(NotFittedError):
        regressor().token_weights(SAMPLES)


# Explanations


@pytest.mark.parametrize("y", [Y, Y[:, None], np.stack([Y, Y**2], 1)], ids=["one output", "a column", "two outputs"])
def test_contributions_sum_to_the_prediction(y):
    model = regressor().fit(SAMPLES, y)
    explanation = model.explain(SAMPLES)
    assert [len(part) for part in explanation.contributions] == [len(sample) for sample in SAMPLES]
    assert explanation.scores.shape == model.predict(SAMPLES).shape
    np.testing.assert_allclose(explanation.scores, model.predict(SAMPLES), atol=1e-10)


@pytest.mark.parametrize(("fitted", "given"), [(np.float64, np.float32), (np.float32, np.float64)])
def test_contributions_are_in_the_wider_precision_of_the_fit_and_the_samples(fitted, given):
    model = regressor(tol=1e-4).fit([sample.astype(fitted) for sample in SAMPLES], Y)
    X = [sample.astype(given) for sample in SAMPLES]
    array, _, mask = padded(X)
    exact = model.to_torch().double()(torch.as_tensor(array, dtype=torch.float64), torch.as_tensor(mask))
    np.testing.assert_allclose(model.explain(X).scores, exact[:, 0].detach(), atol=1e-12)


@pytest.mark.parametrize("loss", ["logistic", "softmax"])
@pytest.mark.parametrize("labels", [LABELS, LABELS == "low"], ids=["three", "two"])
def test_contributions_sum_to_the_decision_function(loss, labels):
    model = classifier(loss=loss).fit(SAMPLES, labels)
    for X in (SAMPLES, padded(SAMPLES)[:2]):
        np.testing.assert_allclose(model.explain(X).scores, model.decision_function(X), atol=1e-10)


def test_contributions_are_of_the_tokens_that_the_mask_names():
    model = regressor().fit(SAMPLES, Y)
    X, _, mask = padded(SAMPLES)
    found = model.explain((X[:, ::-1], mask[:, ::-1])).contributions  # padding comes first
    for part, expected in zip(found, model.explain(SAMPLES).contributions, strict=True):
        np.testing.assert_allclose(part[::-1], expected, atol=1e-12)


def test_contributions_are_what_the_formula_says():
    model = regressor().fit(SAMPLES, Y)
    network = model.to_torch()
    sample = SAMPLES[3]
    tokens = (sample - network.pooler.mean.numpy()) / network.pooler.scale.numpy()
    mask = torch.ones(1, len(sample), dtype=torch.bool)
    weights = network.pooler.weights(torch.as_tensor(tokens)[None], mask)[0].numpy()
    expected = np.einsum("hn,nd,hd->n", weights, tokens, model.coef_)
    np.testing.assert_allclose(model.explain(SAMPLES).contributions[3], expected, atol=1e-12)


def test_the_maximum_adds_to_the_token_that_has_it(tmp_path):
    model = regressor(dictionary=[MeanPooling(), MaxPooling()]).fit(SAMPLES, Y)
    mean, scale, factors = (part.numpy() for part in (model.pooler_.mean, model.pooler_.scale, model.pooler_.factors))
    tokens = [(sample - mean) / scale for sample in SAMPLES]
    pooled = np.stack([factors[:, None] * [sample.mean(0), sample.max(0)] for sample in tokens])
    np.testing.assert_allclose(model.pool(SAMPLES), pooled, atol=1e-12)
    explanation = model.explain(SAMPLES)
    np.testing.assert_allclose(explanation.scores, model.predict(SAMPLES), atol=1e-10)
    for sample, found in zip(tokens, explanation.contributions, strict=True):
        is_largest = np.arange(len(sample))[:, None] == sample.argmax(0)
        of_mean, of_maximum = factors[0] * sample / len(sample), factors[1] * is_largest * sample
        np.testing.assert_allclose(found, of_mean @ model.coef_[0] + of_maximum @ model.coef_[1], atol=1e-12)
    model.to_torch().save_pretrained(tmp_path)
    array, _, mask = (torch.as_tensor(values) for values in padded(SAMPLES))
    again = ProbeNetwork.from_pretrained(tmp_path)(array, mask)[:, 0]
    np.testing.assert_allclose(again.detach().numpy(), model.predict(SAMPLES), atol=1e-12)


def test_explanations_name_their_scores():
    model = classifier().fit(SAMPLES, LABELS)
    explanation = model.explain(SAMPLES)
    position = list(model.classes_).index("mid")
    np.testing.assert_array_equal(explanation.of(0, "mid"), explanation.contributions[0][:, position])
    largest = model.decision_function(SAMPLES)[0].argmax()
    np.testing.assert_array_equal(explanation.of(0), explanation.contributions[0][:, largest])
    with pytest.raises(ValueError, match=r"output must be one of .*got 'none'"):
        explanation.of(0, "none")
    with pytest.raises(IndexError, match=f"sample must be the position of one of the {len(SAMPLES)} samples, got 99"):
        explanation.of(99)
    two = classifier().fit(SAMPLES, LABELS == "low").explain(SAMPLES)
    np.testing.assert_array_equal(two.of(1, False), -two.of(1, True))


@pytest.mark.parametrize("size", [1e3, 1e160])
def test_samples_without_weight_change_nothing_and_huge_weights_are_as_ones(size):
    far = [size * SAMPLES[0], *SAMPLES[1:]]
    weight = np.full(len(SAMPLES), 1e308)  # whose sum is no number
    weight[0] = 0.0
    for class_weight in (None, "balanced"):
        options = {"class_weight": class_weight, "tol": 1e-8}
        model = classifier(**options).fit(far, LABELS, weight)
        alone = classifier(**options).fit(SAMPLES[1:], LABELS[1:])
        np.testing.assert_allclose(model.predict_proba(SAMPLES), alone.predict_proba(SAMPLES), atol=1e-6)


@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_weights_of_samples_count_the_same_where_samples_are_read_one_at_a_time(kind, monkeypatch):
    weight = np.random.default_rng(0).uniform(0.2, 2, size=len(SAMPLES))
    weight[7:9] = 0.0
    X = [sample.astype(np.float32) for sample in SAMPLES]
    X[7] = np.full_like(X[7], 9e36)  # whose products with queries are no numbers
    generation = Generation(max_new=2, kinds=[kind], tol=1e-6)
    options = {"dictionary": [MeanPooling(), TokenGates(3, source="pairs")], "generate": generation}
    whole = regressor(0.003, **options).fit(X, Y, weight)
    monkeypatch.setattr("convexformer.preprocessing.sequences.CONFIG", PoolingConfig(temporary=1))
    monkeypatch.setattr("convexformer.preprocessing.pooled.CONFIG", PoolingConfig(temporary=1))
    parts = regressor(0.003, **options).fit(X, Y, weight)
    assert len(whole.weighting_norms_) == 6
    theirs = whole.pooler_.state_dict()
    for name, array in parts.pooler_.state_dict().items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(parts.generation_.rounds, whole.generation_.rounds, rtol=1e-4)
    np.testing.assert_allclose(parts.predict(SAMPLES), whole.predict(SAMPLES), rtol=1e-3, atol=1e-4)


# Generated weightings


@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_samples_without_weight_change_no_generated_weighting(kind):
    X = [sample.astype(np.float32) for sample in SAMPLES]
    far, weight = [np.full_like(X[0], 9e36), *X], np.ones(len(X) + 1)
    weight[0] = 0.0
    options = {"dictionary": MeanPooling(), "generate": Generation(max_new=2, kinds=[kind], n_samples=len(X))}
    model = regressor(0.003, **options).fit(far, np.concatenate([Y[:1], Y]), weight)
    alone = regressor(0.003, **options).fit(X, Y)
    assert len(model.generation_.rounds) == len(alone.generation_.rounds)
    np.testing.assert_allclose(model.predict(X), alone.predict(X), rtol=1e-5, atol=1e-5)


def test_generated_weightings_lower_the_optimum_below_that_of_the_dictionary():
    start = regressor(0.003, dictionary=MeanPooling()).fit(SAMPLES, Y)
    grown = regressor(0.003, dictionary=MeanPooling(), generate=8).fit(SAMPLES, Y)
    assert grown.certificate_.primal < start.certificate_.dual
    assert 1 < len(grown.weighting_norms_) <= 9
    assert grown.certificate_.relative_gap <= 1e-8
    objectives = [step.objective for step in grown.generation_.rounds]
    assert objectives == sorted(objectives, reverse=True)
    assert grown.heads_.objective(grown.pool(SAMPLES), Y) == pytest.approx(grown.certificate_.primal, abs=1e-12)


@pytest.mark.parametrize("kinds", [("queries", "gates"), ("gates", "queries")])
def test_kinds_have_even_shares_of_a_round_and_the_first_what_is_odd(kinds):
    generation = Generation(max_new=3, kinds=kinds, per_round=3)
    model = regressor(0.003, dictionary=MeanPooling(), generate=generation).fit(SAMPLES, Y)
    names = {"queries": "QueryWeights", "gates": "GateWeights"}
    added = [(type(part).__name__, part.n_weightings) for part in model.pooler_.weightings[1:]]
    assert added == [(names[kinds[0]], 2), (names[kinds[1]], 1)]


@pytest.mark.parametrize("kind", ["queries", "gates"])
def test_generated_ones_are_worth_more_than_as_many_random_ones(kind):
    drawn = {"queries": QueryPooling(8), "gates": TokenGates(8)}[kind]
    random = regressor(0.003, dictionary=[MeanPooling(), drawn]).fit(SAMPLES, Y)
    generation = Generation(max_new=8, kinds=(kind,), per_round=2)
    grown = regressor(0.003, dictionary=MeanPooling(), generate=generation).fit(SAMPLES, Y)
    assert grown.certificate_.primal < random.certificate_.dual
    assert "max_new=8" in grown.generation_.end


def test_nothing_is_found_where_the_dictionary_has_all_there_is():
    X = np.random.default_rng(0).normal(size=(30, 1, 2))  # one token a sample: all queries pool the same
    model = regressor(0.05, dictionary=MeanPooling(), generate=Generation(4, kinds=("queries",))).fit(X, X[:, 0, 0])
    assert len(model.weighting_norms_) == 1
    assert model.generation_.end.startswith("no violating weighting in 32 restarts")
    assert model.generation_.rounds[-1].violation <= 0.01


def test_violations_are_dual_norms_of_the_program_with_the_weighting():
    model = regressor(0.003, dictionary=MeanPooling(), generate=Generation(1, kinds=("queries",))).fit(SAMPLES, Y)
    start = regressor(0.003, dictionary=MeanPooling()).fit(SAMPLES, Y)
    pooled = torch.as_tensor(model.pool(SAMPLES)[:, 1])
    theta = start.certificate_.dual_point
    norm = float(torch.linalg.vector_norm(torch.einsum("id,ic->dc", pooled, theta) / len(SAMPLES)))
    assert norm / 0.003 - 1 == pytest.approx(model.generation_.rounds[0].violation, rel=1e-6)


def test_a_solve_with_more_weightings_starts_at_the_solution_with_fewer():
    model = regressor(0.003, dictionary=MeanPooling(), generate=Generation(4, per_round=2)).fit(SAMPLES, Y)
    assert model.history_.primal[0] == pytest.approx(model.generation_.rounds[-1].objective, rel=1e-9)


def test_the_violation_of_a_round_is_the_largest_of_all_kinds():
    def violation(*kinds):
        generation = Generation(2, kinds=kinds)
        return regressor(0.003, dictionary=MeanPooling(), generate=generation).fit(SAMPLES, Y).generation_.rounds[0][3]

    for kinds in (("queries", "gates"), ("gates", "queries")):
        assert violation(*kinds) >= violation(kinds[0]) * (1 - 1e-9)  # the first search is the same


def test_an_interrupt_during_generation_keeps_the_certified_model():
    def interrupt(progress):
        if hasattr(model, "certificate_"):  # the solve with the dictionary alone is over
            raise KeyboardInterrupt

    model = regressor(0.003, dictionary=MeanPooling(), generate=8, callback=interrupt)
    with pytest.raises(SolverInterrupted):
        model.fit(SAMPLES, Y)
    assert model.generation_.end.startswith("interrupted")
    assert len(model.weighting_norms_) > 1
    assert model.certificate_.primal >= model.certificate_.dual
    assert model.heads_.objective(model.pool(SAMPLES), Y) == pytest.approx(model.certificate_.primal, abs=1e-12)


@pytest.mark.parametrize("n_weightings", [1, 5])
def test_a_callback_that_stops_a_solve_ends_the_generation(n_weightings, tmp_path):
    options = {"dictionary": MeanPooling(), "generate": Generation(8, per_round=4), "solver": "fista"}
    model = regressor(0.003, **options, callback=lambda progress: len(progress.coef) == n_weightings)
    model.fit(SAMPLES, Y, resume=tmp_path / "fit.npz")
    assert model.status_ is Status.STOPPED
    assert model.certificate_.relative_gap > model.tol
    assert model.generation_.end == "stopped by the callback"
    assert len(model.weighting_norms_) == n_weightings
    again = regressor(0.003, **options).fit(SAMPLES, Y, resume=tmp_path / "fit.npz")
    wanted = regressor(0.003, **options).fit(SAMPLES, Y)
    assert again.generation_.end == wanted.generation_.end
    assert again.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-6)


def test_a_round_of_generation_that_fails_leaves_the_model_of_the_fit_before():
    model = regressor(0.003, dictionary=MeanPooling(), generate=8).fit(SAMPLES, Y)
    before, certificate = model.predict(SAMPLES), model.certificate_

    def fail(progress):
        if model.certificate_ is not certificate:  # the solve with the dictionary alone is over
            raise RuntimeError

    with pytest.raises(RuntimeError):
        model.set_params(callback=fail).fit(SAMPLES, -Y)
    np.testing.assert_array_equal(model.predict(SAMPLES), before)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_a_warm_start_on_the_same_data_is_there_at_once(penalty):
    model = classifier(penalty=penalty, warm_start=True).fit(SAMPLES, LABELS)
    before, n_iter = model.certificate_, model.n_iter_
    assert n_iter > 0
    assert model.fit(SAMPLES, LABELS).n_iter_ == 0
    assert model.certificate_.gap == pytest.approx(before.gap, abs=1e-12)
    assert model.set_params(alpha=0.005).fit(SAMPLES, LABELS).certificate_.relative_gap <= 1e-6
    assert model.fit(SAMPLES[:50], LABELS[:50]).certificate_.relative_gap <= 1e-6


# Memory


@pytest.mark.parametrize("labels", [LABELS, LABELS == "low"], ids=["three", "two"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pooled_tokens_in_a_file_give_the_same_optimum(labels, dtype):
    X = [sample.astype(dtype) for sample in SAMPLES]
    held = classifier(tol=1e-5).fit(X, labels)
    stored = classifier(tol=1e-5, memory_limit=1).fit(X, labels)
    allowed = 1e-5 * held.certificate_.reference + 1e-6
    assert stored.certificate_.primal == pytest.approx(held.certificate_.primal, abs=allowed)
    assert stored.certificate_.dual <= held.certificate_.primal
    assert stored.certificate_.relative_gap <= 1e-5


def test_a_pass_over_pooled_tokens_in_a_file_reads_them_once(monkeypatch):
    data, read = file_tensor((1100, 3, 700), torch.float32), []
    data.copy_(torch.randn(data.shape, generator=torch.Generator().manual_seed(0)))
    y, coef = data[:, 0, :2].double(), data[:2].permute(1, 2, 0).double()
    slopes = Program(DenseMap(data), y, get_loss("squared"), get_penalty("nuclear"), 0.1).slopes(torch.ones(2).double())
    wanted = DenseMap(data).slopes_pass(coef, slopes)
    for name in ("matvec", "rmatvec"):
        original = getattr(DenseMap, name)

        def noted(self, columns, name=name, original=original):
            read.append((name, self.data.data_ptr(), len(self)))
            return original(self, columns)

        monkeypatch.setattr(DenseMap, name, noted)
    for got, same in zip(StoredMap(data).slopes_pass(coef, slopes), wanted, strict=True):
        torch.testing.assert_close(got, same)
    ahead, back = read[::2], read[1::2]
    assert [part[1:] for part in ahead] == [part[1:] for part in back]  # while the samples are still in memory
    assert sum(part[2] for part in ahead) == len(data) > max(part[2] for part in ahead)


def print_peak():
    """Print the memory of a fit beyond that of the process before it."""
    memory = PeakMemory()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(6000, 4, 64)).astype(np.float16)
    y = X[:, :, 0].max(1) > 1
    options = {"dictionary": [MeanPooling(), QueryPooling(128, random_state=0)], "tol": 1e-2, "random_state": 0}
    ConvexProbeClassifier(0.05, **options).fit(X[:50], y[:50])  # what is loaded on first use
    with memory:
        model = ConvexProbeClassifier(0.05, memory_limit=2**20, **options).fit(X, y)
    assert model.certificate_.relative_gap <= 1e-2
    print(memory.peak)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_fits_beyond_the_limit_hold_less_than_half_of_the_pooled_tokens(tmp_path):
    pooled_bytes = 6000 * 129 * 64 * 4
    process = Fork(tmp_path / "printed", print_peak)
    printed = process.output(timeout=300)
    assert not process.failed, printed
    assert int(printed.splitlines()[-1]) < pooled_bytes / 2


def test_a_dictionary_wider_than_memory_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("convexformer.memory.free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=r"17 weightings take .* GB, and .* GB are free; set memory_limit"):
        regressor().fit(SAMPLES, Y)


def test_a_file_that_does_not_fit_on_the_disk_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"temporary file of .* GB is needed.*TMPDIR"):
        regressor(memory_limit=1).fit(SAMPLES, Y)


def test_folds_of_pooled_tokens_in_a_file_are_in_files():
    options = {"alphas": 3, "cv": 3, "dictionary": SMALL, "random_state": 0, "tol": 1e-9}
    held = ConvexProbeRegressorCV(**options).fit(SAMPLES, Y)
    stored = ConvexProbeRegressorCV(memory_limit=1, **options).fit(SAMPLES, Y)
    np.testing.assert_allclose(stored.score_path_, held.score_path_, atol=1e-5)


# Cross-validation and paths


def test_cross_validation_takes_ragged_samples_and_refits_at_the_best_alpha():
    model = ConvexProbeRegressorCV(alphas=6, cv=3, dictionary=SMALL, random_state=0, tol=1e-6).fit(SAMPLES, Y)
    assert model.score_path_.shape == (6, 3)
    best = model.alphas_[model.score_path_.mean(1).argmax()]
    assert model.alpha_ == best
    again = regressor(best, tol=1e-6).fit(SAMPLES, Y)
    assert again.certificate_.primal == pytest.approx(model.certificate_.primal, rel=1e-5)


ACCURACY_CV = ConvexProbeClassifierCV(alphas=2, cv=2, dictionary=SMALL, random_state=0, scoring="accuracy")


@pytest.fixture(scope="module")
def accuracies():
    """Accuracies of the folds, for a list of samples."""
    return clone(ACCURACY_CV).fit(SAMPLES, LABELS).score_path_


@pytest.mark.parametrize("name", forms(SAMPLES))
def test_scores_of_scikit_learn_see_the_held_out_samples_of_each_form(name, accuracies):
    found = clone(ACCURACY_CV).fit(forms(SAMPLES)[name], LABELS).score_path_
    np.testing.assert_array_equal(found, accuracies)


def test_generation_follows_the_choice_of_alpha():
    options = {"alphas": 4, "cv": 3, "dictionary": MeanPooling(), "random_state": 0}
    plain = ConvexProbeRegressorCV(**options).fit(SAMPLES, Y)
    grown = ConvexProbeRegressorCV(generate=4, **options).fit(SAMPLES, Y)
    assert grown.alpha_ == plain.alpha_
    assert grown.certificate_.primal < plain.certificate_.dual


def test_path_is_that_of_single_fits():
    path = regressor().path(SAMPLES, Y, n_alphas=4)
    for position, alpha in enumerate(path.alphas):
        single = regressor(alpha).fit(SAMPLES, Y)
        predicted = path.heads(position).predict(single.pool(SAMPLES))[:, 0]
        np.testing.assert_allclose(predicted, single.predict(SAMPLES), atol=1e-3)


def test_norms_of_a_path_are_those_of_its_weightings():
    path = regressor().path(SAMPLES, Y, n_alphas=4)
    np.testing.assert_allclose(path.weighting_norms, np.linalg.norm(path.coefs, axis=2))
    assert not hasattr(path, "token_norms")


def test_a_path_pools_by_the_weightings_that_it_drew():
    path = pickle.loads(pickle.dumps(regressor(random_state=None).path(SAMPLES, Y, n_alphas=4)))
    program = path.heads(1).program(path.pool(SAMPLES), Y)
    assert program.alpha_max == pytest.approx(path.alphas[0], rel=1e-9)
    assert path.heads(1).objective(path.pool(SAMPLES), Y) < program.null_value
    with pytest.raises(ValueError, match="X has 2 features"):
        path.pool([sample[:, :2] for sample in SAMPLES])


@pytest.mark.parametrize("probe", [regressor(generate=4), ConvexProbeRegressorCV(generate=4)])
def test_paths_of_generated_weightings_are_refused(probe):
    with pytest.raises(ValueError, match="generate=4 depends on alpha"):
        probe.path(SAMPLES, Y)


# Modules


def test_module_gives_the_scores():
    model = classifier().fit(SAMPLES, LABELS)
    array, _, mask = padded(SAMPLES)
    scores = model.to_torch()(torch.as_tensor(array), torch.as_tensor(mask))
    np.testing.assert_allclose(scores.detach().numpy(), model.decision_function(SAMPLES), atol=1e-12)


@pytest.mark.parametrize(
    "part",
    [
        MeanPooling(),
        QueryPooling(3),
        TokenGates(3),
        PrototypePooling(3),
        MaxPooling(),
        RelativePositions([0, 1]),
        RelativePositions([0, -1], "end"),
        RelativePositions([0], "marked", mark=1),
    ],
    ids=repr,
)
def test_module_exports_for_any_number_of_samples_and_tokens(part):
    network = regressor(dictionary=part, tol=1e-3).fit(SAMPLES, Y).to_torch()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    example = (torch.randn(3, 5, 4, dtype=torch.float64), torch.ones(3, 5, dtype=torch.bool))
    program = torch.export.export(network, example, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}))
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    again = torch.export.load(saved).module()
    array, _, mask = (torch.as_tensor(values) for values in padded(SAMPLES))
    torch.testing.assert_close(again(array, mask), network(array, mask))


def test_vectors_are_samples_of_one_token_to_a_module():
    vectors = torch.as_tensor(np.random.default_rng(0).normal(size=(40, 3)))
    model = regressor(dictionary="auto").fit(vectors, vectors[:, 0])
    network = model.to_torch()
    with pytest.raises(ValueError, match=r"got \(40, 3\); tokens\[:, None\] makes each row a sample of one token"):
        network(vectors)
    np.testing.assert_allclose(network(vectors[:, None])[:, 0].detach(), model.predict(vectors), atol=1e-12)


@pytest.mark.parametrize("kind", ["probe", "attentive", "unbiased"])
def test_samples_without_a_real_token_have_the_bias_as_their_scores_in_modules(kind):
    if kind == "probe":
        parts = [*SMALL, MaxPooling(), RelativePositions([0]), RelativePositions([-1], "end")]
        probe = regressor(dictionary=[*parts, RelativePositions([0], "marked", mark=1)], tol=1e-3).fit(SAMPLES, Y)
        network = probe.to_torch()
    else:
        network = AttentiveProbe(4, 1, n_queries=4, bias=kind == "attentive").double()
    if kind == "attentive":
        torch.nn.init.ones_(network.bias)
    array, _, mask = (torch.as_tensor(values) for values in padded(SAMPLES[:3]))
    real = torch.where(torch.tensor([True, False, True])[:, None], mask, False)
    array.requires_grad_()
    for form in (network, torch.export.export(network, (array, mask)).module()):
        scores = form(array, real)
        assert scores[1] == (0.0 if network.bias is None else network.bias)
        torch.testing.assert_close(scores[::2], network(array[::2], mask[::2]))
        (gradient,) = torch.autograd.grad(scores.sum(), array)
        assert gradient.isfinite().all()
        assert not gradient[1].any()
    if kind == "probe":
        assert not network.contributions(array, real)[1].any()
    else:
        torch.testing.assert_close(network.attention(array, real).sum(-1), array.new_ones(3, 4))


@pytest.mark.parametrize("change", [torch.Tensor.long, torch.Tensor.float, lambda mask: mask.sum(1)])
def test_masks_of_another_kind_are_named(change):
    array, _, mask = (torch.as_tensor(values) for values in padded(SAMPLES))
    network = regressor().fit(SAMPLES, Y).to_torch()
    for module in (network, AttentiveProbe(4, 1).double()):
        with pytest.raises(ValueError, match=r"mask must be torch.bool of shape .*; mask.bool\(\) makes one") as caught:
            module(array, change(mask))
        assert "torch.arange(n_tokens) < lengths[:, None] one of lengths" in str(caught.value)
        with pytest.raises(TypeError, match="mask must be a torch tensor, got ndarray"):
            module(array, mask.numpy())


def test_folders_of_safetensors_hold_the_module(tmp_path):
    network = classifier().fit(SAMPLES, LABELS).to_torch()
    network.save_pretrained(tmp_path / "probe")
    assert sorted(path.name for path in (tmp_path / "probe").iterdir()) == ["config.json", "model.safetensors"]
    again = ProbeNetwork.from_pretrained(tmp_path / "probe")
    array, _, mask = (torch.as_tensor(values) for values in padded(SAMPLES))
    assert torch.equal(again(array, mask), network(array, mask))


def test_the_extra_that_folders_of_probes_need_is_named(tmp_path, monkeypatch):
    network = regressor().fit(SAMPLES, Y).to_torch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'convexformer\[bert\]'"):
        network.save_pretrained(tmp_path / "probe")


def test_what_is_no_folder_of_a_probe_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json in"):
        ProbeNetwork.from_pretrained(tmp_path)
    network = regressor().fit(SAMPLES, Y).to_torch()
    network.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 99, "parts": []}')
    with pytest.raises(ValueError, match="later version"):
        ProbeNetwork.from_pretrained(tmp_path)
    part = '{"format": 1, "parts": [{"kind": "MeanWeights"'
    for text in ('{"format": 1}', "{", "[]", part.replace("Mean", "os.Mean") + "}]}", part + ', "path": "/"}]}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="holds no probe"):
            ProbeNetwork.from_pretrained(tmp_path)
    network.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="holds no probe"):
        ProbeNetwork.from_pretrained(tmp_path)


class LastToken(TokenPooling):
    def make_weights(self, samples, random_state, sample_weight=None):
        class Own(type(RelativePositions([0], "end").make_weights(samples, random_state))):
            pass

        return Own([0], "end")


def test_a_pooling_of_ones_own_is_fitted_and_is_not_saved_unregistered(tmp_path):
    model = regressor(dictionary=LastToken()).fit(SAMPLES, Y)
    np.testing.assert_allclose(
        model.predict(SAMPLES), regressor(dictionary=RelativePositions([0], "end")).fit(SAMPLES, Y).predict(SAMPLES)
    )
    array, _, mask = (torch.as_tensor(values) for values in padded(SAMPLES))
    network = model.to_torch()
    np.testing.assert_allclose(network(array, mask)[:, 0].detach(), model.predict(SAMPLES), atol=1e-12)
    with pytest.raises(TypeError, match="TOKEN_WEIGHTS"):
        network.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="TOKEN_WEIGHTS"):
        save_model(model, tmp_path / "model.npz")


def test_what_becomes_of_a_module_does_not_change_the_estimator():
    model = regressor().fit(SAMPLES, Y)
    before, network = model.predict(SAMPLES), model.to_torch().float()
    with torch.no_grad():
        for array in (*network.parameters(), *network.buffers()):
            array.zero_()
    np.testing.assert_array_equal(model.predict(SAMPLES), before)


def test_the_bias_and_coefficients_of_a_module_train_on_and_its_dictionary_does_not():
    network = regressor().fit(SAMPLES, Y).to_torch()
    assert {name for name, _ in network.named_parameters()} == {"coef", "bias"}


# Saving


@pytest.mark.parametrize("dictionary", ["auto", SMALL, PoolingUnion(SMALL)], ids=["auto", "list", "union"])
def test_saved_models_predict_the_same(tmp_path, dictionary):
    model = ConvexProbeClassifier(0.05, dictionary=dictionary, generate=2, random_state=0).fit(SAMPLES, LABELS)
    if dictionary == "auto":
        save_model(model, tmp_path / "model.npz")
    else:
        with pytest.warns(UserWarning, match="without the parameters"):
            save_model(model, tmp_path / "model.npz")
    again = load_model(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.predict_proba(SAMPLES), model.predict_proba(SAMPLES))
    np.testing.assert_array_equal(again.explain(SAMPLES).scores, model.explain(SAMPLES).scores)
    assert again.certificate_.primal == model.certificate_.primal
    assert again.n_features_in_ == 4
    assert again.generation_ is None  # rounds are not in the file


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dictionary": "other"}, "dictionary must be 'auto', a pooling"),
        ({"dictionary": []}, "dictionary must be 'auto', a pooling"),
        ({"dictionary": [3]}, "dictionary must be 'auto', a pooling"),
        ({"generate": 0}, "generate must be None, a positive integer or Generation"),
        ({"generate": "all"}, "generate must be None, a positive integer or Generation"),
        ({"standardize": "yes"}, "standardize must be True or False"),
        ({"memory_limit": 0}, "memory_limit must be None or a positive number of bytes"),
        ({"memory_limit": 1.5}, "memory_limit must be None or a positive number of bytes"),
        ({"memory_limit": "1.5 GHz"}, "memory_limit must be None or a positive number of bytes"),
    ],
)
def test_wrong_parameters_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        regressor(**options).fit(SAMPLES, Y)


@pytest.mark.parametrize(
    "options",
    [
        {"kinds": ()},
        {"kinds": ("others",)},
        {"kinds": "gates"},
        {"kinds": None},
        {"step_lengths": (0.3,)},
        {"step_lengths": (0.0, 0.3)},
        {"step_lengths": (0.3, 0.0)},
        {"widths": 3.0},
        {"widths": (1.0, -0.1)},
        {"max_new": 0},
        {"n_samples": 0},
        {"similarity": 0.0},
        {"tol": -1.0},
        {"radius": 0.0},
        {"temperature": -1.0},
    ],
)
def test_wrong_generations_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Generation(**options)


@pytest.mark.parametrize("method", ["predict", "pool"])
def test_samples_whose_pooled_tokens_overflow_are_refused(method):
    X = np.random.default_rng(0).normal(size=(40, 5, 3))
    probe = ConvexProbeRegressor().fit(X, X[:, 0, 0])
    with pytest.raises(ValueError, match="X is too large for its pooled tokens to be finite"):
        getattr(probe, method)(np.full((3, 5, 3), 1.7e308))


def test_a_probe_that_is_not_fitted_says_so():
    probe = regressor()
    for asked in (probe.predict, probe.pool, probe.explain, lambda X: probe.to_torch()):
        with pytest.raises(NotFittedError):
            asked(SAMPLES)


def test_one_class_and_empty_samples_are_named():
    with pytest.raises(ValueError, match="at least two classes"):
        classifier().fit(SAMPLES, np.zeros(len(SAMPLES)))
    with pytest.raises(ValueError, match=r"X\[59\] has no token"):
        classifier().fit([*SAMPLES[:-1], np.zeros((0, 4))], LABELS)
    with pytest.raises(ValueError, match=r"X\[0\] must be one array .* are a list without lengths"):
        classifier().fit((SAMPLES, [len(sample) for sample in SAMPLES]), LABELS)


def test_memory_is_not_kept_after_the_fit():
    X = np.random.default_rng(0).normal(size=(50, 20, 30))
    tracemalloc.start()
    model = regressor(tol=1e-2).fit(X, X[:, 0, 0])
    held = vars(model)
    tracemalloc.stop()
    assert not any(getattr(value, "nbytes", 0) >= X.nbytes for value in held.values())

"""The numbers of the student-teacher experiment, computed again on small data."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score

from convexformer import ConvexSequenceRegressor
from convexformer.datasets import Activations
from convexformer.experiments import StudentTeacherSettings, format_student_teacher
from convexformer.experiments.student_teacher.baselines import (
    SoftmaxChoice,
    fit_ridge,
    train_softmax,
    train_softmax_sequence,
)
from convexformer.experiments.student_teacher.convex_students import CLASSES, solve_class, train_class
from convexformer.experiments.student_teacher.data import Part, Split, r2_and_error, split_activations
from convexformer.experiments.student_teacher.maps import compare_maps
from convexformer.experiments.student_teacher.report import summarise
from convexformer.experiments.student_teacher.watch import TestScores
from convexformer.nn import ConvexAttention, SoftmaxAttention, TrainingHistory
from convexformer_solvers import alpha_grid

N_TOKENS, WIDTH, N_OUTPUTS = 4, 3, 2
SETTINGS = StudentTeacherSettings.small(
    n_tokens=N_TOKENS,
    position=2,
    n_gates=3,
    n_alphas=4,
    n_steps=3,
    learning_rates=(1e-9,),  # networks stay as they begin
    softmax_learning_rates=(1e-9,),
    softmax_alphas=(1e-3, 30.0),
    softmax_heads=2,
    softmax_head_width=2,
    map_alpha_ratios=(0.9, 0.1, 1e-3),
)


def drawn(seed=0, n_samples=50):
    """Samples whose target is read from the token at the target's position, with noise."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(3):
        tokens = (rng.normal(size=(n_samples, N_TOKENS, WIDTH)) + 0.5).astype(np.float32)
        signal = np.stack([np.maximum(tokens[:, 2, 0], 0) - 0.4, tokens[:, 2, 1] - tokens[:, 1, 2]], 1)
        parts.append(Part(tokens, signal + 1.5 * rng.normal(size=(n_samples, N_OUTPUTS))))
    return Split(*parts, np.arange(n_samples), 1.0)


SPLIT = drawn()


def drawn_sequences():
    """Samples whose target at each position is a map of the next token and, less so, of its own."""
    rng, mixing, parts = np.random.default_rng(1), np.array([[1.0, 0.5], [-0.5, 1.0], [0.0, 1.0]]), []
    for _ in range(3):
        tokens = rng.normal(size=(60, N_TOKENS, WIDTH)).astype(np.float32)
        target = (np.roll(tokens, -1, axis=1) + 0.4 * tokens) @ mixing
        parts.append(Part(tokens, target + 1.5 * rng.normal(size=target.shape)))
    return Split(*parts, np.arange(60), 1.0)


def score(outputs, y):
    """R2 that weights outputs by their variance."""
    return r2_score(y.reshape(len(y), -1), outputs.reshape(len(y), -1), multioutput="variance_weighted")


# Data


def test_scores_are_those_of_scikit_learn_and_errors_relative_to_predicting_zero():
    rng = np.random.default_rng(0)
    y, predicted = rng.normal([1.0, -3.0], [1.0, 2.0], size=(30, 2)), rng.normal(size=(30, 2))
    assert r2_and_error(predicted, y) == pytest.approx(
        (score(predicted, y), ((predicted - y) ** 2).sum() / (y**2).sum())
    )


def activations():
    rng = np.random.default_rng(2)
    inputs = rng.normal(size=(50, N_TOKENS, 5)).astype(np.float32)
    outputs = rng.normal([0.0, 3.0, -2.0, 1.0], [4.0, 2.0, 1.0, 0.5], size=(50, N_TOKENS, 4)).astype(np.float32)
    outputs += np.arange(N_TOKENS, dtype=np.float32)[:, None]
    others = dict.fromkeys(field.name for field in dataclasses.fields(Activations))
    return Activations(**others | {"inputs": inputs, "outputs": outputs})


def test_a_fifth_of_the_samples_validates_and_a_fifth_tests():
    split = split_activations(activations(), position=1, n_outputs=None, seed=0)
    assert [len(part.tokens) for part in split[:3]] == [30, 10, 10]


def test_the_share_of_the_variance_is_that_of_the_first_directions():
    data = activations()
    for position in (1, None):
        split = split_activations(data, position=position, n_outputs=2, seed=0)
        outputs = (data.outputs if position is None else data.outputs[:, position])[split.train_index].astype(float)
        sizes = np.linalg.svd((outputs - outputs.mean(0)).reshape(-1, 4), compute_uv=False) ** 2
        assert split.variance_kept == pytest.approx(sizes[:2].sum() / sizes.sum(), rel=1e-6)
        np.testing.assert_allclose(split.train.y.mean(0), 0, atol=1e-12)  # of each position by itself


# Convex students


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_alpha_is_that_of_the_grid_whose_solution_validates_best(kind):
    solved = solve_class(kind, SPLIT, SETTINGS, 0)
    alphas = alpha_grid(solved.model.alpha_max_, SETTINGS.n_alphas, SETTINGS.alpha_ratio)
    models = [clone(solved.model).set_params(alpha=alpha, callback=None).fit(*SPLIT.train) for alpha in alphas]
    scores = [score(model.predict(SPLIT.validation.tokens), SPLIT.validation.y) for model in models]
    best = int(np.argmax(scores))
    assert 0 < best < SETTINGS.n_alphas - 1  # else the first or the last would do
    assert solved.row.alpha == pytest.approx(alphas[best], rel=1e-6)
    assert solved.row.validation_r2 == pytest.approx(scores[best], abs=2e-2)
    assert solved.row.test_r2 == pytest.approx(score(solved.model.predict(SPLIT.test.tokens), SPLIT.test.y))


def sum_of_norms(coef, penalty):
    """Sum over positions of the nuclear norm, or of the norms of the columns."""
    if penalty == "nuclear":
        return np.linalg.norm(coef, "nuc", axis=(1, 2)).sum()
    return np.linalg.norm(coef, axis=1).sum()


@pytest.mark.parametrize("kind", CLASSES[:2], ids=lambda kind: kind.name)
def test_courses_are_of_the_objective_of_the_class_and_of_the_test_samples(kind):
    solved, seen = solve_class(kind, SPLIT, SETTINGS, 0), []
    model, (train, _, test) = clone(solved.model), SPLIT[:3]
    model.set_params(callback=lambda progress: seen.append((progress.coef.clone(), progress.intercept.clone())))
    model.fit(*train)
    excess, scores = [], []
    for coef, intercept in [*seen, (model.coef_, model.intercept_)]:
        coef, bias = (np.asarray(part, dtype=float) for part in (coef, intercept))
        coef = coef.reshape(N_TOKENS, WIDTH, N_OUTPUTS)
        outputs = [np.einsum("ind,ndc->ic", part.tokens, coef) + bias for part in (train, test)]
        objective = ((outputs[0] - train.y) ** 2).sum(1).mean() / 2 + model.alpha * sum_of_norms(coef, kind.penalty)
        excess.append(objective - solved.row.dual_bound)
        scores.append(score(outputs[1], test.y))
    np.testing.assert_allclose(solved.curve.excess, excess, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(solved.curve.test_r2, scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_rows_of_networks_that_stay_as_they_begin_are_those_of_their_first_weights(kind):
    solved = solve_class(kind, SPLIT, dataclasses.replace(SETTINGS, tol=3e-2), 0)
    rows, (curve,) = train_class(kind, solved, SPLIT, SETTINGS, 5)
    heads, model = solved.model.heads_, solved.model
    assert len(heads) not in (0, N_TOKENS)
    gated = {} if heads.gates is None else {"gates": heads.gates, "gate_index": heads.gate_index}
    network = ConvexAttention(N_TOKENS, WIDTH, N_OUTPUTS, n_heads=len(heads), seed=5, **gated)
    outputs = [network(torch.as_tensor(part.tokens)).detach().double().numpy() for part in SPLIT[:3]]
    loss = ((outputs[0] - SPLIT.train.y) ** 2).sum(1).mean() / 2
    objective = loss + model.alpha * network.decay(kind.penalty).item()
    for row in rows:
        assert row.objective == pytest.approx(objective, rel=1e-5)
        assert row.excess == pytest.approx(objective - model.certificate_.dual, rel=1e-5)
        assert row.ratio == pytest.approx(objective / model.certificate_.primal, rel=1e-5)
        assert (row.heads, row.tokens) == (len(heads), N_TOKENS)
        assert row.validation_r2 == pytest.approx(score(outputs[1], SPLIT.validation.y), abs=1e-5)
        assert row.test_r2 == pytest.approx(score(outputs[2], SPLIT.test.y), abs=1e-5)
    assert curve.excess == pytest.approx([rows[0].excess] * len(curve.excess), rel=1e-5)
    assert curve.test_r2 == pytest.approx([rows[0].test_r2] * len(curve.test_r2), abs=1e-5)


# Baselines


@pytest.mark.parametrize("own_token", [False, True])
def test_ridge_is_that_whose_weight_validates_best(own_token):
    def features(part):
        return part.tokens[:, 2] if own_token else part.tokens.reshape(len(part.tokens), -1)

    row = fit_ridge(own_token, SPLIT, SETTINGS, 0)
    models = [Ridge(alpha).fit(features(SPLIT.train), SPLIT.train.y) for alpha in SETTINGS.ridge_alphas]
    scores = [score(model.predict(features(SPLIT.validation)), SPLIT.validation.y) for model in models]
    best = int(np.argmax(scores))
    assert best != int(np.argmin(scores))
    assert row.alpha == SETTINGS.ridge_alphas[best]
    assert row.validation_r2 == pytest.approx(scores[best], abs=1e-5)
    assert row.test_r2 == pytest.approx(score(models[best].predict(features(SPLIT.test)), SPLIT.test.y), abs=1e-5)
    assert row.tokens == (1 if own_token else N_TOKENS)


@pytest.mark.parametrize("decay_on", ["all", "values", "none"])
def test_rows_of_softmax_attention_that_stays_as_it_begins_are_those_of_its_first_weights(decay_on):
    row, curve, choice = train_softmax(decay_on, SPLIT, SETTINGS, 5)
    options = {"n_heads": 2, "head_width": 2, "position": 2, "decay_on": decay_on, "seed": 5}
    network = SoftmaxAttention(WIDTH, N_OUTPUTS, **options)
    outputs = [network(torch.as_tensor(part.tokens)).detach().double().numpy() for part in SPLIT[:3]]
    loss = ((outputs[0] - SPLIT.train.y) ** 2).sum(1).mean() / 2
    alpha = 0.0 if decay_on == "none" else choice.alpha * N_OUTPUTS  # one per output
    assert row.alpha == alpha
    assert row.objective == pytest.approx(loss + alpha * network.decay().item(), rel=1e-5)
    assert choice.validation_r2 == row.validation_r2 == pytest.approx(score(outputs[1], SPLIT.validation.y), abs=1e-5)
    assert row.test_r2 == pytest.approx(score(outputs[2], SPLIT.test.y), abs=1e-5)
    assert row.tokens == N_TOKENS
    assert curve.test_r2 == pytest.approx([row.test_r2] * len(curve.test_r2), abs=1e-5)


@pytest.mark.parametrize("alphas", [(1e-3, 30.0), (30.0, 1e-3)])
def test_softmax_attention_is_that_which_validates_best(alphas):
    changed = dataclasses.replace(SETTINGS, softmax_alphas=alphas, softmax_learning_rates=(1e-9, 3e-2), n_steps=30)
    row, _, choice = train_softmax("all", SPLIT, changed, 0)
    assert (choice.alpha, choice.learning_rate) == (1e-3, 3e-2)
    for alpha in alphas:
        for rate in changed.softmax_learning_rates:
            alone = dataclasses.replace(changed, softmax_alphas=(alpha,), softmax_learning_rates=(rate,))
            assert row.validation_r2 >= train_softmax("all", SPLIT, alone, 0)[0].validation_r2 - 1e-6


@pytest.mark.parametrize("rate", [1e-2, 3.0])
def test_softmax_attention_takes_all_its_steps_and_keeps_what_validates_best(rate):
    changed = dataclasses.replace(SETTINGS, softmax_alphas=(1e-3,), softmax_learning_rates=(rate,), n_steps=8)
    row, curve, _ = train_softmax("all", SPLIT._replace(test=SPLIT.validation), changed, 0)
    assert len(curve.test_r2) == 1 + 8  # of the weights before each step, and of those that were kept
    assert curve.test_r2[-1] == row.validation_r2 >= max(curve.test_r2) - 1e-6


def test_the_step_of_softmax_attention_is_chosen_by_the_validation_samples_alone():
    changed = dataclasses.replace(SETTINGS, softmax_alphas=(1e-3,), softmax_learning_rates=(1e-2,), n_steps=8)
    validation, test = (part._replace(y=-part.y) for part in SPLIT[1:3])  # which the training makes worse
    assert train_softmax("all", SPLIT._replace(test=test), changed, 0)[0].steps == 8
    assert train_softmax("all", SPLIT._replace(validation=validation), changed, 0)[0].steps == 0


def test_what_has_nothing_to_choose_takes_no_seconds_to_choose():
    one = dataclasses.replace(SETTINGS, softmax_alphas=(1e-3,), ridge_alphas=(1.0,))
    rows = [train_softmax("all", SPLIT, one, 0)[0], fit_ridge(False, SPLIT, one, 0)]
    rows += train_class(CLASSES[0], solve_class(CLASSES[0], SPLIT, one, 0), SPLIT, one, 0)[0]
    assert [row.choice_seconds for row in rows] == [0.0] * 4
    assert min(row.fit_seconds for row in rows) > 0


@pytest.mark.parametrize("decay_on", ["all", "values", "none"])
def test_softmax_attention_for_all_positions_has_the_decay_that_was_chosen(decay_on):
    network = train_softmax_sequence(SoftmaxChoice(decay_on, 0.1, 1e-2, 0.0), drawn_sequences(), SETTINGS, 0)
    options = {"n_heads": 2, "head_width": 2, "decay_on": decay_on}
    expected = SoftmaxAttention(WIDTH, N_OUTPUTS, **options)
    expected.load_state_dict(network.state_dict())
    assert network.decay().item() == expected.decay().item()


def test_scores_while_training_are_those_of_the_run_that_was_kept():
    scores = TestScores(SPLIT.test, None, 1)
    scores.runs = [{0: 0.1, 1: 0.2}, {0: 0.3, 1: 0.4}]
    trials = [TrainingHistory(steps=[0, 1], seconds=[0.0, float(number)]) for number in (1, 2)]
    for trial, run in zip(trials, ([0.1, 0.2, 0.5], [0.3, 0.4, 0.5]), strict=True):
        kept = dataclasses.replace(trial, trials=trials)
        assert scores.curve(kept, 0.5) == ([*trial.seconds, trial.seconds[-1]], run)


# Attention maps


def pearson(left, right):
    return np.corrcoef(left.ravel(), right.ravel())[0, 1]


def figures_of(teacher, student):
    """Similarity of two maps by its definition."""
    off = ~np.eye(len(teacher), dtype=bool)
    mixed = 0.99 * student + 0.01 / len(teacher)
    kl = rel_entr(teacher, mixed).sum(1).mean()
    return {"pearson": pearson(teacher, student), "pearson_off_diagonal": pearson(teacher[off], student[off]), "kl": kl}


def among_others(weights):
    inner = weights[1:, 1:]
    return inner / inner.sum(1, keepdims=True)


def test_maps_are_those_of_the_teacher_and_of_students_that_validate_best():
    split = drawn_sequences()
    teacher = np.random.default_rng(3).dirichlet(np.ones(N_TOKENS), size=(60, N_TOKENS))
    teacher += 4 * np.roll(np.eye(N_TOKENS), 1, axis=1)  # which the target reads
    teacher /= teacher.sum(2, keepdims=True)
    choice = SoftmaxChoice("all", 1e-3, 1e-2, 0.0)
    rows, maps = compare_maps(teacher, choice, split, SETTINGS, 0)
    alpha_max = ConvexSequenceRegressor().fit(*split.train).alpha_max_
    alphas = [ratio * alpha_max for ratio in SETTINGS.map_alpha_ratios]
    models = [ConvexSequenceRegressor(alpha, tol=SETTINGS.search_tol).fit(*split.train) for alpha in alphas]
    scores = [score(model.predict(split.validation.tokens), split.validation.y) for model in models]
    best = models[int(np.argmax(scores))]
    assert best is models[1]
    assert rows[0]["alpha"] == pytest.approx(best.alpha, rel=1e-6)
    assert rows[0]["heads"] == len(best.heads_)
    assert rows[0]["test_r2"] == pytest.approx(score(best.predict(split.test.tokens), split.test.y), abs=1e-5)
    sums = best.attention_map_.sum(1, keepdims=True)
    np.testing.assert_allclose(maps["convex, single row"], best.attention_map_ / sums, atol=1e-5)
    np.testing.assert_array_equal(np.argmax(maps["convex, single row"], axis=1), [1, 2, 3, 0])
    np.testing.assert_allclose(maps["teacher"], teacher.mean(0), atol=1e-12)
    network = train_softmax_sequence(choice, split, SETTINGS, 0)
    with torch.no_grad():
        attention = network.attention(torch.as_tensor(split.train.tokens)).double().mean((0, 1)).numpy()
        outputs = network(torch.as_tensor(split.test.tokens)).double().numpy()
    np.testing.assert_allclose(maps["softmax attention"], attention, atol=1e-6)
    assert rows[1]["test_r2"] == pytest.approx(score(outputs, split.test.y), abs=1e-5)
    for row in rows[:2]:
        left, right = np.asarray(maps["teacher"]), np.asarray(maps[row["student"]])
        expected = figures_of(left, right)
        inner = figures_of(among_others(left), among_others(right))
        expected |= {f"{name}_without_first": value for name, value in inner.items()}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        entropies = [-sum(share * np.log(share) for share in line if share > 0) for line in right]
        assert row["positions"] == pytest.approx(np.exp(entropies).mean(), rel=1e-6)
    assert rows[0]["positions"] < rows[1]["positions"] < N_TOKENS
    assert {row["student"]: row["positions"] for row in rows[2:]} == pytest.approx(
        {"uniform": N_TOKENS, "each position itself": 1}
    )


def test_seeds_without_the_number_of_positions_are_summarised():
    rows = [{"student": "uniform", "seed": seed, "kl": 0.5} for seed in (0, 1)]
    runs = [{"rows": [], "map_rows": [rows[0]]}, {"rows": [], "map_rows": [rows[1] | {"positions": 4.0}]}]
    for found, expected in ((runs, 4.0), (runs[::-1], 4.0), (runs[:1], None)):
        assert summarise(found)["map_medians"][0]["positions"] == expected


# Text


def test_each_number_of_the_tables_stands_below_its_title():
    names = {
        "objective": "objective",
        "ratio": "ratio",
        "above bound": "excess",
        "choice s": "choice_seconds",
        "fit s": "fit_seconds",
        "steps": "steps",
        "heads": "heads",
        "tokens": "tokens",
        "test R2": "test_r2",
        "test error": "test_error",
    }
    numbers = {name: number + 0.0 for number, name in enumerate(names.values(), start=1)}
    row = {"model": "ridge", "method": "own", **numbers, "test_r2_range": [0.25, 0.5]}
    of_maps = {
        "correlation": "pearson",
        "off diagonal": "pearson_off_diagonal",
        "KL": "kl",
        "without first: correlation": "pearson_without_first",
        "off diagonal ": "pearson_off_diagonal_without_first",
        "KL ": "kl_without_first",
        "positions": "positions",
        "test R2": "test_r2",
    }
    map_row = {"student": "uniform"} | {name: number + 0.0 for number, name in enumerate(of_maps.values(), start=1)}
    report = {"runs": [], "medians": [row], "map_medians": [map_row], "skipped": [], "figures": [], "remark": "None."}
    lines = [re.split(r" {2,}", line) for line in format_student_teacher(report).splitlines()]
    titles, _, cells = lines[1:4]
    assert titles == ["model", "method", *list(names)[:9], "over seeds", "test error"]
    assert cells.pop(-2) == "0.250 to 0.500"
    assert cells[:2] == ["ridge", "own"]
    assert list(map(float, cells[2:])) == list(numbers.values())
    start = next(number for number, line in enumerate(lines) if line[0] == "map")
    assert lines[start] == ["map", *map(str.strip, of_maps)]
    assert list(map(float, lines[start + 2][1:])) == [map_row[name] for name in of_maps.values()]

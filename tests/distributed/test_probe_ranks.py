"""Probes on several processes against the same in one."""

import launcher
import numpy as np
import pytest
import rank_cases
from probe_cases import padded
from sklearn.base import clone

from convexformer import ConvexAttentionRegressor
from convexformer.preprocessing.checking import check_sequences
from convexformer.preprocessing.pooling import pooled

CLOSE = 1e-9
N_RANKS = 3


@pytest.fixture(scope="module")
def path_of_samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("samples") / "X.npy"
    np.save(path, padded(rank_cases.probe_problem()[0])[0])
    return str(path)


def test_probes_are_those_of_one_process(tmp_path, path_of_samples):
    samples, y, labels, weight = rank_cases.probe_problem()
    plain = {}
    for name, probe in rank_cases.PROBES.items():
        target = labels if hasattr(probe, "class_weight") else y
        plain[name] = rank_cases.probe_figures(clone(probe).fit(samples, target, weight), samples, target, weight)
    path = rank_cases.PROBES["regressor"].path(samples, y, weight, n_alphas=3)
    results = launcher.run("probes", N_RANKS, tmp_path, path=path_of_samples)
    for of_rank, (alphas, coefs, gaps) in results:
        np.testing.assert_allclose(alphas, path.alphas, rtol=1e-12)
        np.testing.assert_allclose(coefs, path.coefs, atol=1e-4)
        assert max(gaps) <= 1e-10
        for (name, way), got in of_rank.items():
            first, wanted = results[0][0][name, way], plain[name]
            for figure in ("objective", "bound", "score", "alpha", "rounds", "passes"):
                assert got[figure] == first[figure]
            assert (got["passes"] is None) == (way == "own")
            assert way == "own" or 1 < got["passes"] < 20  # over all ranks, of what all of them have
            for figure in ("coef", "intercept", "scores"):
                np.testing.assert_array_equal(got[figure], first[figure])
            for array, values in got["dictionary"].items():
                np.testing.assert_array_equal(values, first["dictionary"][array])
            assert got["bound"] <= got["objective"]
            assert got["n_features"] == wanted["n_features"]
            assert got["coef"].shape == wanted["coef"].shape
            assert got["rounds"] == wanted["rounds"]
            assert got["alpha"] == pytest.approx(wanted["alpha"], rel=1e-9)
            if got["rounds"] is not None:  # weightings are found from solutions, which are those of one process to tol
                assert got["objective"] == pytest.approx(wanted["objective"], rel=1e-6)
                continue
            rel = CLOSE if not name.startswith("cv") else 1e-5  # tol of the estimators
            assert got["objective"] == pytest.approx(wanted["objective"], rel=rel), (name, way)
            assert got["bound"] <= wanted["objective"] * (1 + 1e-13)
            assert wanted["bound"] <= got["objective"] * (1 + 1e-13)
            assert got["score"] == pytest.approx(wanted["score"], abs=1e-4)
            for array, values in wanted["dictionary"].items():
                np.testing.assert_allclose(got["dictionary"][array], values, rtol=1e-9, atol=1e-9)
            if got["scores"] is not None:
                np.testing.assert_allclose(got["scores"], wanted["scores"], atol=1e-4)
    generated = results[0][0]["generated", "own"]
    assert sum(generated["rounds"]) > 0
    tokens = pooled(generated["pooler"], check_sequences(clone(rank_cases.PROBES["regressor"]), samples, True))
    of_pooled = ConvexAttentionRegressor(alpha=0.02, tol=1e-10).fit(tokens.numpy(), y, weight)
    assert generated["objective"] == pytest.approx(of_pooled.certificate_.primal, rel=CLOSE)


def test_all_forms_of_samples_are_taken(tmp_path, path_of_samples):
    samples, y, _, _ = rank_cases.probe_problem()
    wanted = rank_cases.PROBES["regressor"].fit(samples, y).certificate_.primal
    results = launcher.run("probe_forms", N_RANKS, tmp_path, path=path_of_samples)
    for of_rank in results:
        assert of_rank == results[0]
        for form, objective in of_rank.items():
            assert objective == pytest.approx(wanted, rel=CLOSE), form


def test_arrays_of_other_lengths_on_each_rank(tmp_path, path_of_samples):
    model, whole = rank_cases.PROBES["regressor"], np.load(path_of_samples)
    arrays = rank_cases.different_arrays()
    samples = [sample for X, _ in arrays for sample in X]
    wanted = model.fit(samples, np.concatenate([y for _, y in arrays])).certificate_.primal
    of_path = model.fit(whole, whole[:, 0, 0]).certificate_.primal
    for got in launcher.run("probe_arrays", N_RANKS, tmp_path, path=path_of_samples):
        assert got == pytest.approx((wanted, of_path), rel=CLOSE)

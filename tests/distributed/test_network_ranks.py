"""Networks that are trained on several processes against the same in one."""

import random
import time

import launcher
import numpy as np
import pytest
import rank_cases
import torch
from covering import covering
from sklearn.base import clone

pytestmark = pytest.mark.filterwarnings("ignore::convexformer.constrained.InfeasibleWarning")


@pytest.fixture(scope="module")
def plain():
    """Figures of the estimators in one process."""
    found = {}
    for name, estimator in rank_cases.NETWORKS.items():
        arguments = rank_cases.network_arguments(name)
        found[name] = rank_cases.network_figures(clone(estimator).fit(*arguments), arguments)[0]
    return found


N_RANKS = [2, 3]
FITS = covering(N_RANKS, rank_cases.NETWORKS, rank_cases.WAYS)


@pytest.mark.parametrize("n_ranks", N_RANKS)
def test_networks_are_those_of_one_process(n_ranks, tmp_path, plain):
    for name in rank_cases.NETWORKS:
        np.save(tmp_path / f"{name}.npy", rank_cases.network_arguments(name)[0])
    fits = [fit[1:] for fit in FITS if fit[0] == n_ranks]
    results = launcher.run("networks", n_ranks, tmp_path, paths=str(tmp_path), fits=fits)
    for found, attributes in results:
        assert list(found) == fits
        assert attributes == results[0][1]
        assert "certificate_" not in attributes  # that of an earlier fit
        for (name, way), (figures, frozen) in found.items():
            assert frozen
            assert set(figures) == set(plain[name])
            for figure, values in figures.items():
                assert np.array_equal(values, results[0][0][name, way][0][figure])  # bit for bit on all ranks
                if values.dtype.kind == "f":
                    close = {"rtol": 1e-9, "atol": 1e-11, "err_msg": f"{name}, {way}, {figure}"}
                    np.testing.assert_allclose(values, plain[name][figure], **close)
                else:
                    assert np.array_equal(values, plain[name][figure])


def test_gradients_are_those_of_one_process(tmp_path):
    for found, wanted in launcher.run("network_gradients", 3, tmp_path):
        assert wanted.abs().min() > 0
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_mistakes_and_interrupts_of_training_are_told_on_all_ranks(tmp_path):
    results = launcher.run("network_failures", 3, tmp_path)
    for said, n_iter, (figures, _) in results:
        assert "rank 2: " in said["nan"]
        assert "NaN" in said["nan"]
        assert "the shape of a sample must be the same on all ranks" in said["widths"]
        assert "samples of rank 2" in said["targets"]
        assert said["weights"] == "TypeError: DescentConstrainedClassifier.fit(): too many positional arguments"
        assert "alpha must be" in said["parameter"]
        assert "nothing.npy" in said["path"]
        assert said["diverged"].startswith(("ArithmeticError", "NonFiniteLossError"))
        assert "became infinite or nan" in said["diverged"]
        assert "interrupted after 7 steps" in said["Ctrl-C"]
        assert n_iter == 7  # the weights so far
        for figure, values in figures.items():
            assert np.array_equal(values, results[0][2][0][figure])


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_of_a_rank_in_training_is_told_by_the_others(victim, tmp_path):
    processes = launcher.start("long_training", 2, tmp_path, started=str(tmp_path / "started"))
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "started").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(random.Random(victim).uniform(0, 1))
        processes[victim].kill()
        printed = processes[1 - victim].output(timeout=60)
    finally:
        launcher.close(processes)
    assert processes[1 - victim].failed
    assert f"RankError: rank {victim} " in printed

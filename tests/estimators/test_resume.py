"""Paths and cross-validations of estimators: kept on disk, interrupted, resumed, with one progress bar."""

import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from forks import Fork
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold
from tqdm import TMonitor

from convexformer import ConvexAttentionClassifierCV, ConvexAttentionRegressor, ConvexAttentionRegressorCV, Gates
from convexformer.estimators.path_result import PathResult
from convexformer.plot import plot_path
from convexformer.solvers import Fista, PathInterrupted

GATED = {"activation": "gated_relu", "n_gates": 6, "random_state": 0}
X = np.random.default_rng(0).normal(size=(60, 4, 2))
Y = X[:, 1, 0] - X[:, 2, 1] + 0.1 * X[:, 0, 0] ** 2
LABELS = np.digitize(X[:, 2, 1], [-0.5, 0.5])


class CountingFista(Fista):
    """Fista that counts its solves, and interrupts the first from some number on that gets to a third step."""

    def __init__(self, interrupt_solve=None):
        self.solves, self.interrupt_solve, self.lock = 0, interrupt_solve, threading.Lock()

    def init(self, program, start):
        with self.lock:
            self.solves += 1
            number = self.solves
        return super().init(program, start), number, 0

    def step(self, program, state):
        inner, number, steps = state
        if self.interrupt_solve is not None and number >= self.interrupt_solve and steps == 2:
            raise KeyboardInterrupt
        return super().step(program, inner), number, steps + 1

    def point(self, program, state):
        return super().point(program, state[0])

    def finished(self, state):
        return super().finished(state[0])


def test_another_alpha_than_that_of_the_file_is_named(tmp_path):
    file = tmp_path / "fit.npz"
    ConvexAttentionRegressor(alpha=0.25).fit(X, Y, resume=file)
    with pytest.raises(ValueError, match=r"these differ: alpha \(0\.25 in the file, 0\.5 now\)\. Repeat"):
        ConvexAttentionRegressor(alpha=0.5).fit(X, Y, resume=file)


@pytest.mark.parametrize(
    ("model", "fit"),
    [
        (ConvexAttentionRegressor(), lambda model: model.fit(X, Y, resume="kept")),
        (ConvexAttentionRegressor(), lambda model: model.path(X, Y, n_alphas=3, resume="kept")),
        (ConvexAttentionRegressorCV(alphas=3, cv=2, resume="kept"), lambda model: model.fit(X, Y)),
    ],
    ids=["fit", "path", "cross-validation"],
)
def test_what_is_kept_stays_where_it_was_asked_for(model, fit, tmp_path, monkeypatch):
    elsewhere, kept = tmp_path / "elsewhere", tmp_path / "kept"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    fit(model.set_params(solver="fista", tol=1e-9, callback=lambda progress: os.chdir(elsewhere)))
    assert os.getcwd() == str(elsewhere)
    assert os.listdir(elsewhere) == []
    assert (len(os.listdir(kept)) == 2) if kept.is_dir() else kept.is_file()


class TestPath:
    def test_resumed_after_an_interrupt(self, tmp_path):
        file = tmp_path / "path.npz"
        model = ConvexAttentionRegressor(tol=1e-7, solver="fista", **GATED)
        wanted = model.path(X, Y, n_alphas=6)
        model.set_params(solver=CountingFista(interrupt_solve=4))
        with pytest.raises(PathInterrupted, match=r"3 of 6 alphas; repeat the call with resume='.*path\.npz'"):
            model.path(X, Y, n_alphas=6, resume=file)
        rest = CountingFista()
        path = model.set_params(solver=rest).path(X, Y, n_alphas=6, resume=file)
        assert rest.solves == 3
        np.testing.assert_array_equal(path.alphas, wanted.alphas)
        np.testing.assert_array_equal(path.coefs[:3], wanted.coefs[:3])
        np.testing.assert_allclose(path.coefs, wanted.coefs, atol=1e-2)
        assert (path.gaps <= 1e-7).all()

    def test_message_without_a_file_tells_of_files(self):
        model = ConvexAttentionRegressor(solver=CountingFista(interrupt_solve=2))
        with pytest.raises(PathInterrupted, match=r"1 of 6 alphas; a call with resume='path\.npz'") as caught:
            model.path(X, Y, n_alphas=6)
        path = caught.value.path
        assert isinstance(path, PathResult)
        assert path.coefs.shape == (1, *X.shape[1:])
        alphas, _, _ = path
        assert len(alphas) == 1
        assert path.heads(0).predict(X).shape == (len(X), 1)

    def test_interrupted_before_the_first_alpha_is_finished(self):
        def interrupt(progress):
            raise KeyboardInterrupt

        with pytest.raises(PathInterrupted) as caught:
            ConvexAttentionRegressor(callback=interrupt).path(X, Y, n_alphas=6)
        path = caught.value.path
        assert (path.coefs.shape, path.intercepts.shape) == ((0, *X.shape[1:]), (0,))
        assert repr(path) == "PathResult(no alphas)"
        assert path.token_norms.shape == (0, X.shape[1])
        with pytest.raises(ValueError, match="path must hold at least one alpha, got none"):
            plot_path(path)

    def test_file_of_other_data(self, tmp_path):
        file = tmp_path / "path.npz"
        ConvexAttentionRegressor().path(X, Y, n_alphas=2, resume=file)
        with pytest.raises(ValueError, match=r"resume=.*these differ:.*\bX\b"):
            ConvexAttentionRegressor().path(X[:, ::-1], Y, n_alphas=2, resume=file)
        with pytest.raises(ValueError, match=r"resume=.*these differ: penalty \(GroupL2\(\) in the file, GroupNuclear"):
            ConvexAttentionRegressor(penalty="nuclear").path(X, Y, n_alphas=2, resume=file)

    def test_one_bar(self, capsys):
        ConvexAttentionRegressor(verbose=True).path(X, Y, n_alphas=4)
        shown = capsys.readouterr().err
        assert "4/4" in shown
        assert "gap" in shown
        assert shown.count("\n") == 1


OPTIONS = {"alphas": 4, "cv": 3, "tol": 1e-7}


@pytest.fixture(scope="module")
def reference():
    return ConvexAttentionRegressorCV(**OPTIONS, **GATED).fit(X, Y)


@pytest.mark.parametrize("options", [{"loss": "huber"}, {"penalty": "nuclear"}])
def test_a_fit_that_is_done_is_not_done_again(options, tmp_path):
    targets = np.column_stack([Y, X[:, 3, 0]])
    model = ConvexAttentionRegressor(alpha=0.01, tol=1e-7, **options)
    done = clone(model).fit(X, targets, resume=tmp_path / "fit.npz")
    again = clone(model).fit(X, targets, resume=tmp_path / "fit.npz")
    assert done.n_iter_ > 0
    assert again.n_iter_ == 0
    assert np.array_equal(again.coef_, done.coef_)
    assert again.certificate_.relative_gap <= 1e-7


class TestCrossValidation:
    @pytest.mark.parametrize("n_jobs", [1, 2])
    def test_resumed_after_an_interrupt(self, n_jobs, reference, tmp_path):
        folder = tmp_path / "new" / "folds"
        model = ConvexAttentionRegressorCV(**OPTIONS, **GATED, n_jobs=n_jobs, resume=folder)
        first = CountingFista(interrupt_solve=6)
        with pytest.raises(KeyboardInterrupt, match=r"a fit with the same parameters and data goes on from there"):
            model.set_params(solver=first).fit(X, Y)
        assert not hasattr(model, "coef_")
        rest = CountingFista()
        model.set_params(solver=rest).fit(X, Y)
        # Five solves of twelve were done, more or less one in another thread, and one more is that of all samples.
        assert rest.solves == 12 - 5 + 1 if n_jobs == 1 else 7 <= rest.solves <= 10
        np.testing.assert_allclose(model.score_path_, reference.score_path_, atol=1e-3)
        assert model.alpha_ == reference.alpha_
        assert sorted(entry.name for entry in folder.iterdir()) == [f"fold_{i}.npz" for i in range(3)]
        again = CountingFista()
        model.set_params(solver=again).fit(X, Y)
        assert again.solves == 1
        np.testing.assert_allclose(model.score_path_, reference.score_path_, atol=1e-3)

    @pytest.mark.parametrize("n_jobs", [None, 2])
    def test_interrupt_without_a_folder_passes(self, n_jobs):
        model = ConvexAttentionRegressorCV(**OPTIONS, n_jobs=n_jobs, solver=CountingFista(interrupt_solve=2))
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y)
        assert not any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())

    def test_an_error_in_one_fold_ends_the_others_and_is_raised(self):
        class Failing(CountingFista):
            def step(self, program, state):
                if state[1] == 2:
                    raise ZeroDivisionError("of the second solve")
                time.sleep(0.01)
                return super().step(program, state)

            def finished(self, state):
                return False

        # The other folds would need minutes.
        options = {**OPTIONS, "tol": 0.0, "max_iter": 100_000}
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError, match="of the second solve"):
            ConvexAttentionRegressorCV(**options, n_jobs=2, solver=Failing()).fit(X, Y)
        assert time.monotonic() - began < 30

    @pytest.mark.parametrize("random_state", [None, np.random.RandomState(0)])
    def test_gates_that_would_be_drawn_anew_are_refused_before_anything_is_solved(self, tmp_path, random_state):
        def solved(progress):
            pytest.fail("solved")

        options = {"activation": "gated_relu", "n_gates": 3, "random_state": random_state, "callback": solved}
        message = "needs an int as random_state: without one a later call draws other gates"
        with pytest.raises(ValueError, match=message):
            ConvexAttentionRegressorCV(**{**OPTIONS, **options}, resume=tmp_path / "folds").fit(X, Y)
        with pytest.raises(ValueError, match=message):
            ConvexAttentionRegressor(**options).path(X, Y, n_alphas=3, resume=tmp_path / "path.npz")
        assert list(tmp_path.iterdir()) == []

    def test_a_path_has_no_folds_that_would_be_drawn_anew(self, tmp_path):
        model = ConvexAttentionRegressorCV(cv=KFold(3, shuffle=True), resume=tmp_path / "folds")
        assert len(model.path(X, Y, n_alphas=2, resume=tmp_path / "path.npz").alphas) == 2
        with pytest.raises(ValueError, match="a later call draws other folds"):
            model.fit(X, Y)

    def test_gates_that_are_given_need_no_seed(self, tmp_path):
        generator = np.random.default_rng(0)
        gates = Gates(generator.normal(size=(4, X.shape[1])), generator.normal(size=(4, X.shape[2])))
        model = ConvexAttentionRegressor(activation="gated_relu", gates=gates)
        first, again = (model.path(X, Y, n_alphas=3, resume=tmp_path / "path.npz") for _ in range(2))
        np.testing.assert_array_equal(first.coefs, again.coefs)

    @pytest.mark.parametrize("scoring", [None, "r2"])
    def test_threads_change_no_score(self, scoring):
        one, two = (
            ConvexAttentionRegressorCV(**OPTIONS, **GATED, scoring=scoring, n_jobs=n_jobs).fit(X, Y)
            for n_jobs in (None, 2)
        )
        np.testing.assert_allclose(two.score_path_, one.score_path_, rtol=1e-9)
        assert two.alpha_ == one.alpha_

    def test_scores_in_threads_are_of_models_of_their_own(self):
        barrier = threading.Barrier(2, timeout=20)  # the models of both folds are there before one of them is scored

        def together(model, X, y):
            barrier.wait()
            return model.score(X, y)

        one, two = (
            ConvexAttentionRegressorCV(alphas=[0.1], cv=2, scoring=scoring, n_jobs=n_jobs).fit(X, Y).score_path_
            for scoring, n_jobs in (("r2", None), (together, 2))
        )
        np.testing.assert_allclose(two, one, rtol=1e-9)

    def test_threads_run_side_by_side(self):
        # Each fold waits for the other one: run one after the other they would wait in vain.
        barrier = threading.Barrier(2, timeout=20)
        threads = set()

        def callback(progress):
            if threading.get_ident() not in threads:
                threads.add(threading.get_ident())
                if threading.current_thread() is not threading.main_thread():
                    barrier.wait()

        ConvexAttentionRegressorCV(alphas=2, cv=2, n_jobs=2, callback=callback).fit(X, Y)
        assert len(threads) == 3

    def test_callback_still_stops_the_solves_and_scores_of_these_are_warned_of(self):
        model = ConvexAttentionRegressorCV(alphas=[0.01], cv=2, tol=0.0, callback=lambda progress: True)
        with pytest.warns(ConvergenceWarning, match="callback has stopped 2 of the 2 fits that alpha is chosen by"):
            model.fit(X, Y)
        assert model.history_.iteration == [model.n_iter_]

    def test_folder_of_other_data_or_folds(self, tmp_path):
        model = ConvexAttentionRegressorCV(**OPTIONS, resume=tmp_path).fit(X, Y)
        with pytest.raises(ValueError, match=r"resume='.*fold_0\.npz' cannot be continued.*these differ:.*\bX\b"):
            model.set_params(cv=KFold(3, shuffle=True, random_state=0)).fit(X, Y)

    def test_folder_that_cannot_be(self, tmp_path):
        (tmp_path / "file").touch()
        for resume in (tmp_path / "file", tmp_path / "file" / "folder", 3, "folder\0"):
            with pytest.raises(ValueError, match="resume must be None or the path of a folder"):
                ConvexAttentionRegressorCV(**OPTIONS, resume=resume).fit(X, Y)

    @pytest.mark.parametrize("n_jobs", [None, 2])
    def test_one_bar_over_folds_and_alphas_and_one_of_the_final_fit(self, n_jobs, capsys):
        ConvexAttentionClassifierCV(**OPTIONS, n_jobs=n_jobs, verbose=True).fit(X, LABELS)
        shown = capsys.readouterr().err
        assert "3 folds" in shown
        assert "12/12" in shown
        assert re.search(r"gap -?\d\.\de", shown)
        assert shown.count("\n") == 2

    def test_silent_by_default(self, capsys):
        ConvexAttentionClassifierCV(**OPTIONS, n_jobs=2).fit(X, LABELS)
        shown = capsys.readouterr()
        assert shown.out == shown.err == ""


class Endless(Fista):
    """Only an interrupt ends this solver."""

    def finished(self, state):
        return False


def fit_until_interrupted(n_jobs, folder):
    """Fit without end, and print the threads that are left after an interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background may ignore it
    model = ConvexAttentionRegressorCV(
        alphas=3, cv=2, tol=0.0, max_iter=10**9, n_jobs=n_jobs, resume=folder, solver=Endless()
    )
    # Whole lines, whichever thread writes.
    model.set_params(callback=lambda progress: os.write(1, b"working\n") and None)
    try:
        model.fit(X, Y)
    except KeyboardInterrupt as interruption:
        print()  # the interrupt may have come within a line
        print(*(thread.name for thread in threading.enumerate() if not isinstance(thread, TMonitor)), interruption)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("n_jobs", [1, 2])
def test_ctrl_c_in_a_process_of_its_own(n_jobs, tmp_path):
    printed, folder = tmp_path / "printed", tmp_path / "folds"
    process = Fork(printed, fit_until_interrupted, n_jobs, str(folder))
    try:
        deadline = time.monotonic() + 60
        while not (printed.exists() and printed.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert printed.read_text().startswith("working\n"), printed.read_text()
        time.sleep(0.5)
        process.interrupt()
        lines = process.output(timeout=60).splitlines()
    finally:
        process.kill()
    assert all("working".startswith(line) for line in lines[:-1])  # and nothing went to stderr
    assert lines[-1].startswith("MainThread interrupted; what is finished is in resume=")
    assert (folder / "fold_0.npz").exists()
    model = ConvexAttentionRegressorCV(alphas=3, cv=2, resume=folder)
    assert model.fit(X, Y).certificate_.relative_gap <= 1e-4

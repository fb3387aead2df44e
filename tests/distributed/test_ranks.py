"""Programs and estimators on several processes against the same in one."""

import random
import signal
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import launcher
import numpy as np
import pytest
import rank_cases
import torch
from covering import covering
from sample_operations import CHANGED_ON_RANK_0, CHANGES, GATHERED, OPERATIONS
from sklearn.base import clone
from solver_cases import BOTH

from convexformer import ConvexAttentionClassifier, load_model, save_model
from convexformer_solvers import DenseMap
from convexformer_solvers.distributed import DistributedConfig, RankError, Ranks, ShardedMap
from convexformer_solvers.distributed.ranks import _ended, _ended_on_gpu, interrupts_held
from convexformer_solvers.distributed.vectors import Layout

# Objectives agree to the gap of the solves, certificates to what rounding leaves.
CLOSE = 1e-9


@pytest.fixture(scope="module")
def in_one_process():
    """Certificates of all cases on one map in memory."""
    tokens, masks, weight = rank_cases.data()
    known = {}

    def of(case):
        if case not in known:
            known[case] = rank_cases.solved(DenseMap(tokens), masks, weight, case)
        return known[case]

    return of


OF_PROGRAMS = (rank_cases.LOSSES, ["group_l2", "nuclear"], BOTH, BOTH, BOTH)  # gates, intercept and weights
# Numbers of ranks, and from how many samples on vectors of samples are on their ranks: always, or never.
ON_RANK_0, ON_RANKS = [(1, 1), (2, 10**6), (3, 10**6)], [(2, 1), (3, 1), (8, 1)]
ALL = list(product(*OF_PROGRAMS))
PROGRAMS = {ranks: ALL[first :: len(ON_RANK_0)] for first, ranks in enumerate(ON_RANK_0)}  # each combination once
PAIRS = covering(ON_RANKS, *OF_PROGRAMS)
PROGRAMS |= {ranks: [case for one, *case in PAIRS if one == ranks] for ranks in ON_RANKS}


@pytest.mark.parametrize(("n_ranks", "least"), PROGRAMS)
def test_programs_have_the_objective_of_one_process(n_ranks, least, tmp_path, in_one_process):
    cases = [tuple(case) for case in PROGRAMS[n_ranks, least]]
    results = launcher.run("all_programs", n_ranks, tmp_path, cases=cases, least_samples=least)
    assert all(result == results[0] for result in results)  # bit for bit
    assert list(results[0]) == cases
    for case, (primal, dual, _) in results[0].items():
        wanted, bound, _ = in_one_process(case)
        assert primal == pytest.approx(wanted, rel=CLOSE), case
        assert max(dual, bound) <= min(primal, wanted) * (1 + 1e-13), case


def test_operations_on_values_of_the_ranks_are_those_on_one_tensor(tmp_path):
    results = launcher.run("operations", 3, tmp_path)
    for *by_layout, refused in results:
        assert "tensor of positions" in refused["rows"]
        assert "tensor of positions" in refused["out"]
        assert "have changed since" in refused["read"]
        for name in ("axis", "repeated", "two views"):
            assert "use a clone" in refused[name]
        assert "read-only" in refused["array"]
        assert "out of" in refused["position"]
        assert "out of" in refused["position before the first"]
        assert "shape of the mask" in refused["mask"]
        assert "'[-1, 360]' is invalid" in refused["shape"]
        assert "[-1, 0]" in refused["shape of nothing"]
        for found in by_layout:
            assert set(found) == set(OPERATIONS | CHANGES)
            for name, (got, wanted, _) in found.items():
                for part, whole in zip(got, wanted, strict=True):
                    close = 1e-5 if part.dtype == torch.float32 else 1e-12
                    torch.testing.assert_close(part, whole, rtol=close, atol=close, equal_nan=True, msg=name)
                    assert type(part) is torch.Tensor
    all_samples = results[0][0]
    gathered = {name for name, (_, _, n_gathered) in all_samples.items() if n_gathered}
    assert gathered == set(GATHERED) | CHANGED_ON_RANK_0


def test_plans_of_operations_go_with_the_common_work_and_values_with_their_last_use(tmp_path):
    ((during, n_used, unused), after), _ = launcher.run("left_overs", 2, tmp_path)
    assert during > 0
    assert after == 0
    assert n_used >= 2
    assert not unused


def test_commands_fail_on_rank_0_with_the_error_of_the_rank(tmp_path):
    tokens = rank_cases.data()[0]
    for said, long, wide, total, *n_samples in launcher.run("commands", 3, tmp_path):
        assert said["long"] == "ValueError: rank 1: " + "why? " * 10_000
        assert said["kind"] == "KeyError: 'rank 1: own'"
        assert said["no message"].startswith("UnicodeError: rank 1: 'utf-8' codec")
        assert "rank 1: what other ranks get must be picklable" in said["result"]
        for name in ("function", "unsent"):
            assert "what other ranks get must be picklable" in said[name]
        assert "rank 0: index" in said["lost"]
        assert "cannot go on: rank 0: index" in said["again"]
        assert "rank 1 has no samples" in said["empty"]
        assert "got memory on rank 0 and passes" in said["place"]
        assert said["error of rank 0"] in ("Own: own", "ValueError: own")
        assert "cannot go on: their common work has ended" in said["earlier"]
        assert all(sum(counts) == rank_cases.N_SAMPLES for counts in long)
        columns = tokens.reshape(len(tokens), -1).repeat(1, 5)
        torch.testing.assert_close(wide, columns.T @ columns, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(total, tokens[:, 0].sum(), rtol=1e-12, atol=1e-12)
        assert n_samples == 2 * [rank_cases.N_SAMPLES]  # after which the ranks go on


@pytest.mark.parametrize(("n_ranks", "least"), [(2, 1), (3, 10**6)])
def test_maps_keep_the_identities_of_maps(n_ranks, least, tmp_path):
    for got, wanted, side, largest in launcher.run("maps", n_ranks, tmp_path, least_samples=least):
        tokens, _, _ = rank_cases.data()
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        assert side == 3 * 4 * 3
        assert largest == tokens.abs().max()


def test_the_least_memory_limit_of_a_rank_is_that_of_all(tmp_path):
    assert launcher.run("limits", 3, tmp_path) == 3 * [[*3 * [(998, False)], (None, True)]]


def test_few_samples_with_large_means_are_read_in_as_few_passes_over_ranks(tmp_path):
    for found in launcher.run("few_samples", 2, tmp_path, names=["squared", "logistic", "poisson"]):
        for certificate, in_memory, passes in found.values():
            assert certificate.relative_gap <= 1e-10
            assert certificate.primal == pytest.approx(in_memory.primal, rel=1e-9)
            assert certificate.dual <= in_memory.primal * (1 + 1e-12)
            assert passes <= 200


def test_numbers_of_all_ranks_are_as_many_of_each_sample_as_on_the_first():
    layout = SimpleNamespace(n_samples=17, team=None)
    assert ShardedMap(layout, 0, DenseMap(torch.zeros(7, 5, 3))).n_stored == 17 * 5 * 3


@pytest.mark.parametrize(("n_samples", "work"), [(14, 14 * 14 * 15), (17, 7 * 15 * 15)])
def test_the_work_of_a_gram_matrix_is_that_of_the_smaller_side(n_samples, work):
    # Rank 0 forms the kernel of few samples, and each of two ranks the products of the features of its own.
    team = SimpleNamespace(ranks=SimpleNamespace(command_seconds=0.0, rate=np.inf))
    layout = SimpleNamespace(n_samples=n_samples, team=team)
    assert ShardedMap(layout, 0, DenseMap(torch.zeros(7, 5, 3))).gram_work() == work


@pytest.mark.parametrize(("n_samples", "keeps"), [(17, True), (16, False)])
def test_values_are_on_their_ranks_from_the_least_number_of_samples_on(n_samples, keeps):
    team = SimpleNamespace(ranks=SimpleNamespace(least_samples=17))
    assert Layout(team, [slice(0, n_samples)], n_samples, torch.device("cpu")).keeps == keeps


@pytest.fixture(scope="module")
def path_of_data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "X.npy"
    X, y, _, weight = rank_cases.problem()
    np.save(path, X)
    np.save(path.with_name("few.npy"), X[:2])
    np.savez(path.with_name("targets.npz"), y=y, sample_weight=weight)
    return str(path)


@pytest.fixture(scope="module")
def plain():
    """Figures of the estimators in one process."""
    X, y, labels, weight = rank_cases.problem()
    found = {}
    for name, estimator in rank_cases.ESTIMATORS.items():
        target = labels if hasattr(estimator, "class_weight") else y
        found[name] = rank_cases.figures(estimator.fit(X, target, weight), X, target, weight)
    return found


def test_estimators_are_those_of_one_process(tmp_path, path_of_data, plain):
    X, y, _, _ = rank_cases.problem()
    path = rank_cases.ESTIMATORS["regressor"].path(X, y, n_alphas=3)
    results = launcher.run("estimators", 3, tmp_path, path=path_of_data)
    for of_rank, (alphas, coefs, gaps) in results:
        np.testing.assert_allclose(alphas, path.alphas, rtol=1e-12)
        np.testing.assert_allclose(coefs, path.coefs, atol=1e-4)
        assert max(gaps) <= 1e-10
        for (name, way), got in of_rank.items():
            first, wanted = results[0][0][name, way], plain[name]
            assert got["objective"] == first["objective"]
            assert np.array_equal(got["coef"], first["coef"])
            assert got["score"] == first["score"]
            rel = 1e-9 if not name.startswith("cv") else 1e-5  # tol of the estimators
            assert got["objective"] == pytest.approx(wanted["objective"], rel=rel), (name, way)
            assert got["bound"] <= wanted["objective"] * (1 + 1e-13)
            assert wanted["bound"] <= got["objective"] * (1 + 1e-13)
            assert got["coef"].shape == wanted["coef"].shape
            assert got["score"] == pytest.approx(wanted["score"], abs=1e-4)
            assert got["n_features"] == wanted["n_features"]
            assert got["passes"] == first["passes"]
            if name == "regressor" and way == "streamed":
                assert 2 <= got["passes"] <= 2.2  # of all ranks together; alpha_max looks at some rows again
            if way == "narrow":
                assert got["passes"] <= {"regressor": 30, "classifier": 70}[name]  # gradient steps take 72 and 122


@pytest.fixture(scope="module")
def layered_plain():
    """Figures of greedy and sequence estimators in one process."""
    X, _, _, weight = rank_cases.problem()
    found = {}
    for name, estimator in rank_cases.LAYERED.items():
        target = rank_cases.layered_target(name)
        found[name] = rank_cases.layered_figures(clone(estimator).fit(X, target, weight), X, target, weight)
    return found


def test_layers_and_sequences_are_those_of_one_process(tmp_path, path_of_data, layered_plain):
    results = launcher.run("layered", 2, tmp_path, path=path_of_data)
    assert all(result == results[0] for result in results)  # the model bit for bit
    for (name, way), got in results[0].items():
        wanted = layered_plain[name]
        objectives = zip(got["objectives"], wanted["objectives"], got["bounds"], wanted["bounds"], strict=True)
        for layer, (primal, other, dual, bound) in enumerate(objectives):
            # Later layers are trained on what those before have found, known to the root of its gap.
            assert primal == pytest.approx(other, rel=1e-7 if layer else CLOSE), (name, way, layer)
            if layer == 0:  # the later ones have inputs of their own
                assert max(dual, bound) <= min(primal, other) * (1 + 1e-13)
            assert dual <= primal * (1 + 1e-13)
        for directions, others in zip(got["gates"], wanted["gates"], strict=True):
            np.testing.assert_allclose(directions, others, atol=1e-5)  # of later layers they may be of predictions
        assert got["score"] == pytest.approx(wanted["score"], abs=1e-4)
        assert (got["passes"] is None) == (way != "streamed")


def test_mistakes_in_layers_are_told_on_all_ranks(tmp_path):
    results = launcher.run("layered_failures", 3, tmp_path)
    for said in results:
        for name in ("greedy nan", "sequence nan"):
            assert "rank 2: " in said[name]
            assert "NaN" in said[name]
        assert "n_layers must be a positive integer" in said["greedy parameter"]
        assert "samples of rank 2" in said["sequence targets"]
        assert len(said["layers at Ctrl-C"]) == 2
        assert said["layers at Ctrl-C"] == results[0]["layers at Ctrl-C"]


def test_mistakes_are_told_on_all_ranks_with_the_rank(tmp_path, path_of_data):
    X, y, _, _ = rank_cases.problem()
    results = launcher.run("failures", 3, tmp_path, path=path_of_data)
    for said, objective in results:
        assert "rank 2: " in said["empty"]
        assert "rank 2: " in said["nan"]
        assert "NaN" in said["nan"]
        assert "(5, 3)" in said["widths"]
        assert "(5, 2)" in said["widths"]
        assert "rank 2" in said["widths"]
        assert "samples of rank 2" in said["targets"]
        assert "y must have one entry for each sample of its rank, got 451" in said["targets of all"]
        assert "y must have entries of the same shape" in said["shapes"]
        assert "rank 2: y must have one entry for each sample" in said["single"]
        assert said["no such path"].startswith("rank 2: y must hold a number per sample, or a label, or be the path")
        assert "y must not be bfloat16" in said["precision of targets"]
        for name in ("precision", "probe, precision"):
            wanted = (
                "the precision must be the same on all ranks, got torch.float64 on rank 0 and torch.float32 on rank 2"
            )
            assert said[name] == wanted
        assert "has 2 samples for 3 ranks; start fewer ranks" in said["fewer samples than ranks"]
        assert "alpha must be positive" in said["parameter"]
        assert said["source"] == said["Ctrl-C as it reads"] == "rank 2: the disk has gone"
        assert said["own kind of error"] == "rank 2: _Gone: the disk has gone"
        for name in ("kinds of labels", "bytes and numbers"):
            assert "y must be text on all ranks or on none" in said[name]
        assert "rank 2: what other ranks get must be picklable" in said["labels that cannot be sent"]
        assert "alpha must be the same on all ranks, got 0.2 on rank 0, 0.1 on rank 2" in said["other parameter"]
        assert "got 'Huber(delta=0.2)' on rank 0, 'Huber(delta=0.1)' on rank 2" in said["other loss"]
        assert "alphas must be the same on all ranks" in said["other alphas"]
        assert "method must be the same on all ranks, got 'path' on rank 0, 'fit' on rank 2" in said["other method"]
        assert "n_alphas must be the same on all ranks, got 3 on rank 0, 2 on rank 2" in said["other grid"]
        assert "alpha must be positive" in said["parameter that is not a number"]
        assert "got ['a', 'b'] on rank 0, ['b', 'a'] on rank 2" in said["other names"]
        assert "got 3 on rank 0, 2 on rank 2" in said["dimensions"]
        assert "nothing.npy" in said["file"]
        for name in ("probe", "probe, score"):
            assert "2 features" in said[name] or "got 3 on rank 0 and 2 on rank 2" in said[name]
        for name in ("probe, nan", "probe, empty", "probe, no token"):
            assert "rank 2: " in said[name]
        assert "NaN" in said["probe, nan"]
        assert "no token that is real" in said["probe, no token"]
        assert said["probe, weights"] == "rank 2: no weights here"
        plain = rank_cases.ESTIMATORS["regressor"].fit(X, y)
        assert objective == pytest.approx(plain.certificate_.primal, rel=CLOSE)


def test_ranks_may_have_their_own_limits_callbacks_paths_and_addresses(tmp_path, path_of_data):
    X, y, labels, _ = rank_cases.problem()
    parts = Path(path_of_data).with_name("parts")
    parts.mkdir()
    np.savez(parts / "shard.npz", X)
    wanted = [rank_cases.ESTIMATORS["cv"].fit(X, labels).certificate_.primal]
    wanted += 2 * [rank_cases.ESTIMATORS["regressor"].fit(X[:, :, 0], y).certificate_.primal]
    for objectives, keeps, said in launcher.run("own_parameters", 3, tmp_path, path=path_of_data):
        assert objectives == pytest.approx(wanted, rel=1e-5)  # tol of the estimators
        assert keeps
        assert "estimator must be the same on all ranks" in said["estimator"]
        assert "ConvexProbeRegressor" in said["estimator"]
        assert "would be read as one of the shards" in said["shards"]


def test_ctrl_c_leaves_the_best_point_on_all_ranks(tmp_path):
    results = launcher.run("interrupted", 2, tmp_path)
    assert results[0] == results[1]
    assert results[0][1] == "INTERRUPTED"


def test_ctrl_c_on_a_rank_that_waits_ends_the_common_work(tmp_path):
    moments = {name: str(tmp_path / name) for name in ("reading", "interrupted")}
    processes = launcher.start("interrupted_as_it_waits", 2, tmp_path, **moments)
    try:
        of_last = processes[1].output(timeout=300)
        of_first = processes[0].output(timeout=300)
    finally:
        launcher.close(processes)
    assert "said ['KeyboardInterrupt " in of_last
    for printed, n_errors in ((of_first, 2), (of_last, 1)):
        assert printed.count("'RankError rank 1 ") == n_errors, printed


def test_a_file_of_the_command_line_is_shared_by_the_ranks(tmp_path):
    X, y, _, _ = rank_cases.problem(60)
    file = str(tmp_path / "data.npz")
    np.savez(file, X=X, y=y)
    wanted, found, nothing = (
        of_rank for n in (1, 2) for of_rank in launcher.run("command_line", n, tmp_path / str(n), path=file)
    )
    assert nothing is None
    for name in ("alpha", "objective", "held_out_score"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5)


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_predictions_of_the_command_line_are_computed_in_parts(suffix, tmp_path):
    X, _, y, _ = rank_cases.problem(61)
    model = ConvexAttentionClassifier(alpha=0.05, max_iter=20).fit(X, y)
    save_model(model, tmp_path / "m.npz")
    file = tmp_path / f"data{suffix}"
    if suffix == ".npz":
        np.savez(file, X=X, y=y)
    else:
        np.save(file, X)
    (report, first), (nothing, second) = launcher.run(
        "predict_command", 2, tmp_path / "run", file=str(file), model=str(tmp_path / "m.npz"), out=str(tmp_path / "out")
    )
    assert nothing is None
    assert (set(first), set(second)) == ({30}, {31})
    assert report["n"] == 61
    assert report.get("score") == (model.score(X, y) if suffix == ".npz" else None)
    found = np.load(tmp_path / "out0.npz")
    np.testing.assert_array_equal(found["predictions"], model.predict(X))
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(X), atol=1e-12)
    assert not (tmp_path / "out1.npz").exists()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A folder with data on which ``long_fit`` takes a while, and from one process another model and the solution."""
    folder = tmp_path_factory.mktemp("long")
    X = np.random.default_rng(0).normal(size=(3000, 4, 16))
    np.save(folder / "X.npy", X)
    y = X[:, 0, 0] - X[:, 1, 1] > 0
    other = ConvexAttentionClassifier(alpha=0.1).fit(X, y)
    wanted = ConvexAttentionClassifier(alpha=1e-4, tol=1e-9).fit(X, y)
    return folder, X, y, other, wanted.certificate_


@pytest.mark.parametrize("moment", range(10))
def test_kill_of_a_rank_ends_the_others_and_damages_nothing(moment, tmp_path, long_run):
    folder, X, y, before, wanted = long_run
    draw = random.Random(moment)
    paths = {"resume": str(tmp_path / "resume.npz"), "model": str(tmp_path / "model.npz")}
    paths |= {"started": str(tmp_path / "started"), "path": str(folder / "X.npy")}
    save_model(before, paths["model"])
    processes = launcher.start("long_fit", 2, tmp_path, **paths)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "started").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1))
        victim = draw.randrange(2)
        processes[victim].kill()
        printed = processes[1 - victim].output(timeout=30)  # no hang
    finally:
        launcher.close(processes)
    assert processes[1 - victim].failed
    assert f"RankError: rank {victim} " in printed
    assert load_model(paths["model"]).certificate_.primal == before.certificate_.primal
    if (tmp_path / "resume.npz").exists() and moment < 2:  # goes on, with another number of ranks
        model = ConvexAttentionClassifier(alpha=1e-4, tol=1e-6).fit(X, y, resume=paths["resume"])
        assert abs(model.certificate_.primal - wanted.primal) <= model.certificate_.gap + wanted.gap


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 2)])
def test_a_fit_goes_on_with_another_number_of_ranks(before, after, tmp_path, long_run):
    folder = long_run[0]
    paths = {"resume": str(tmp_path / "resume.npz"), "model": str(tmp_path / "model.npz")}
    paths |= {"started": str(tmp_path / "started"), "path": str(folder / "X.npy")}
    first = launcher.run("long_fit", before, tmp_path / "first", tol=1e-1, **paths)[0]
    again = launcher.run("long_fit", after, tmp_path / "again", tol=1e-2, **paths)[0]
    assert again.primal <= first.primal * (1 + 1e-12)
    model = load_model(paths["model"])
    assert model.certificate_.primal == again.primal
    finished = launcher.run("long_fit", before, tmp_path / "last", tol=1e-1, **paths)[0]
    # Within tol nothing is left to do: the same weights, whose objective other ranks add up in another order.
    assert np.array_equal(load_model(paths["model"]).coef_, model.coef_)
    assert finished.primal == pytest.approx(again.primal, rel=1e-13)


@pytest.mark.parametrize(
    ("case", "said", "timeout"),
    [("silent", ("rank 1 ", "no sign of life for 8 s"), 300), ("ended_at_the_start", ("RankError: rank 1 ",), 60)],
    ids=["silent", "ended before its first sign of life"],
)
def test_a_rank_that_does_not_answer_is_named(case, said, timeout, tmp_path):
    processes = launcher.start(case, 3, tmp_path)
    try:
        for rank in (0, 2):
            printed = processes[rank].output(timeout=timeout)
            assert processes[rank].failed
            assert all(part in printed for part in said)
    finally:
        launcher.close(processes)


@pytest.mark.parametrize("error", [None, RuntimeError("connection closed")])
def test_an_operation_that_ends_as_a_wait_runs_out_has_ended(error):
    class Work:
        def wait(self, timeout=None):
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            if error is not None:
                raise error

        def is_completed(self):
            return True

    heartbeats = SimpleNamespace(failed=False, broken=lambda error: error)
    waiting = SimpleNamespace(config=DistributedConfig(), heartbeats=heartbeats)
    if error is None:
        Ranks.wait(waiting, Work)
    else:
        with pytest.raises(RuntimeError, match="connection closed"):
            Ranks.wait(waiting, Work)


@pytest.mark.parametrize("ended", [_ended, _ended_on_gpu])
def test_signs_of_life_are_looked_at_until_an_operation_ends(ended):
    looks = []

    class Work:
        def wait(self, timeout=None):
            if timeout is not None:
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return len(looks) == 2

    heartbeats = SimpleNamespace(failed=False, check=lambda: looks.append("look"))
    Ranks.wait(SimpleNamespace(config=DistributedConfig(heartbeat=1e-3), heartbeats=heartbeats), Work, ended)
    assert len(looks) == 2


def test_no_operation_starts_after_a_fault():
    def check(at_once):
        raise RankError("rank 1 has ended")

    with pytest.raises(RankError, match="rank 1 has ended"):
        Ranks.wait(SimpleNamespace(heartbeats=SimpleNamespace(failed=True, check=check)), lambda: pytest.fail("starts"))


def test_ctrl_c_waits_for_the_end_of_a_message():
    sent = []

    @interrupts_held()
    def send():
        signal.raise_signal(signal.SIGINT)
        sent.append("message")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            send()
        assert sent
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)

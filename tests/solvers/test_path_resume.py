"""Paths that are kept in a file: what is resumed, what is refused, what the file is believed; the progress bar."""

import dataclasses
import errno
import gc
import math
import re
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from solver_cases import make_program, randn

from convexformer_solvers import (
    Exact,
    Fista,
    GatedMap,
    GroupNuclear,
    Huber,
    PathInterrupted,
    SolverInterrupted,
    Squared,
    Status,
    alpha_grid,
    certify,
    iterate_path,
    solve,
    solve_path,
)
from convexformer_solvers.io import npz
from convexformer_solvers.io.checkpoint import PathFile
from convexformer_solvers.io.npz import read_archive, read_array, read_arrays, replacing, write_archive

PROGRAM = make_program(gated=True, intercept=True, weighted=True, n=12)
GRID = alpha_grid(PROGRAM.alpha_max, 5, 0.05)


class CountingFista(Fista):
    """Fista that counts its solves and steps, and interrupts at a step if told to."""

    def __init__(self, interrupt_at=None):
        self.alphas, self.steps, self.interrupt_at = [], 0, interrupt_at

    def init(self, program, start):
        self.alphas.append(program.alpha)
        return super().init(program, start)

    def step(self, program, state):
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        return super().step(program, state)


def assert_same(path, other):
    assert path.alphas == other.alphas
    assert torch.equal(path.coefs, other.coefs)
    for one, two in zip(path.results, other.results, strict=True):
        assert torch.equal(one.intercept, two.intercept)
        assert one.certificate.primal == two.certificate.primal
        assert one.certificate.dual == pytest.approx(two.certificate.dual, rel=1e-12)


class TestResume:
    def test_a_finished_path_is_read_and_not_solved_again(self, tmp_path):
        file = tmp_path / "path.npz"
        solver = CountingFista()
        first = solve_path(PROGRAM, solver, GRID, tol=1e-7, resume=file)
        assert solver.alphas == GRID
        solver = CountingFista()
        second = solve_path(PROGRAM, solver, GRID, tol=1e-7, resume=str(file))
        assert solver.alphas == []
        assert_same(first, second)
        assert [result.n_iter for result in second.results] == [result.n_iter for result in first.results]
        assert [result.seconds for result in second.results] == [result.seconds for result in first.results]
        assert {(result.status, result.solver) for result in second.results} == {(Status.CONVERGED, "fista")}
        assert all(result.history.iteration == [result.n_iter] for result in second.results)
        assert [entry.name for entry in tmp_path.iterdir()] == ["path.npz"]

    def test_a_file_changes_nothing_in_an_uninterrupted_path(self, tmp_path):
        kept = solve_path(PROGRAM, Fista(), GRID, tol=1e-7, resume=tmp_path / "path.npz")
        assert_same(kept, solve_path(PROGRAM, Fista(), GRID, tol=1e-7))

    def test_goes_on_where_it_was_interrupted(self, tmp_path):
        file = tmp_path / "path.npz"
        whole = CountingFista()
        wanted = solve_path(PROGRAM, whole, GRID, tol=1e-8)
        solver = CountingFista(interrupt_at=whole.steps // 2)
        with pytest.raises(
            PathInterrupted, match=r"after \d of 5 alphas; repeat the call with resume='.*path.npz'"
        ) as caught:
            solve_path(PROGRAM, solver, GRID, tol=1e-8, resume=file)
        finished = len(caught.value.path.results)
        assert 0 < finished < 5
        assert isinstance(caught.value.__cause__, SolverInterrupted)
        rest = CountingFista()
        path = solve_path(PROGRAM, rest, GRID, tol=1e-8, resume=file)
        # The alpha that was under way goes on from the point that the interrupt left.
        assert rest.alphas == GRID[finished:]
        assert solver.steps + rest.steps < 1.3 * whole.steps
        for one, two in zip(path.results[:finished], wanted.results[:finished], strict=True):
            assert torch.equal(one.coef, two.coef)
        assert max(path.gaps) <= 1e-8
        np.testing.assert_allclose(
            [result.certificate.primal for result in path.results],
            [result.certificate.primal for result in wanted.results],
            atol=2e-8 * PROGRAM.null_value,
        )

    def test_interrupted_at_every_step_it_still_ends(self, tmp_path):
        # The worst case: one step per call, each beginning where the last one ended.
        file = tmp_path / "path.npz"
        interrupts, path = 0, None
        while path is None and interrupts < 2000:
            try:
                path = solve_path(PROGRAM, CountingFista(interrupt_at=2), GRID[:3], tol=1e-2, resume=file)
            except PathInterrupted:
                interrupts += 1
        assert interrupts > 2
        assert max(path.gaps) <= 1e-2

    def test_interrupted_between_two_solves(self, tmp_path, monkeypatch):
        # Not inside the loop of solve: its own interruption is not there to catch.
        def save(file, index, result):
            saved(file, index, result)
            if index == 2:
                raise KeyboardInterrupt

        saved = PathFile.save
        monkeypatch.setattr(PathFile, "save", save)
        with pytest.raises(PathInterrupted) as caught:
            solve_path(PROGRAM, Fista(), GRID, resume=tmp_path / "path.npz")
        assert len(caught.value.path.results) == 2
        monkeypatch.undo()
        solver = CountingFista()
        solve_path(PROGRAM, solver, GRID, resume=tmp_path / "path.npz")
        assert solver.alphas == GRID[3:]

    def test_interrupted_before_the_first_step(self):
        class Init(Fista):
            def init(self, program, start):
                raise KeyboardInterrupt

        with pytest.raises(PathInterrupted, match=r"after 0 of 5 alphas; a call with resume='path\.npz'"):
            solve_path(PROGRAM, Init(), GRID)

    def test_a_sharper_tol_goes_on_from_the_stored_points(self, tmp_path):
        file = tmp_path / "path.npz"
        loose = CountingFista()
        rough = solve_path(PROGRAM, loose, GRID, tol=1e-3, resume=file)
        already = [alpha for alpha, gap in zip(GRID, rough.gaps, strict=True) if gap <= 1e-8]
        sharp, cold = CountingFista(), CountingFista()
        path = solve_path(PROGRAM, sharp, GRID, tol=1e-8, resume=file)
        assert sharp.alphas == [alpha for alpha in GRID if alpha not in already]
        assert max(path.gaps) <= 1e-8
        solve_path(PROGRAM, cold, GRID, tol=1e-8)
        assert sharp.steps < cold.steps
        # And looser again there is nothing to do.
        solver = CountingFista()
        assert_same(solve_path(PROGRAM, solver, GRID, tol=1e-4, resume=file), path)
        assert solver.alphas == []

    def test_points_whose_gap_is_tol_are_not_solved_again(self, tmp_path):
        solve_path(PROGRAM, Fista(), GRID, tol=1e-4, resume=tmp_path / "path.npz")
        again = solve_path(PROGRAM, Fista(), GRID, tol=1e-4, resume=tmp_path / "path.npz")
        third = solve_path(PROGRAM, Fista(), GRID, tol=max(again.gaps), resume=tmp_path / "path.npz")
        assert [result.seconds for result in third.results] == [result.seconds for result in again.results]

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    def test_points_that_are_gone_on_with_get_no_worse(self, tmp_path):
        before = solve_path(PROGRAM, Fista(), GRID, tol=1e-5, resume=tmp_path / "path.npz")
        after = solve_path(PROGRAM, Fista(), GRID, tol=1e-12, max_iter=1, resume=tmp_path / "path.npz")
        assert max(after.gaps) > 1e-12
        for one, two in zip(before.results, after.results, strict=True):
            assert two.certificate.primal <= one.certificate.primal

    def test_points_behind_an_interrupt_are_kept(self, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID, tol=1e-3, resume=file)
        with pytest.raises(PathInterrupted):
            solve_path(PROGRAM, CountingFista(interrupt_at=5), GRID, tol=1e-9, resume=file)
        solver = CountingFista()
        solve_path(PROGRAM, solver, GRID, tol=1e-3, resume=file)
        assert solver.alphas == []

    def test_dual_points_of_the_solver_are_kept(self, tmp_path):
        # Exact offers a dual point; without it the gap of its point is far larger.
        file = tmp_path / "path.npz"
        exact = solve_path(PROGRAM, Exact(), GRID[:3], tol=1e-6, resume=file)
        assert certify(PROGRAM.with_alpha(GRID[2]), exact.results[2].coef, exact.results[2].intercept).relative_gap > 0
        solver = CountingFista()
        again = solve_path(PROGRAM, solver, GRID[:3], tol=1e-6, resume=file)
        assert solver.alphas == []
        assert {result.solver for result in again.results} == {"exact"}

    def test_an_error_is_that_of_the_solver_and_leaves_the_points_before(self, tmp_path):
        class Fails(Fista):
            def init(self, program, start):
                if program.alpha == GRID[2]:
                    raise ValueError("no step to take")
                return super().init(program, start)

        with pytest.raises(ValueError, match="no step to take"):
            solve_path(PROGRAM, Fails(), GRID, resume=tmp_path / "path.npz")
        solver = CountingFista()
        solve_path(PROGRAM, solver, GRID, resume=tmp_path / "path.npz")
        assert solver.alphas == GRID[2:]

    def test_points_without_a_bound_are_stored_and_solved_on(self, tmp_path):
        program = changed(loss=Unbounded())
        for _ in range(2):
            with pytest.warns(ConvergenceWarning, match="relative gap nan"):
                path = solve_path(program, Fista(), GRID[2:], max_iter=5, resume=tmp_path / "path.npz")
            assert np.isnan(path.gaps).all()

    def test_alphas_that_did_not_converge_are_taken_up_again(self, tmp_path):
        file = tmp_path / "path.npz"
        with pytest.warns(ConvergenceWarning):
            solve_path(PROGRAM, Fista(), GRID, tol=1e-9, max_iter=3, resume=file)
        assert max(solve_path(PROGRAM, Fista(), GRID, tol=1e-9, resume=file).gaps) <= 1e-9

    def test_precision_is_that_of_the_call(self, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID, tol=1e-4, resume=file)
        single = solve_path(PROGRAM, Fista(), GRID, tol=2e-4, resume=file, dtype=torch.float32)
        assert single.coefs.dtype == torch.float32
        for alpha, result in zip(GRID, single.results, strict=True):
            again = certify(PROGRAM.with_alpha(alpha), result.coef, result.intercept)
            assert again.primal == result.certificate.primal

    def test_certificates_are_not_taken_from_the_file(self, tmp_path):
        file = tmp_path / "path.npz"
        honest = solve_path(PROGRAM, Fista(), GRID, tol=1e-6, resume=file)
        header, arrays = read_archive(file, "path")
        arrays["coef_4"] = arrays["coef_4"] + 1.0
        arrays["dual_3"] = 1e6 * randn(*arrays["dual_3"].shape).numpy()
        write_archive(file, "path", header, arrays)
        solver = CountingFista()
        path = solve_path(PROGRAM, solver, GRID, tol=1e-6, resume=file)
        assert GRID[4] in solver.alphas
        assert max(path.gaps) <= 1e-6
        for alpha, one, two in zip(GRID, path.results, honest.results, strict=True):
            best = solve(PROGRAM.with_alpha(alpha), Fista(), tol=1e-10).certificate.primal
            assert one.certificate.dual <= best * (1 + 1e-9)
            assert one.certificate.primal == pytest.approx(two.certificate.primal, abs=2e-6 * PROGRAM.null_value)

    def test_weights_count_by_their_ratios(self, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID, resume=file)
        solver = CountingFista()
        scaled = dataclasses.replace(PROGRAM, sample_weight=3.0 * PROGRAM.sample_weight)
        solve_path(scaled, solver, GRID, resume=file)
        assert solver.alphas == []


def changed(**fields):
    return dataclasses.replace(PROGRAM, **fields)


def flipped(mask):
    mask = mask.clone()
    mask[3, 1] = ~mask[3, 1]
    return mask


WIDE = pytest.mark.skipif(np.finfo(np.longdouble).bits == 64, reason="none is wider")


def moved(tensor, row):
    tensor = tensor.clone()
    tensor[row] += 0.5
    return tensor


MAP = PROGRAM.map
DATA = MAP.base.data
OTHERS = {
    "y": changed(y=moved(PROGRAM.y, 5)),
    "y (order)": changed(y=PROGRAM.y.flip(0)),
    "sample_weight": changed(sample_weight=moved(PROGRAM.sample_weight, 2)),
    "X": changed(map=GatedMap(moved(DATA, 7), MAP.masks)),
    "X (masks)": changed(map=GatedMap(DATA, flipped(MAP.masks))),
    r"penalty \(GroupL2\(\) in the file, GroupNuclear\(\) now\)": changed(penalty=GroupNuclear()),
    r"loss \(Squared\(\) in the file, Huber\(delta=2.0\) now\)": changed(loss=Huber(delta=2.0)),
    r"fit_intercept \(True in the file, False now\)": changed(fit_intercept=False),
    r"n_samples \(12 in the file, 10 now\)": PROGRAM.rows(torch.arange(10)),
    "coef_shape": changed(y=PROGRAM.y[:, :1]),
}


class Factors(GroupNuclear):
    """A penalty with factors, of which its representation says nothing."""

    def __init__(self, last):
        object.__setattr__(self, "last", last)

    def value(self, coef):
        return super().value(coef) + self.last * super().value(coef.flatten(0, -3)[-1:])


class Shares(Squared):
    """A loss with a number, of which its representation says nothing; the best constant model is that of another."""

    def __init__(self, share):
        object.__setattr__(self, "share", share)

    def value(self, pred, y):
        return super().value(pred, y) * self.share


class Unbounded(Squared):
    """A loss of which no lower bound is known."""

    def conjugate(self, u, y):
        return torch.full_like(u[:, 0], math.nan)


class TestRefused:
    @pytest.mark.parametrize(("part", "kind"), [("penalty", Factors), ("loss", Shares)])
    def test_numbers_that_no_representation_shows(self, part, kind, tmp_path):
        file = tmp_path / "path.npz"
        PathFile(file, changed(**{part: kind(2.0)}), GRID).keep({}, {})
        PathFile(file, changed(**{part: kind(2.0)}), GRID)
        with pytest.raises(ValueError, match=f"these differ: value of the {part}. Repeat"):
            PathFile(file, changed(**{part: kind(3.0)}), GRID)

    def test_numbers_of_a_loss_are_told_where_the_data_are_zeros(self, tmp_path):
        zeros = GatedMap(torch.zeros_like(DATA), MAP.masks)
        PathFile(tmp_path / "path.npz", changed(map=zeros, loss=Shares(2.0)), GRID).keep({}, {})
        with pytest.raises(ValueError, match=r"these differ: value of the loss\. Repeat"):
            PathFile(tmp_path / "path.npz", changed(map=zeros, loss=Shares(3.0)), GRID)

    @pytest.mark.parametrize("share", [math.inf, math.nan])
    def test_a_loss_that_is_not_finite_somewhere_is_no_other(self, share, tmp_path):
        for _ in range(2):
            PathFile(tmp_path / "path.npz", changed(loss=Shares(share)), GRID).keep({}, {})
        with pytest.raises(ValueError, match=r"these differ: value of the loss\. Repeat"):
            PathFile(tmp_path / "path.npz", changed(loss=Shares(3.0)), GRID)

    @pytest.mark.parametrize("part", ["loss", "penalty", "y"])
    def test_files_of_former_versions_have_no_values_of_loss_and_penalty(self, part, tmp_path):
        file = tmp_path / "path.npz"
        PathFile(file, PROGRAM, GRID).keep({}, {})
        header, arrays = read_archive(file, "path")
        del header["program"][part if part == "y" else f"value of the {part}"]
        write_archive(file, "path", header, arrays)
        if part == "y":
            with pytest.raises(ValueError, match=r"these differ: y\. Repeat"):
                PathFile(file, PROGRAM, GRID)
        else:
            PathFile(file, PROGRAM, GRID)

    @pytest.mark.parametrize("unit", [1.0, 2.0**-40, 2.0**40])
    def test_other_numbers_are_told_from_rounding_in_any_unit(self, unit, tmp_path):
        def file_of(factor):
            own = changed(map=GatedMap(factor * unit * DATA, MAP.masks), y=factor * unit * PROGRAM.y)
            return PathFile(tmp_path / "path.npz", own, GRID)

        file_of(1.0).keep({}, {})
        file_of(1 + 1e-12)
        with pytest.raises(ValueError, match=r"these differ: y, X, alpha_max\b"):
            file_of(1 + 1e-6)

    @pytest.mark.parametrize("name", OTHERS)
    def test_file_of_another_program(self, name, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID, tol=1e-2, resume=file)
        before = file.read_bytes()
        other, name = OTHERS[name], name.removesuffix(" (masks)").removesuffix(" (order)")
        with pytest.raises(
            ValueError, match=rf"resume='.*path.npz' cannot be continued.*these differ:.*\b{name}(?!\w)"
        ):
            solve_path(other, Fista(), GRID, tol=1e-2, resume=file)
        assert file.read_bytes() == before

    def test_only_what_differs_is_named(self, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID, tol=1e-2, resume=file)
        with pytest.raises(ValueError, match=r"these differ: alphas\. Repeat"):
            solve_path(PROGRAM, Fista(), GRID[:4], tol=1e-2, resume=file)
        with pytest.raises(ValueError, match=r"these differ: alphas\. Repeat"):
            solve_path(PROGRAM, Fista(), [1.1 * alpha for alpha in GRID], tol=1e-2, resume=file)

    def test_other_files_are_refused_and_left_alone(self, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)
        whole = file.read_bytes()
        np.savez(tmp_path / "other.npz", X=np.ones(3))
        for content in ((tmp_path / "other.npz").read_bytes(), whole[:-100], b"", b"my thesis"):
            file.write_bytes(content)
            with pytest.raises(ValueError, match=r"resume: .*path.npz is not a saved path"):
                solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)
            assert file.read_bytes() == content

    @pytest.mark.parametrize(
        ("array", "value"),
        [
            ("coef_1", np.ones(3)),
            ("coef_1", np.nan),
            ("intercept_1", np.ones(7)),
            ("dual_1", np.ones(2)),
            pytest.param("dual_1", np.longdouble(1), marks=WIDE),  # which torch does not have
            ("coef_1", None),
        ],
    )
    def test_damaged_points_are_named(self, array, value, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)
        header, arrays = read_archive(file, "path")
        if value is None:
            del arrays[array]
        else:
            arrays[array] = np.broadcast_to(value, np.shape(value) or arrays[array].shape)
        write_archive(file, "path", header, arrays)
        with pytest.raises(ValueError, match=r"resume=.*its point for alpha=.* cannot be used"):
            solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)

    @pytest.mark.parametrize("part", ["program", "runs"])
    @pytest.mark.parametrize("value", ["absent", None, 3, [1], "abc"])
    def test_damaged_headers_are_named(self, part, value, tmp_path):
        self.assert_damaged(tmp_path / "path.npz", **{part: value})

    @pytest.mark.parametrize(
        "runs",
        [
            {"a": {"n_iter": 1, "seconds": 0.1, "solver": "fista"}},
            {"2": {"n_iter": 1, "seconds": 0.1, "solver": "fista"}},
            {"0": None},
            {"0": {"n_iter": 1, "seconds": 0.1}},
            {"0": {"n_iter": "many", "seconds": 0.1, "solver": "fista"}},
        ],
    )
    def test_damaged_entries_of_points_are_named(self, runs, tmp_path):
        self.assert_damaged(tmp_path / "path.npz", runs=runs)

    @pytest.mark.parametrize("y", [[[1.0], 2.0], ["a", "b", "c"], [None, None, None], [{}, 1.0, 2.0]])
    def test_damaged_checksums_are_others(self, y, tmp_path):
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)
        header, arrays = read_archive(file, "path")
        write_archive(file, "path", {**header, "program": {**header["program"], "y": y}}, arrays)
        with pytest.raises(ValueError, match=r"resume='.*path.npz' cannot be continued: .*these differ: y\."):
            solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)

    @staticmethod
    def assert_damaged(file, **changes):
        solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)
        header, arrays = read_archive(file, "path")
        header = {name: value for name, value in {**header, **changes}.items() if value != "absent"}
        write_archive(file, "path", header, arrays)
        with pytest.raises(ValueError, match=r"resume='.*path.npz' cannot be continued: it is damaged"):
            solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)

    @pytest.mark.parametrize("name", ["coef_0", "intercept_0", "dual_0"])
    @pytest.mark.parametrize("kind", [complex, bool, str])
    def test_points_of_other_numbers_are_refused(self, name, kind, tmp_path):
        # The imaginary part of a complex one would be dropped.
        file = tmp_path / "path.npz"
        solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)
        header, arrays = read_archive(file, "path")
        write_archive(file, "path", header, {**arrays, name: arrays[name].astype(kind)})
        with pytest.raises(ValueError, match=r"resume=.*its point for alpha=.* cannot be used .*floating-point"):
            solve_path(PROGRAM, Fista(), GRID[:2], tol=1e-2, resume=file)

    def test_two_that_write_at_once_leave_the_file_of_the_last(self, tmp_path):
        file = tmp_path / "file"
        with replacing(file) as first:
            first.write_text("first")
            with replacing(file) as second:
                second.write_text("second")
            assert file.read_text() == "second"
        assert file.read_text() == "first"
        assert list(tmp_path.iterdir()) == [file]

    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_link_stays_one_to_the_file_that_is_written(self, is_there, tmp_path):
        (tmp_path / "disk").mkdir()
        file, link = tmp_path / "disk" / "file.npz", tmp_path / "link.npz"
        if is_there:
            write_archive(file, "example", {"n": 1}, {})
        link.symlink_to(Path("disk", "file.npz"))
        write_archive(link, "example", {"n": 2}, {})
        assert link.is_symlink()
        assert read_archive(file, "example") == ({"n": 2}, {})
        assert [*file.parent.iterdir()] == [file]

    def test_whatever_byte_is_damaged_the_file_is_named(self, tmp_path):
        file = tmp_path / "small.npz"
        written = np.arange(3.0)
        write_archive(file, "example", {"n": 3}, {"x": written})
        whole, refusals = file.read_bytes(), []
        for k in range(len(whole)):
            changed = [bytes([whole[k] ^ flips]) for flips in (1, 8, 255)]
            for byte in (b"", *changed):
                file.write_bytes(whole[:k] + byte + whole[k + 1 :])
                try:
                    header, arrays = read_archive(file, "example")
                except ValueError as error:
                    refusals.append(str(error))
                else:  # dates, versions and the like do not matter; an array may be lost, but not changed
                    assert header == {"n": 3}
                    np.testing.assert_array_equal(arrays.get("x", written), written)
        assert len(refusals) > 2 * len(whole)
        assert all(str(file) in refusal for refusal in refusals)

    def test_numbers_that_are_called_compressed_are_damage(self, tmp_path):
        file = tmp_path / "x.npz"
        write_archive(file, "example", {}, {})
        content = bytearray(file.read_bytes())
        for mark, method in ((b"PK\3\4", 8), (b"PK\1\2", 10)):  # of the entry, and of the list of entries
            content[content.index(mark) + method] = zipfile.ZIP_BZIP2
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npz is not a saved example, or is damaged: Invalid data"):
            read_archive(file, "example")

    def test_a_header_of_any_depth_is_refused(self, tmp_path):
        np.savez(tmp_path / "deep.npz", header=np.array("[" * 100_000))
        with pytest.raises(ValueError, match=r"deep\.npz is not a saved example, or is damaged: .*too deeply"):
            read_archive(tmp_path / "deep.npz", "example")

    @pytest.mark.parametrize(
        ("ending", "length"), [("npz", "2000"), ("npz", "4000"), ("npz", "-300"), ("npy", "4000"), ("npy", "-300")]
    )
    def test_arrays_of_another_length_than_their_header_says_are_refused(self, ending, length, tmp_path):
        file, save, read = tmp_path / "x", *((np.savez, read_arrays) if ending == "npz" else (np.save, read_array))
        with open(file, "wb") as opened:
            save(opened, np.arange(3000.0))
        file.write_bytes(file.read_bytes().replace(b"(3000,)", f"({length},)".encode()))
        with pytest.raises(ValueError, match=r"which by its header takes|no negative numbers"):
            read(file)

    def test_compressed_arrays_that_do_not_fit_into_memory_are_refused(self, tmp_path, monkeypatch):
        file = tmp_path / "x.npz"
        np.savez_compressed(file, x=np.zeros(1000))
        np.testing.assert_array_equal(read_arrays(file)["x"], np.zeros(1000))
        monkeypatch.setattr(npz, "free_memory", lambda device: None)  # not known
        np.testing.assert_array_equal(read_arrays(file)["x"], np.zeros(1000))
        monkeypatch.setattr(npz, "free_memory", lambda device: 8000)
        with pytest.raises(ValueError, match=r"'x' takes 8\.13e-06 GB, and 8e-06 GB are free"):
            read_arrays(file)

    def test_what_follows_an_array_in_a_file_of_its_own_is_not_read(self, tmp_path):
        file = tmp_path / "x.npy"
        np.save(file, np.arange(3))
        file.write_bytes(file.read_bytes() + b"more")
        np.testing.assert_array_equal(read_array(file), np.arange(3))

    def test_what_another_archive_holds_is_said(self, tmp_path):
        write_archive(tmp_path / "x.npz", "example", {}, {"x": np.arange(3)})
        with pytest.raises(ValueError, match=r"x\.npz is not a saved path; it holds a saved example$"):
            read_archive(tmp_path / "x.npz", "path")
        np.savez(tmp_path / "y.npz", X=np.arange(3), y=np.arange(3))
        with pytest.raises(ValueError, match=r"y\.npz is not a saved path; it holds 2 arrays, X, y$"):
            read_archive(tmp_path / "y.npz", "path")
        np.save(tmp_path / "x.npy", np.arange(3))
        with pytest.raises(ValueError, match=r"x\.npy is not a saved path, or is damaged: it holds a single array$"):
            read_archive(tmp_path / "x.npy", "path")
        np.savez(tmp_path / "z.npz", x=np.array([None, "text"], dtype=object))
        with pytest.raises(ValueError, match=r"z\.npz is not a saved path, or is damaged: it holds no plain arrays$"):
            read_archive(tmp_path / "z.npz", "path")

    def test_a_folder_that_is_not_there_is_said_as_it_is(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*x\.npz"):
            write_archive(tmp_path / "nowhere" / "x.npz", "example", {}, {"x": np.arange(3)})

    def test_a_file_that_is_not_there_is_no_damage(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            read_archive(tmp_path / "nothing.npz", "example")

    @pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")])
    def test_errors_of_the_machine_are_no_damage(self, error, tmp_path, monkeypatch):
        def fail(*arguments, **options):
            raise error

        write_archive(tmp_path / "x.npz", "example", {}, {})
        monkeypatch.setattr(np, "load", fail)
        with pytest.raises(type(error)) as caught:
            read_archive(tmp_path / "x.npz", "example")
        assert caught.value is error

    @pytest.mark.parametrize("header", [{"format": 99}, {}])
    def test_files_of_other_versions(self, header, tmp_path):
        file = tmp_path / "path.npz"
        write_archive(file, "path", header, {})
        with pytest.raises(ValueError, match=r"resume=.*saved by another version"):
            solve_path(PROGRAM, Fista(), GRID, resume=file)

    @pytest.mark.parametrize("resume", [3, True, ["path.npz"]])
    def test_not_a_path(self, resume):
        with pytest.raises(ValueError, match="resume must be None or the path of a file"):
            solve_path(PROGRAM, Fista(), GRID, resume=resume)

    def test_null_characters(self):
        with pytest.raises(ValueError, match="resume must be a path without null characters"):
            solve_path(PROGRAM, Fista(), GRID, resume="path\0.npz")

    def test_folders(self, tmp_path):
        with pytest.raises(ValueError, match=r"resume must be the path of a file .* got a folder: "):
            solve_path(PROGRAM, Fista(), GRID, resume=tmp_path)
        with pytest.raises(ValueError, match=r"resume must be the path of a file .* got a folder that is not there"):
            solve_path(PROGRAM, Fista(), GRID, resume=tmp_path / "nowhere" / "path.npz")

    @pytest.mark.parametrize("tol", [True, -1.0, "small", None])
    def test_wrong_tol(self, tol):
        with pytest.raises(ValueError, match="tol must be a non-negative number"):
            solve_path(PROGRAM, Fista(), GRID, tol=tol)


class TestProgress:
    def test_one_bar_over_the_alphas_with_the_gap(self, capsys):
        solve_path(PROGRAM, Fista(), GRID, tol=1e-6, verbose=True)
        shown = capsys.readouterr().err
        assert "path, fista" in shown
        assert "5/5" in shown
        assert re.search(r"gap -?\d\.\de", shown)
        # One bar: a bar that is left standing ends its line.
        assert shown.count("\n") == 1

    def test_resumed_alphas_count(self, tmp_path, capsys):
        solve_path(PROGRAM, Fista(), GRID, resume=tmp_path / "path.npz")
        solve_path(PROGRAM, Fista(), GRID, resume=tmp_path / "path.npz", verbose=True)
        assert "5/5" in capsys.readouterr().err

    def test_silent_by_default(self, capsys):
        solve_path(PROGRAM, Fista(), GRID[:2])
        shown = capsys.readouterr()
        assert shown.out == shown.err == ""


class TestOneAtATime:
    def test_they_are_the_results_of_the_path(self):
        results = iterate_path(PROGRAM, Fista(), GRID)
        for one, two in zip(results, solve_path(PROGRAM, Fista(), GRID).results, strict=True):
            assert torch.equal(one.coef, two.coef)
            assert one.certificate.primal == two.certificate.primal

    def test_an_alpha_is_solved_when_it_is_asked_for(self):
        solver = CountingFista()
        results = iterate_path(PROGRAM, solver, GRID)
        assert solver.alphas == []
        next(results)
        next(results)
        assert solver.alphas == GRID[:2]

    def test_what_was_left_after_some_is_gone_on_with(self, tmp_path):
        results = iterate_path(PROGRAM, Fista(), GRID, resume=tmp_path / "path.npz")
        next(results)
        results.close()
        solver = CountingFista()
        assert len(list(iterate_path(PROGRAM, solver, GRID, resume=tmp_path / "path.npz"))) == 5
        assert solver.alphas == GRID[1:]

    def test_only_the_last_points_are_kept(self):
        results = iterate_path(PROGRAM, Fista(), GRID)
        first = next(results)
        reference = weakref.ref(first.coef)
        del first
        for _ in range(3):
            next(results)
        gc.collect()
        assert reference() is None

    def test_only_points_of_the_last_two_alphas_are_kept(self):
        points = []

        class Watched(Fista):
            def point(self, program, state):
                found = super().point(program, state)
                points.append((program.alpha, weakref.ref(found.coef)))
                return found

        results = iterate_path(PROGRAM, Watched(), GRID)
        for _ in range(4):
            next(results)
        gc.collect()
        assert {alpha for alpha, reference in points if reference() is not None} <= set(GRID[2:4])

    def test_an_interrupt_is_that_of_the_solve_and_its_point_is_in_the_file(self, tmp_path):
        finished = []
        with pytest.raises(SolverInterrupted) as caught:
            finished.extend(iterate_path(PROGRAM, CountingFista(interrupt_at=5), GRID, resume=tmp_path / "path.npz"))
        result, alpha = caught.value.result, GRID[len(finished)]
        assert result.n_iter > 0
        file = PathFile(tmp_path / "path.npz", PROGRAM, GRID)
        stored = file.load(len(finished), PROGRAM.with_alpha(alpha), torch.float64)
        assert torch.equal(stored.coef, result.coef)

    def test_the_point_of_a_solve_that_goes_on_is_kept(self, tmp_path):
        program, seen = PROGRAM.with_alpha(GRID[1]), []
        solve(program, Fista(), callback=lambda progress: seen.append(progress))
        PathFile(tmp_path / "path.npz", PROGRAM, GRID).save_progress(1, seen[-1])
        stored = PathFile(tmp_path / "path.npz", PROGRAM, GRID).load(1, program, torch.float64)
        assert torch.equal(stored.coef, seen[-1].coef)
        assert torch.equal(stored.intercept, seen[-1].intercept)
        assert (stored.n_iter, stored.seconds) == (seen[-1].iteration, seen[-1].seconds)

    def test_arrays_that_are_stored_besides_are_apart_from_points(self, tmp_path):
        program = PROGRAM.with_alpha(GRID[1])
        result, file = solve(program, Fista()), PathFile(tmp_path / "path.npz", PROGRAM, GRID)
        file.keep({"n": 3}, {"coef_1": np.ones(3)})
        file.save(1, result)
        again = PathFile(tmp_path / "path.npz", PROGRAM, GRID)
        assert torch.equal(again.load(1, program, torch.float64).coef, result.coef)
        entries, arrays = again.kept
        assert entries == {"n": 3}
        assert arrays.keys() == {"coef_1"}
        np.testing.assert_array_equal(arrays["coef_1"], np.ones(3))

    def test_bad_arguments_are_named_before_the_first_alpha(self, tmp_path):
        with pytest.raises(ValueError, match="tol"):
            iterate_path(PROGRAM, Fista(), GRID, tol=-1.0)

"""Generated weightings in the file of ``resume``: fits that were ended go on from their last round."""

from contextlib import nullcontext

import numpy as np
import pytest
from probe_cases import ragged_samples, signal

from convexformer import ConvexProbeRegressor
from convexformer.nn import MeanWeights
from convexformer.preprocessing import MeanPooling, QueryPooling, TokenGates
from convexformer.probes import Generation
from convexformer.probes.generate import find_weightings
from convexformer.solvers import SolverInterrupted
from convexformer_solvers.io.npz import read_archive, write_archive

SAMPLES = ragged_samples(n_samples=60)
Y = signal(SAMPLES)


def fitted(file=None, *, max_new=8, samples=SAMPLES, **options):
    defaults = {"dictionary": MeanPooling(), "random_state": 0, "tol": 1e-8}
    model = ConvexProbeRegressor(0.003, generate=Generation(max_new, per_round=2), **defaults | options)
    return model.fit(samples, Y, resume=file)


def arrays_of(model):
    return {name: array.numpy() for name, array in model.pooler_.state_dict().items()}


@pytest.mark.parametrize("standardize", [False, True])
def test_a_fit_that_was_interrupted_finds_what_it_would_have_found(standardize, tmp_path):
    file = tmp_path / "fit.npz"
    wanted = fitted(standardize=standardize)

    def interrupt(progress):
        if len(progress.coef) == 7:  # that of the fourth round
            raise KeyboardInterrupt

    with pytest.raises(SolverInterrupted):
        fitted(file, standardize=standardize, callback=interrupt)
    solved = []
    again = fitted(file, standardize=standardize, callback=lambda progress: solved.append(len(progress.coef)))
    assert set(solved) == {5, 7, 9}  # the mean and two rounds are not solved again
    assert [found.n_weightings for found in again.generation_.rounds] == [1, 3, 5, 7]
    np.testing.assert_allclose(again.generation_.rounds, wanted.generation_.rounds, rtol=1e-6)
    assert again.generation_.end == wanted.generation_.end
    assert again.certificate_.relative_gap <= 1e-8
    assert again.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-7)
    theirs = arrays_of(wanted)
    for name, array in arrays_of(again).items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_interrupt_of_a_search_says_what_there_is_and_how_to_go_on(is_kept, tmp_path, monkeypatch):
    searches = []

    def interrupted(*arguments):
        searches.append(arguments)
        if len(searches) == 4:  # the second of the second round
            raise KeyboardInterrupt
        return find_weightings(*arguments)

    monkeypatch.setattr("convexformer.estimators.probe.base.find_weightings", interrupted)
    file = tmp_path / "fit.npz" if is_kept else None
    model = ConvexProbeRegressor(0.003, generate=Generation(8, per_round=2), dictionary=MeanPooling(), random_state=0)
    with pytest.raises(KeyboardInterrupt) as caught:
        model.fit(SAMPLES, Y, resume=file)
    said = "interrupted in the search for weightings of round 2; the estimator has the certified solution so far"
    assert str(caught.value) == said + (f"; repeat the call with resume={str(file)!r} to continue" if is_kept else "")
    assert model.generation_.end.startswith("interrupted")
    assert model.predict(SAMPLES).shape == Y.shape
    assert len(model.fit(SAMPLES, Y, resume=file).generation_.rounds) == 4


@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_a_fit_that_is_done_is_not_done_again(loss, tmp_path):
    first, again = (fitted(tmp_path / "fit.npz", loss=loss) for _ in range(2))
    assert again.n_iter_ == 0
    np.testing.assert_array_equal(again.coef_, first.coef_)
    assert again.generation_ == first.generation_


def test_more_weightings_are_added_to_those_that_there_are(tmp_path):
    few, more = fitted(tmp_path / "fit.npz", max_new=4), fitted(tmp_path / "fit.npz", max_new=6)
    assert more.generation_.rounds[:2] == few.generation_.rounds
    assert len(more.weighting_norms_) == 7
    assert more.certificate_.primal < few.certificate_.dual
    np.testing.assert_array_equal(more.pool(SAMPLES)[:, :5], few.pool(SAMPLES))


def test_the_last_round_adds_no_more_than_are_left():
    model = fitted(max_new=3)
    assert [found.n_added for found in model.generation_.rounds] == [2, 1]
    assert model.pooler_.n_weightings == 4
    assert model.set_params(generate=None).fit(SAMPLES, Y).generation_ is None


def test_weightings_are_added_behind_those_of_a_dictionary_of_several_parts(tmp_path):
    options = {"dictionary": [MeanPooling(), TokenGates(3, random_state=0)]}
    few, more = (fitted(tmp_path / "fit.npz", max_new=max_new, **options) for max_new in (2, 4))
    wanted = fitted(max_new=4, **options)
    assert len(more.weighting_norms_) == 4 + 4
    assert more.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-7)
    np.testing.assert_array_equal(more.pool(SAMPLES)[:, :6], few.pool(SAMPLES))
    theirs = arrays_of(wanted)
    for name, array in arrays_of(more).items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-4, atol=1e-6)


def test_no_more_weightings_are_taken_from_a_file_than_are_asked_for(tmp_path):
    fitted(tmp_path / "fit.npz", max_new=4)
    wanted, fewer = fitted(max_new=2), fitted(tmp_path / "fit.npz", max_new=2)
    assert len(fewer.weighting_norms_) == 3
    assert fewer.certificate_.primal == pytest.approx(wanted.certificate_.primal, rel=1e-7)
    alone = fewer.set_params(generate=None).fit(SAMPLES, Y, resume=tmp_path / "fit.npz")
    assert alone.n_iter_ == 0
    assert len(alone.weighting_norms_) == 1
    assert alone.generation_ is None


@pytest.mark.parametrize("of_numpy", [False, True])
def test_random_numbers_of_the_caller_are_not_set_back(of_numpy, tmp_path):
    own, options = np.random.RandomState(3), {"random_state": None}
    if not of_numpy:
        options["random_state"] = own
    fitted(tmp_path / "fit.npz", max_new=2, **options)
    before = [stream.get_state()[1:3] for stream in (own, np.random.mtrand._rand)]
    fitted(tmp_path / "fit.npz", max_new=4, **options)
    for (numbers, place), stream in zip(before, (own, np.random.mtrand._rand), strict=True):
        np.testing.assert_array_equal(stream.get_state()[1], numbers)
        assert stream.get_state()[2] == place


def test_a_first_dictionary_that_cannot_be_saved_does_not_matter(tmp_path):
    class Own(MeanWeights):
        """A weighting that ``TOKEN_WEIGHTS`` does not know."""

    class OwnPooling(MeanPooling):
        def make_weights(self, samples, random_state, sample_weight=None):
            return Own()

    file = tmp_path / "fit.npz"
    first, again = (fitted(file, dictionary=OwnPooling(), max_new=2) for _ in range(2))
    np.testing.assert_array_equal(again.coef_, first.coef_)


def test_a_file_of_other_samples_or_damaged_weightings_is_refused(tmp_path):
    file = tmp_path / "fit.npz"
    fitted(file, max_new=2)
    with pytest.raises(ValueError, match=r"resume=.*these differ: .*\bX\b"):
        fitted(file, samples=[2 * sample + sample**2 for sample in SAMPLES])
    header, arrays = read_archive(file, "path")
    kept = header["kept"]
    for damaged in (
        {"parts": [kept["parts"][0] | {"kind": "none of them"}]},
        {"rounds": 3},
        {"stream": kept["stream"] | {"bit_generator": "none of them"}},
    ):
        write_archive(file, "path", header | {"kept": kept | damaged}, arrays)
        with pytest.raises(ValueError, match=r"resume='.*fit.npz' cannot be continued: its weightings cannot be used"):
            fitted(file)


def test_a_dictionary_that_draws_nothing_needs_no_seed(tmp_path):
    X = np.random.default_rng(0).normal(size=(20, 3, 2))
    for part, drawn in ((MeanPooling(), False), (QueryPooling(2), True)):
        model = ConvexProbeRegressor(alpha=0.1, dictionary=part)
        with pytest.raises(ValueError, match="random_state") if drawn else nullcontext():
            model.fit(X, X[:, 0, 0], resume=tmp_path / "fit.npz")
    assert (tmp_path / "fit.npz").exists()

"""Samples of any number of tokens: their forms, their errors, and draws that depend on nothing but what they hold."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from probe_cases import forms, padded, ragged_samples
from sklearn.base import BaseEstimator

from convexformer.preprocessing.checking import check_sequences, choose_samples
from convexformer.preprocessing.sequences import CONFIG, PaddedSequences, draw_tokens

SAMPLES = ragged_samples()
FORMS = forms(SAMPLES)


def read(X):
    return check_sequences(BaseEstimator(), X, reset=True)


def contents(samples):
    return [
        sample[real].numpy() for _, tokens, mask in samples.chunks() for sample, real in zip(tokens, mask, strict=True)
    ]


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_hold_the_same_samples(name):
    samples = read(FORMS[name])
    assert len(samples) == len(SAMPLES)
    assert samples.n_features == 4
    assert samples.lengths.tolist() == [len(sample) for sample in SAMPLES]
    for found, expected in zip(contents(samples), SAMPLES, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FORMS)
def test_some_samples_of_each_form_are_those_at_the_positions(name):
    index = np.array([5, 0, 17])
    for found, position in zip(contents(read(choose_samples(FORMS[name], index))), index, strict=True):
        np.testing.assert_array_equal(found, SAMPLES[position])
    rows = read(FORMS[name]).rows(torch.as_tensor(index))
    for found, position in zip(contents(rows), index, strict=True):
        np.testing.assert_array_equal(found, SAMPLES[position])


@pytest.mark.parametrize("name", FORMS)
def test_some_of_some_samples_are_those_at_the_positions_on_any_device(name):
    first, second = torch.tensor([4, 1, 3, 0]), torch.tensor([2, 0])
    rows = read(FORMS[name]).rows(first).rows(second).to(torch.device("cpu"))
    assert rows.lengths.tolist() == [len(SAMPLES[3]), len(SAMPLES[4])]
    for found, position in zip(contents(rows), (3, 4), strict=True):
        np.testing.assert_array_equal(found, SAMPLES[position])


def test_padding_is_zero_and_marked_as_none_whatever_it_holds():
    array, _, mask = padded(SAMPLES, fill=np.inf)
    for _, tokens, real in read((array, mask)).chunks():
        assert bool((tokens[~real] == 0).all())
        assert bool(real.any(1).all())


def test_tokens_that_are_real_may_be_the_last():
    array, _, mask = padded(SAMPLES)
    short = np.flatnonzero(~mask.all(1))
    found = contents(read((array[short, ::-1].copy(), mask[short, ::-1].copy())))
    for got, position in zip(found, short, strict=True):
        np.testing.assert_array_equal(got, SAMPLES[position][::-1])


def test_changes_of_tokens_follow_one_another_and_leave_padding_zero():
    array, _, mask = padded(SAMPLES, fill=np.inf)
    samples = read((array, mask))
    changed = samples.mapped(lambda tokens: tokens + 1).mapped(lambda tokens: 3 * tokens)
    for found, sample in zip(contents(changed), SAMPLES, strict=True):
        np.testing.assert_allclose(found, 3 * (sample + 1))
    for _, tokens, real in changed.chunks():
        assert bool((tokens[~real] == 0).all())
    torch.testing.assert_close(draw_tokens(changed, 5, seed=0), 3 * (draw_tokens(samples, 5, seed=0) + 1))


def test_some_changed_samples_are_those_at_the_positions():
    index = torch.tensor([5, 0, 17])
    changed = read(SAMPLES).mapped(lambda tokens: tokens + 1).rows(index).to(torch.device("cpu"))
    assert changed.lengths.tolist() == [len(SAMPLES[position]) for position in index]
    for found, position in zip(contents(changed), index, strict=True):
        np.testing.assert_array_equal(found, SAMPLES[position] + 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.uint32])
def test_a_mask_of_zeros_and_ones_is_that_of_booleans(dtype):
    array, _, mask = padded(SAMPLES, fill=np.nan)
    mask[0] = np.arange(mask.shape[1]) == 1  # which no length says
    found = contents(read((array, torch.as_tensor(mask).to(dtype))))
    for tokens, expected in zip(found, [SAMPLES[0][1:2], *SAMPLES[1:]], strict=True):
        np.testing.assert_array_equal(tokens, expected)
    with pytest.raises(ValueError, match=r"or of integers 0 and 1, got torch\.int32"):
        read((array, 2 * torch.as_tensor(mask).int()))


def test_two_dimensional_data_are_samples_of_one_token():
    X = np.random.default_rng(0).normal(size=(6, 3))
    samples = read(X)
    assert samples.lengths.tolist() == [1] * 6
    np.testing.assert_array_equal(np.concatenate(contents(samples)), X)


def test_two_dimensional_tensors_are_read_whatever_their_kind():
    X = torch.arange(6.0).view(3, 2)
    for given in (X.clone().requires_grad_(), X.bfloat16(), X.half(), X.double()):
        samples = read(given)
        assert samples.lengths.tolist() == [1, 1, 1]
        np.testing.assert_array_equal(np.concatenate(contents(samples)), X)
    assert read(np.zeros((3, 2), dtype=np.float16)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int32])
def test_lengths_are_integers_of_any_size(dtype):
    samples = read((np.ones((2, 3, 1)), np.array([3, 1], dtype)))
    assert [len(tokens) for tokens in contents(samples)] == [3, 1]


def test_samples_of_several_precisions_have_the_finest_of_them():
    single, double = np.array([[0.1, 0.2]], np.float32), np.array([[0.1, 0.3]])
    for X in ([single, double], [double, single], [single.astype(np.float16), single, double]):
        samples = read(X)
        assert samples.dtype == torch.float64
        for found, expected in zip(contents(samples), X, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_the_sample_that_is_not_finite_is_named_whichever_chunk_it_is_in(monkeypatch):
    monkeypatch.setattr("convexformer.preprocessing.sequences.CONFIG", type(CONFIG)(temporary=1))
    with pytest.raises(ValueError, match=r"NaN or infinity, in a token of X\[17\]"):
        read([*SAMPLES[:17], np.full((2, 4), np.nan), *SAMPLES[18:]])


def test_a_series_of_arrays_is_ragged():
    samples = read(pd.Series(SAMPLES))
    assert samples.lengths.tolist() == [len(sample) for sample in SAMPLES]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_half_precision_is_computed_in_single_precision_and_integers_in_double(dtype):
    X = np.arange(24).reshape(2, 4, 3).astype(dtype)
    samples = read(X)
    working = {np.float16: torch.float32, np.float32: torch.float32}.get(dtype, torch.float64)
    assert samples.dtype == working
    np.testing.assert_array_equal(np.stack(contents(samples)), X)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64])
@pytest.mark.parametrize("shape", [(6, 4), (6, 1, 4)])
def test_integers_of_any_size_are_computed_in_double(shape, dtype):
    X = np.arange(24).reshape(shape).astype(dtype)
    samples = read(X)
    assert samples.dtype == torch.float64
    np.testing.assert_array_equal(np.stack(contents(samples)), X.reshape(6, 1, 4))


def test_an_array_in_half_precision_is_not_copied_as_a_whole():
    X = np.zeros((3, 4, 2), dtype=np.float16)
    samples = read(X)
    X[1, 2, 0] = 1.0
    assert contents(samples)[1][2, 0] == 1.0


def test_chunks_hold_all_samples_in_order_and_few_numbers():
    samples = PaddedSequences(torch.zeros(1000, 8, 256))
    rows = [(part.start, part.stop, tokens.numel()) for part, tokens, _ in samples.chunks(256)]
    assert rows[0][0] == 0
    assert rows[-1][1] == 1000
    assert all(before[1] == after[0] for before, after in pairwise(rows))
    assert len(rows) > 1
    assert max(size for *_, size in rows) <= CONFIG.temporary


def test_chunks_on_a_processor_are_smaller_than_on_an_accelerator():
    on_cpu, on_device = (CONFIG.limit(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert (on_cpu, on_device) == (CONFIG.temporary, CONFIG.temporary_on_device)
    assert on_cpu < on_device


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ([np.zeros((2, 3)), np.zeros((0, 3))], r"X\[1\] has no token that is real"),
        ((np.zeros((2, 3, 1)), [3, 0]), r"X\[1\] has no token that is real"),
        ((np.zeros((2, 3, 1)), np.zeros((2, 3), dtype=bool)), r"X\[0\] has no token that is real"),
        ((np.zeros((2, 3, 1)), [3, 4]), r"lengths from 1 to 3.*got 4"),
        ((np.zeros((2, 3, 1)), np.array([3, 4], np.uint64)), r"lengths from 1 to 3.*got 4"),
        ((np.zeros((2, 3, 1)), torch.ones(2, 3).bool().to_sparse()), r"X\[1\] must be a dense tensor"),
        (torch.ones(2, 3, 1).to_sparse(), "X must be a dense tensor"),
        ((np.zeros((2, 3, 1)), [3.0, 2.0]), r"X\[1\] must be lengths, integers of shape \(2,\)"),
        ((np.zeros((2, 3, 1)), np.ones((2, 2), dtype=bool)), r"mask of bool of shape \(2, 3\)"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], r"X\[1\] has tokens of width 4, but X\[0\] of 3"),
        ([np.zeros((2, 3)), np.full((2, 3), np.nan)], r"NaN or infinity, in a token of X\[1\]"),
        (np.zeros((2, 0, 3)), "at least one sample, token and feature"),
        (np.zeros((2, 2, 3, 1)), "2 or 3 dimensions"),
        ((np.zeros((0, 3, 1)), np.zeros(0, dtype=int)), "at least one sample and one feature, got 0 samples"),
        ([np.zeros((2, 0))], "at least one sample and one feature, got 1 samples of 0 features"),
        ([np.zeros((2, 3, 1)), [3, 2]], r"X\[0\] must have shape \(length, n_features\).* is a tuple"),
        ([np.zeros((2, 3)), np.zeros(3)], r"X\[1\] must have shape \(length, n_features\), got \(3,\)"),
        (np.zeros((2, 2, 3), dtype=complex), "real numbers"),
        (np.ma.array(np.zeros((1, 2, 2)), mask=[[[0, 1], [0, 0]]]), "must mask whole tokens"),
        (np.ma.array(np.zeros((1, 2)), mask=[[0, 1]]), "must have shape"),
        ([np.zeros((2, 3)), np.ma.masked_equal(np.eye(2, 3), 1)], r"X\[1\] must have no masked values"),
        (list(np.ma.masked_equal(np.eye(3), 1)), "X must have no masked values"),
        ((np.ma.masked_equal(np.ones((2, 3, 1)), 1), [3, 2]), r"X\[0\] must have no masked values"),
        ((np.zeros((2, 3, 1)), np.ma.masked_equal([3, 2], 2)), r"X\[1\] must have no masked values"),
    ],
)
def test_what_is_no_sample_is_named(X, message):
    with pytest.raises(ValueError, match=message):
        read(X)


def test_tokens_of_another_width_than_in_the_fit_are_refused():
    estimator = BaseEstimator()
    check_sequences(estimator, SAMPLES, reset=True)
    with pytest.raises(ValueError, match="X has 3 features, but BaseEstimator is expecting 4"):
        check_sequences(estimator, ragged_samples(n_features=3), reset=False)


def test_draws_do_not_depend_on_order_repeats_precision_or_sizes_of_weights():
    drawn = draw_tokens(read(SAMPLES), 30, seed=3)
    rng = np.random.default_rng(1)
    shuffled = [SAMPLES[i][rng.permutation(len(SAMPLES[i]))] for i in rng.permutation(len(SAMPLES))]
    for others in (shuffled, shuffled + SAMPLES[:9]):
        torch.testing.assert_close(draw_tokens(read(others), 30, seed=3), drawn, rtol=0, atol=0)
    weight = np.where(np.arange(len(SAMPLES)) < 9, 2.0, 0.5)
    torch.testing.assert_close(draw_tokens(read(SAMPLES), 30, 3, weight), drawn, rtol=0, atol=0)
    single = [sample.astype(np.float32) for sample in SAMPLES]
    torch.testing.assert_close(draw_tokens(read(single), 30, seed=3), drawn.float(), rtol=0, atol=0)


def test_tokens_that_differ_beyond_single_precision_are_drawn_each():
    offset = [sample + 1e8 for sample in SAMPLES]  # numbers of single precision are 8 apart
    drawn = draw_tokens(read(offset), 1000, seed=3)
    assert sorted(drawn.tolist()) == sorted(np.concatenate(offset).tolist())
    shuffled = [sample[::-1].copy() for sample in offset[::-1]]
    for others in (shuffled, shuffled + offset[:9]):
        torch.testing.assert_close(draw_tokens(read(others), 30, seed=3), drawn[:30], rtol=0, atol=0)


def test_draws_leave_out_samples_of_weight_zero_and_differ_by_seed():
    weight = (np.arange(len(SAMPLES)) < 5).astype(float)
    drawn = draw_tokens(read(SAMPLES), 1000, 0, weight)
    expected = np.concatenate(SAMPLES[:5])
    assert sorted(drawn.tolist()) == sorted(expected.tolist())
    assert not torch.equal(draw_tokens(read(SAMPLES), 20, 0), draw_tokens(read(SAMPLES), 20, 1))


def test_draws_leave_out_samples_of_weight_zero_whichever_chunk_they_are_in(monkeypatch):
    weight = (np.arange(len(SAMPLES)) % 3).astype(float)
    expected = draw_tokens(read([sample for sample, own in zip(SAMPLES, weight, strict=True) if own]), 1000, 0)
    monkeypatch.setattr("convexformer.preprocessing.sequences.CONFIG", type(CONFIG)(temporary=1))
    torch.testing.assert_close(draw_tokens(read(SAMPLES), 1000, 0, weight), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_has_one_sign_and_is_drawn_by_some_seeds_alone(dtype):
    tokens = torch.arange(20, dtype=dtype)[:, None, None]
    samples = PaddedSequences(torch.cat([tokens, -tokens[:1]]))
    assert len(draw_tokens(samples, 100, seed=0)) == 20
    first = [draw_tokens(samples, 1, seed).item() for seed in range(100)]
    assert 0 < first.count(0.0) < 50


def test_each_token_is_as_likely_to_be_drawn():
    samples = PaddedSequences(torch.arange(20.0).reshape(5, 4, 1))
    counts = np.zeros(20)
    for seed in range(2000):
        counts[draw_tokens(samples, 5, seed).flatten().int().numpy()] += 1
    # Each count is binomial with mean 500 and standard deviation 19.4.
    assert np.abs(counts - 500).max() < 5 * 19.4

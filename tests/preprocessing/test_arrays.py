"""Padding and patches: identities, and errors that name the argument."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from convexformer import ConvexAttentionRegressor, image_patches, pad_sequences
from convexformer.datasets import load_digit_tokens

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@settings(deadline=None, derandomize=True, database=None)
@given(lengths=lengths, width=st.integers(1, 4), extra=st.integers(0, 3))
def test_padding_keeps_every_row_and_adds_zero_rows(lengths, width, extra):
    rng = np.random.default_rng(0)
    sequences = [rng.normal(size=(length, width)) for length in lengths]
    padded = pad_sequences(sequences, n_tokens=max(lengths) + extra)
    assert padded.shape == (len(lengths), max(lengths) + extra, width)
    for row, sequence in zip(padded, sequences, strict=True):
        np.testing.assert_array_equal(row[: len(sequence)], sequence)
        assert (row[len(sequence) :] == 0).all()


def test_padding_of_equal_lengths_is_the_stack():
    sequences = np.random.default_rng(0).normal(size=(4, 3, 2))
    np.testing.assert_array_equal(pad_sequences(list(sequences)), sequences)


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ((np.float32, np.float32), np.float32),
        ((np.float32, np.float64), np.float64),
        ((np.int64, np.int64), np.float64),
        ((np.int8, np.float32), np.float32),
    ],
)
def test_padding_keeps_the_common_floating_dtype(dtypes, wanted):
    sequences = [np.ones((length, 2), dtype) for length, dtype in zip((1, 3), dtypes, strict=True)]
    assert pad_sequences(sequences).dtype == wanted


def test_padding_does_not_share_memory_with_its_input():
    sequence = np.ones((2, 2))
    pad_sequences([sequence])[:] = 5
    assert (sequence == 1).all()


@pytest.mark.parametrize(
    ("sequences", "n_tokens", "message"),
    [
        ([], None, "sequences"),
        ([[[1.0]], [1.0]], None, r"sequences\[1\]"),
        ([np.ones((2, 2)), np.ones((2, 3))], None, r"sequences.*\[2, 3\]"),
        ([np.ones((4, 2))], 3, "n_tokens=3.*4"),
        ([np.ones((4, 2))], 10**30, "n_tokens must be small enough"),
        ([np.ones((1, 2)), np.ma.masked_equal(np.eye(2), 1)], None, r"sequences\[1\] must have no masked values"),
    ],
)
def test_padding_errors_name_the_argument(sequences, n_tokens, message):
    with pytest.raises(ValueError, match=message):
        pad_sequences(sequences, n_tokens)


@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
def test_padding_leaves_the_optimum_and_the_predictions_of_a_linear_model_unchanged(penalty):
    # Sequences of true differing lengths, padded to the longest and beyond it.
    rng = np.random.default_rng(0)
    sequences = [rng.normal(size=(rng.integers(2, 5), 3)) for _ in range(40)]
    y = np.array([sequence[0] @ [1.0, -1.0, 0.5] for sequence in sequences])
    y = np.column_stack([y, [sequence[1].sum() for sequence in sequences]])
    short, long = pad_sequences(sequences), pad_sequences(sequences, n_tokens=8)
    models = [ConvexAttentionRegressor(0.05, penalty=penalty, tol=1e-10).fit(X, y) for X in (short, long)]
    assert models[1].certificate_.primal == pytest.approx(models[0].certificate_.primal, rel=1e-9)
    np.testing.assert_allclose(models[1].predict(long), models[0].predict(short), atol=1e-4)
    assert (models[1].token_norms_[4:] == 0).all()
    assert (models[0].token_norms_[:2] > 0).all()


@settings(deadline=None, derandomize=True, database=None)
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), patch=st.integers(1, 4), n=st.integers(1, 3))
def test_patches_are_the_blocks_of_the_image_row_by_row(rows, columns, patch, n):
    images = np.random.default_rng(0).normal(size=(n, rows * patch, columns * patch))
    tokens = image_patches(images, patch)
    assert tokens.shape == (n, rows * columns, patch**2)
    for k in range(rows * columns):
        i, j = divmod(k, columns)
        block = images[:, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch]
        np.testing.assert_array_equal(tokens[:, k], block.reshape(n, -1))


def test_a_patch_of_one_pixel_gives_pixels_and_a_patch_of_the_whole_image_gives_one_token():
    images = np.arange(32.0).reshape(2, 4, 4)
    np.testing.assert_array_equal(image_patches(images, 1)[:, :, 0], images.reshape(2, 16))
    np.testing.assert_array_equal(image_patches(images, 4)[:, 0], images.reshape(2, 16))


@pytest.mark.parametrize(
    ("images", "patch_size", "message"),
    [
        (np.zeros((4, 4)), 2, "images.*n_samples"),
        (np.zeros((1, 4, 4, 3)), 2, "images.*n_samples"),
        (np.zeros((1, 4, 6)), 4, "patch_size.*4 x 6"),
        (np.zeros((1, 4, 4)), 0, "patch_size"),
        (np.zeros((1, 4, 4)), -2, "patch_size"),
    ],
)
def test_patch_errors_name_the_argument(images, patch_size, message):
    with pytest.raises(ValueError, match=message):
        image_patches(images, patch_size)


def test_digit_tokens_are_the_scaled_digits():
    tokens, labels = load_digit_tokens(patch_size=4)
    digits = load_digits()
    assert tokens.shape == (1797, 4, 16)
    np.testing.assert_array_equal(labels, digits.target)
    np.testing.assert_array_equal(tokens[:, 0], digits.images[:, :4, :4].reshape(-1, 16) / 16)


@pytest.mark.parametrize("images", [1j * np.ones((1, 2, 2)), np.full((1, 2, 2), "1")])
def test_patches_are_of_real_numbers(images):
    with pytest.raises(ValueError, match="images must hold real numbers"):
        image_patches(images, 2)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.ma.masked_equal(np.eye(4)[None], 1), "images must have no masked values"),
        ([[[1, 2], [3]]], r"images must be an array of shape \(n_samples, height, width\)"),
        (np.zeros((0, 4, 4)), r"at least one of each, got \(0, 4, 4\)"),
        (np.zeros((2, 0, 4)), r"at least one of each, got \(2, 0, 4\)"),
        (np.zeros((2, 3, 4, 4)), r"got \(2, 3, 4, 4\); of several channels .* join the patches along axis 2"),
        (torch.ones(1, 2, 2, dtype=torch.bfloat16), "images must not be bfloat16"),
    ],
)
def test_images_that_cannot_be_cut(images, message):
    with pytest.raises(ValueError, match=message):
        image_patches(images, 2)


def test_tensors_with_gradients_become_arrays():
    images = torch.arange(32.0).view(2, 4, 4).requires_grad_()
    np.testing.assert_array_equal(image_patches(images, 2), image_patches(images.detach().numpy(), 2))
    np.testing.assert_array_equal(pad_sequences([images[0], images[1]]), images.detach())

"""Samples of differing lengths, in all the forms that probes take."""

import numpy as np
import torch


def ragged_samples(n_samples=40, n_features=4, longest=7, seed=0):
    """Samples of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(rng.integers(1, longest + 1), n_features)) for _ in range(n_samples)]


def padded(samples, fill=0.0):
    """The same in one array, with lengths and a mask."""
    lengths = np.array([len(sample) for sample in samples])
    array = np.full((len(samples), lengths.max() + 2, samples[0].shape[1]), fill)
    for row, sample in zip(array, samples, strict=True):
        row[: len(sample)] = sample
    return array, lengths, np.arange(array.shape[1]) < lengths[:, None]


def forms(samples):
    """Every form of the same samples, by name."""
    array, lengths, mask = padded(samples)
    empty, _, _ = padded(samples, fill=np.nan)  # what is padding is never read
    return {
        "list": samples,
        "objects": np.array([*samples, None], dtype=object)[:-1],
        "lengths": (array, lengths),
        "list of lengths": (array, lengths.tolist()),
        "mask": (empty, mask),
        "masked array": np.ma.array(array, mask=np.broadcast_to(~mask[..., None], array.shape)),
        "tensors": [torch.as_tensor(sample) for sample in samples],
        "nested": torch.nested.nested_tensor([torch.as_tensor(sample) for sample in samples], layout=torch.jagged),
    }


def signal(samples):
    """A target that the mean of the tokens does not determine."""
    return np.array([np.maximum(sample[:, 0], 0.0).mean() - np.tanh(sample[:, 1]).max() for sample in samples])

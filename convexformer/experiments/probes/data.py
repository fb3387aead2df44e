"""Data sets of the experiment on probes: samples of any number of tokens with labels, and their splits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convexformer.datasets import load_attention_activations, load_digit_tokens, load_embeddings
from convexformer.experiments.corpora import read_labelled_sentences

from .series import load_series, windows
from .settings import DEFAULT_DATASETS, SMALL_DATASETS, ProbesSettings

_EMBEDDINGS = (".npz", ".safetensors", ".parquet")
_SEPARATOR = " [SEP] "


class Part(NamedTuple):
    """Samples of a part of a split: ``tokens`` (N, n, d), zero where ``mask`` (N, n) is False, and ``labels`` (N,)."""

    tokens: Tensor
    mask: Tensor
    labels: NDArray[np.int64]

    @property
    def samples(self) -> tuple[Tensor, Tensor]:
        """As estimators take them."""
        return self.tokens, self.mask


class Split(NamedTuple):
    """The parts of a split, tokens standardised by the moments of ``fit``, and how many classes there are."""

    fit: Part
    validation: Part
    test: Part
    n_classes: int


@dataclass(frozen=True, eq=False)
class ProbeData:
    """Samples with labels.

    Attributes
    ----------
    name : str
        What tables call it.
    samples : list of ndarray of shape (length, d)
        The tokens.
    labels : ndarray of int of shape (N,)
        Positions in ``classes``.
    classes : list of str
        The labels.
    has_first : bool
        Whether the first token of each sample is one that stands for all, as ``[CLS]``.
    sha256 : str
        Of tokens and labels.
    """

    name: str
    samples: list[NDArray[np.floating]]
    labels: NDArray[np.int64]
    classes: list[str]
    has_first: bool
    sha256: str

    def order(self, seed: int) -> NDArray[np.int64]:
        """An order of the samples in which every beginning has about the shares of labels of all."""
        return stratified_order(self.labels, seed)

    def test_index(self, seed: int, settings: ProbesSettings) -> NDArray[np.int64]:
        """Positions of the test samples, increasing; they do not depend on the budget."""
        return np.sort(self.order(seed)[: round(settings.test_share * len(self.labels))])

    def training_sizes(self, settings: ProbesSettings) -> list[int | None]:
        """Labels of each training part; None stands for all."""
        largest = len(self.labels) - round(settings.test_share * len(self.labels))
        return [*(size for size in sorted(settings.budgets) if size < largest), None]

    def split(self, size: int | None, seed: int, settings: ProbesSettings) -> Split:
        """The parts of a split with so many labels to fit and choose.

        Raises
        ------
        ValueError
            If the part to fit has one class alone.
        """
        order, n_test = self.order(seed), round(settings.test_share * len(self.labels))
        training = order[n_test:][:size]
        n_validation = round(settings.validation_share * len(training))
        validation, fit = training[:n_validation], training[n_validation:]
        if len(np.unique(self.labels[fit])) < 2:
            raise ValueError(
                f"budgets: {len(fit)} samples of {self.name} to fit have one class alone; ask for larger budgets"
            )
        rows = np.concatenate([self.samples[i] for i in fit]).astype(np.float64)
        mean, scale = rows.mean(0), rows.std(0)
        scale[scale == 0] = 1.0
        of_test = self.test_index(seed, settings)
        first, second, third = (self._part(index, mean, scale) for index in (fit, validation, of_test))
        return Split(first, second, third, len(self.classes))

    def _part(self, index: NDArray[np.int64], mean: NDArray, scale: NDArray) -> Part:
        lengths = np.array([len(self.samples[i]) for i in index])
        mask = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.zeros((*mask.shape, len(mean)), dtype=np.float32)
        tokens[mask] = (np.concatenate([self.samples[i] for i in index]) - mean) / scale
        return Part(torch.as_tensor(tokens), torch.as_tensor(mask), self.labels[index])


def stratified_order(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """A random order in which every beginning has about the shares of labels of all.

    Parameters
    ----------
    labels : ndarray of int of shape (N,)
        The labels.
    seed : int
        Of the order.

    Returns
    -------
    ndarray of int of shape (N,)

    Examples
    --------
    >>> labels = np.array([0] * 6 + [1] * 3)
    >>> np.bincount(labels[stratified_order(labels, 0)[:3]]).tolist()
    [2, 1]
    """
    stream = np.random.default_rng(seed)
    places = np.empty(len(labels))
    for label in np.unique(labels):
        members = stream.permutation(np.flatnonzero(labels == label))
        places[members] = (np.arange(len(members)) + stream.random(len(members))) / len(members)
    return np.argsort(places, kind="stable")


def load_all(settings: ProbesSettings, cache: Path) -> tuple[list[ProbeData], list[str]]:
    """Read all data sets.

    Parameters
    ----------
    settings : ProbesSettings
        Which, and their sizes.
    cache : Path
        Folder that keeps the activations of texts.

    Returns
    -------
    data : list of ProbeData
    left_out : list of str
        Why a default one is not there.

    Raises
    ------
    ModuleNotFoundError
        If the package of a data set that was asked for is not installed.
    """
    data, left_out = [], []
    for source in settings.datasets:
        try:
            data.append(load_data(source, settings, cache))
        except ModuleNotFoundError as error:
            if settings.datasets not in (DEFAULT_DATASETS, SMALL_DATASETS):
                raise
            left_out.append(f"{source}: {error}")
    return data, left_out


def load_data(source: str, settings: ProbesSettings, cache: Path) -> ProbeData:
    """Read a data set; see ``ProbesSettings``.

    Parameters
    ----------
    source : str
        One of ``datasets``.
    settings : ProbesSettings
        Sizes and encoder.
    cache : Path
        Folder that keeps the activations of texts.

    Returns
    -------
    ProbeData

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ModuleNotFoundError
        If a package is not installed.
    ValueError
        If the source is not as described, or has one class alone.
    """
    kind, _, name = source.partition(":")
    if source == "digits":
        tokens, targets = load_digit_tokens()
        return _data("digits", list(tokens), targets, settings, has_first=False)
    if kind == "aeon":
        series, labels = load_series(name)
        return _data(name, windows(series, settings.window), np.array(labels), settings, has_first=False)
    if source.endswith(_EMBEDDINGS):
        return _stored(source, settings)
    return _encoded(source, settings, cache)


def _stored(source: str, settings: ProbesSettings) -> ProbeData:
    """Embeddings of a file."""
    found = load_embeddings(source, labels=settings.label_entry)
    samples, lengths = found.sequences, found.lengths
    if isinstance(samples, tuple):
        samples = samples[0]
    rows = [sample[:length] for sample, length in zip(samples, lengths, strict=True)]
    assert found.labels is not None
    return _data(Path(source).stem, rows, found.labels, settings, has_first=True)


def _encoded(source: str, settings: ProbesSettings, cache: Path) -> ProbeData:
    """Texts through the frozen encoder; those that are not used are not encoded."""
    texts, names = read_labelled_sentences(source)
    index = _chosen(np.array(names), settings, source)
    chosen = [texts[i].replace("\t", _SEPARATOR) for i in index]
    activations = load_attention_activations(
        chosen,
        model=settings.encoder,
        layer=settings.layer,
        n_tokens=settings.n_tokens,
        site="layer",
        short="pad",
        cache=cache,
    )
    rows = [tokens[:length] for tokens, length in zip(activations.outputs, activations.lengths, strict=True)]
    return _data(_name(source), rows, np.array(names)[index], settings, has_first=True)


def _name(source: str) -> str:
    kind, _, packages = source.partition(":")
    if kind == "documentation":
        return f"documentation ({packages.replace(',', ' / ')})"
    return " / ".join(Path(path).stem for path in source.split(","))


def _chosen(labels: NDArray, settings: ProbesSettings, source: str) -> NDArray[np.int64]:
    """Positions of the samples to use, in the order in which they come."""
    classes, index = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"datasets must have two labels or more, got {source!r} with {classes.tolist()}")
    return np.sort(stratified_order(index, 0)[: settings.n_samples])


def _data(
    name: str, samples: list[NDArray[np.floating]], labels: NDArray, settings: ProbesSettings, *, has_first: bool
) -> ProbeData:
    chosen = _chosen(labels, settings, name)
    samples = [samples[i] for i in chosen]
    classes, index = np.unique(labels[chosen], return_inverse=True)
    digest = hashlib.sha256(index.astype(np.int64).tobytes())
    for sample in samples:
        digest.update(np.ascontiguousarray(sample, dtype=np.float32).tobytes())
    return ProbeData(name, samples, index.astype(np.int64), [str(c) for c in classes], has_first, digest.hexdigest())

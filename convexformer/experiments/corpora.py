"""Labelled sentences as padded tokens, and their splits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from torch import Tensor

from convexformer.datasets import load_documentation_sentences, load_word_vectors, make_word_vectors
from convexformer.datasets._lines import text_lines
from convexformer.experiments.settings import ExperimentSettings, check_each
from convexformer.unfolded import padding_mask
from convexformer.validation import check_integers, check_positive
from convexformer_solvers.draws import standard_normal
from convexformer_solvers.validation import check_counts

_DOCUMENTATION = "documentation"


@dataclass(frozen=True)
class CorpusSettings(ExperimentSettings):
    """What an experiment says of its corpora; ``UnfoldedSettings`` describes the fields."""

    corpora: tuple[str, ...] = ("documentation:numpy,scipy,sklearn", "documentation:torch,matplotlib")
    vectors: str | None = None
    n_features: int = 50
    n_sentences: int = 4000
    n_tokens: int = 32
    token_norm: float = 2.0

    def __post_init__(self) -> None:
        check_each(lambda name: isinstance(name, str), "names or paths", corpora=self.corpora)
        check_counts(n_features=self.n_features, n_tokens=self.n_tokens)
        check_integers(20, n_sentences=self.n_sentences)
        check_positive(token_norm=self.token_norm)


class Part(NamedTuple):
    """Sentences of a part of a split: ``tokens`` of shape (N, n, d), one-hot ``y`` and ``labels`` of shape (N,)."""

    tokens: Tensor
    y: Tensor
    labels: Tensor

    def to(self, device: str | None) -> Part:
        """The part on a device; without one, as it is."""
        return Part(*(array.to(device) for array in self))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sentences with labels.

    Attributes
    ----------
    name : str
        What figures call it.
    texts : list of str
        The sentences.
    tokens : ndarray of float32 of shape (N, n, d)
        Word vectors, short sentences filled up with zero rows.
    labels : ndarray of int of shape (N,)
        Positions in ``classes``.
    classes : list of str
        The labels.
    sha256 : str
        Of the sentences and labels, and of their word vectors where these are of a file.
    """

    name: str
    texts: list[str]
    tokens: NDArray[np.float32]
    labels: NDArray[np.int64]
    classes: list[str]
    sha256: str

    def split_index(self, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Positions of training, validation and test sentences."""
        train, rest = train_test_split(
            np.arange(len(self.labels)), train_size=0.6, stratify=self.labels, random_state=seed
        )
        validation, test = train_test_split(rest, train_size=0.5, stratify=self.labels[rest], random_state=seed)
        return train, validation, test

    def split(self, seed: int) -> tuple[Part, Part, Part]:
        """Training, validation and test sentences: 60, 20 and 20%, as many of each label in each part."""
        one_hot = np.eye(len(self.classes), dtype=np.float32)
        parts = [
            Part(*(torch.as_tensor(array[index]) for array in (self.tokens, one_hot[self.labels], self.labels)))
            for index in self.split_index(seed)
        ]
        return parts[0], parts[1], parts[2]


def load_corpus(source: str, settings: CorpusSettings) -> Corpus:
    """Read a corpus and embed it.

    Parameters
    ----------
    source : str
        ``"documentation:A,B"``, text files ``"PATH,PATH"``, or a ``.tsv`` file; see ``UnfoldedSettings``.
    settings : CorpusSettings
        Sizes and word vectors.

    Returns
    -------
    Corpus

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ValueError
        If there are not two labels, or not enough sentences of each.
    """
    sentences, labels = read_labelled_sentences(source)
    classes, index = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"corpora must have sentences of two labels or more, got {source!r} with {classes.tolist()}")
    if settings.vectors is None:
        vectors = make_word_vectors(sentences, settings.n_features)
    else:
        vectors = load_word_vectors(settings.vectors)
    tokens = vectors.embed(sentences, settings.n_tokens).astype(np.float32)
    pairs = np.flatnonzero((tokens != 0).any(-1).sum(1) >= 2)  # of one known word there is no pair, hence no energy
    chosen = pairs[_balanced(index[pairs], len(classes), settings.n_sentences // len(classes), source)]
    texts, index, tokens = [sentences[i] for i in chosen], index[chosen], tokens[chosen]
    digest = hashlib.sha256("\n".join(f"{i}\t{text}" for i, text in zip(index, texts, strict=True)).encode())
    if settings.vectors is not None:  # vectors that are made follow from the sentences
        digest.update(tokens.tobytes())
    real = (tokens != 0).any(-1)
    tokens *= settings.token_norm / np.sqrt(np.square(tokens[real]).sum(-1).mean())
    return Corpus(_name(source), texts, tokens, index.astype(np.int64), classes.tolist(), digest.hexdigest())


def deviation_of(tokens: Tensor) -> float:
    """Standard deviation of the features of real tokens."""
    return float(tokens[padding_mask(tokens)].std())


def with_noise(tokens: Tensor, present: Tensor, deviation: float, generator: torch.Generator | None = None) -> Tensor:
    """Real tokens with Gaussian noise; without a generator, from torch's global one."""
    if deviation == 0:
        return tokens
    noise = standard_normal(tokens.shape, generator or torch.default_generator).to(tokens)
    return tokens + deviation * noise * present[..., None]


def read_labelled_sentences(source: str) -> tuple[list[str], Sequence[str]]:
    """Sentences and their labels.

    Parameters
    ----------
    source : str
        ``"documentation:A,B"``, text files ``"PATH,PATH"``, or a ``.tsv`` file; see ``UnfoldedSettings``.

    Returns
    -------
    sentences, labels : list of str

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ValueError
        If a file is not text in UTF-8, or a line of a ``.tsv`` file has no tab.
    """
    kind, _, packages = source.partition(":")
    if kind == _DOCUMENTATION:
        sentences, labels = load_documentation_sentences(packages=packages.split(","))
        return sentences, labels.tolist()
    if source.endswith(".tsv"):
        rows = [line.partition("\t") for line in _lines(source)]
        if not all(tab for _, tab, _ in rows):
            raise ValueError(f"{source} must have a label, a tab and a sentence on each line")
        return [text for _, _, text in rows], [label for label, _, _ in rows]
    paths = [Path(path) for path in source.split(",")]
    texts = [(line, path.name) for path in paths for line in _lines(path)]
    return [text for text, _ in texts], [label for _, label in texts]


def _lines(path: str | Path) -> list[str]:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is no file; give text files, one for each label, a .tsv file or "
            "'documentation:PACKAGE,PACKAGE'"
        )
    lines = text_lines(path, f"corpora must be text files in UTF-8, and {path} is none")
    return [line for line in lines if line.strip()]


def _name(source: str) -> str:
    """A corpus in few letters."""
    if source.startswith(_DOCUMENTATION):
        return source.partition(":")[2].replace(",", " / ")
    return " / ".join(Path(path).name for path in source.split(","))


def _balanced(index: NDArray[np.int64], n_labels: int, count: int, source: str) -> NDArray[np.int64]:
    """Positions of the first so many sentences of each label, in an order that the labels do not follow."""
    members = [np.flatnonzero(index == label) for label in range(n_labels)]
    least = min(map(len, members))
    if least < count:
        raise ValueError(f"n_sentences needs {count} sentences of each label of {source!r}, but one has {least}")
    stream = np.random.default_rng(0)
    return np.sort(np.concatenate([stream.permutation(positions)[:count] for positions in members]))

"""Word vectors: read from a file, or made of sentences; and sentences as padded tokens."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, diags_array
from sklearn.decomposition import TruncatedSVD

from convexformer.preprocessing import pad_sequences
from convexformer.validation import check_optional_counts
from convexformer_solvers.io.npz import read_arrays
from convexformer_solvers.validation import check_counts

from ._lines import text_lines
from ._sentences import check_texts


@dataclass(frozen=True, eq=False)
class WordVectors:
    """A vector for each of some words.

    Parameters
    ----------
    words : sequence of str
        The words, in lower case.
    vectors : ndarray of shape (n_words, n_features)
        Their vectors.

    Raises
    ------
    TypeError
        If a word is no str, or the vectors are no array.
    ValueError
        If there are not as many vectors as words, or one is not of finite real numbers.

    Examples
    --------
    >>> vectors = WordVectors(["good", "bad"], np.array([[1.0], [-1.0]]))
    >>> vectors.embed(["Good, not bad", "bad"])[:, :, 0]
    array([[ 1., -1.],
           [-1.,  0.]])
    """

    words: Sequence[str]
    vectors: NDArray[np.floating]
    _index: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.vectors, np.ndarray):
            raise TypeError(f"vectors must be an array, got {type(self.vectors).__name__}; give np.asarray(vectors)")
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.words):
            raise ValueError(
                f"vectors must have shape ({len(self.words)}, n_features), one row per word, got {self.vectors.shape}"
            )
        if self.vectors.dtype.kind not in "fiu":
            raise ValueError(f"vectors must hold real numbers, got {self.vectors.dtype}")
        finite = np.isfinite(self.vectors).all(1)
        if not finite.all():
            raise ValueError(f"vectors must be finite, got others for the word {self.words[int(finite.argmin())]!r}")
        wrong = next((word for word in self.words if not isinstance(word, str)), None)
        if wrong is not None:
            raise TypeError(f"words must be str, got {type(wrong).__name__}: {wrong!r}")
        normal = [unicodedata.normalize("NFC", word) for word in self.words]  # as split_words gives them
        object.__setattr__(self, "_index", {word: i for i, word in reversed(list(enumerate(normal)))})

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        return f"WordVectors({len(self)} words, {self.vectors.shape[1]} features)"

    def embed(self, sentences: Iterable[str], n_tokens: int | None = None) -> NDArray[np.floating]:
        """Vectors of the words of sentences, as samples of tokens.

        Sentences are put in lower case and split into words and marks; those without a vector are left out. A sentence
        without any known word is one zero token.

        Parameters
        ----------
        sentences : iterable of str
            The sentences.
        n_tokens : int, optional
            Tokens of each sample: longer sentences are cut. Default: the most words of any of them.

        Returns
        -------
        ndarray of shape (n_sentences, n_tokens, n_features)
            Short sentences are filled up with zero rows, as by ``pad_sequences``.

        Raises
        ------
        TypeError
            If `sentences` is one str, or holds anything else than str.
        ValueError
            If `n_tokens` is no positive integer, or there is no sentence.
        """
        check_optional_counts(n_tokens=n_tokens)
        texts = check_texts(sentences, "sentences", "an iterable of str", "sentence")
        known = [[self._index[word] for word in split_words(text) if word in self._index] for text in texts]
        width = self.vectors.shape[1]
        tokens = [self.vectors[ids[:n_tokens]] if ids else np.zeros((1, width), self.vectors.dtype) for ids in known]
        return pad_sequences(tokens, n_tokens)


def split_words(sentence: str) -> list[str]:
    """Words and marks of a sentence, in lower case; accents and vowel signs belong to their letters.

    Examples
    --------
    >>> split_words("It's good, isn't it?")
    ["it's", 'good', ',', "isn't", 'it', '?']
    >>> split_words("हिन्दी में")
    ['हिन्दी', 'में']
    """
    return _pattern().findall(unicodedata.normalize("NFC", sentence.lower()))


@cache
def _pattern() -> re.Pattern[str]:
    """Words and marks; of characters that combine with a letter, regular expressions of Python know nothing."""
    combining = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c)[0] == "M")
    word = rf"\w+(?:[{combining}]\w*)*"
    return re.compile(rf"{word}(?:'{word})?|[^\w\s]")


def load_word_vectors(path: str | os.PathLike[str], n_words: int | None = None) -> WordVectors:
    r"""Read word vectors from a file.

    Parameters
    ----------
    path : path-like
        Text in UTF-8 with a word and its numbers on each line, separated by spaces, as GloVe and word2vec have it; or
        an ``.npz`` file with arrays ``words`` and ``vectors``. A first line of two integers, as word2vec writes it,
        must be the number of words and the number of numbers for each. Words but the first may contain spaces, as a few
        of GloVe do.
    n_words : int, optional
        How many of the first words to read; files have the most frequent first. Default: all.

    Returns
    -------
    WordVectors

    Raises
    ------
    TypeError
        If `path` is no path.
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is not as described, for example truncated.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "vectors.txt"
    ...     _ = path.write_text("good 1.0 0.5\nbad -1.0 0.5\n")
    ...     load_word_vectors(path).vectors.shape
    (2, 2)
    """
    check_optional_counts(n_words=n_words)
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the path of a file, got {type(path).__name__}")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"path={os.fspath(path)!r} is no file of word vectors")
    if zipfile.is_zipfile(path):
        try:
            arrays = read_arrays(path)
        except ValueError as error:
            raise ValueError(f"{path} must hold the plain arrays words and vectors: {error}") from error
        if not {"words", "vectors"} <= set(arrays):
            raise ValueError(f"{path} must hold the arrays words and vectors, got {sorted(arrays)}")
        words, vectors = arrays["words"][:n_words].tolist(), arrays["vectors"][:n_words]
    else:
        words, vectors = _read_text(path, n_words)
    try:
        return WordVectors(words, vectors)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold words and their vectors: {error}") from error


def _read_text(path: str | os.PathLike[str], n_words: int | None) -> tuple[list[str], NDArray[np.float32]]:
    """Words and vectors of lines that begin with the word, as of GloVe, and maybe their sizes first, as of word2vec."""
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    sizes: tuple[int, int] | None = None
    fault = f"{path} must be word vectors as text in UTF-8, or an .npz file with arrays words and vectors"
    for number, line in enumerate(text_lines(path, fault), start=1):
        word, *numbers = line.rstrip().split(" ")
        if number == 1 and len(numbers) == 1 and word.isdecimal() and numbers[0].isdecimal():
            sizes = int(word), int(numbers[0])  # which word2vec writes first
            continue
        extra = len(numbers) - len(rows[0]) if rows else 0
        # A few words of GloVe contain spaces; nothing between two spaces is no word.
        if extra > 0 and all(numbers[:extra]) and not _is_number(numbers[extra - 1]):
            word, numbers = " ".join([word, *numbers[:extra]]), numbers[extra:]
        if not numbers:
            raise ValueError(f"{path}, line {number} must be a word and numbers, got no numbers")
        try:
            rows.append(np.array(numbers, dtype=np.float32))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} must be a word and numbers: {error}") from error
        words.append(word)
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(f"{path}, line {number} must have {len(rows[0])} numbers, got {len(rows[-1])}")
        if len(words) == n_words:
            break
    if not words:
        raise ValueError(f"{path} must hold at least one word with its numbers, got none")
    found = len(words), len(rows[0])
    if sizes is not None and (found[1] != sizes[1] or (found[0] != sizes[0] and found[0] != n_words)):
        raise ValueError(
            f"{path} must hold {sizes[0]} words with {sizes[1]} numbers each by its first line, got {found[0]} with "
            f"{found[1]}; is it truncated? Copy it again"
        )
    return words, np.stack(rows)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def make_word_vectors(
    sentences: Iterable[str], n_features: int = 50, *, window: int = 5, min_count: int = 5
) -> WordVectors:
    r"""Make word vectors of sentences alone, by which any corpus can be used offline.

    They are :math:`U \Sigma^{1/2}` of a truncated singular value decomposition of the positive pointwise mutual
    information of words within a window (Levy and Goldberg, "Neural word embedding as implicit matrix factorization",
    2014), scaled so that their root mean square norm is the square root of their width.

    Parameters
    ----------
    sentences : iterable of str
        The corpus.
    n_features : int, default=50
        Width of the vectors.
    window : int, default=5
        Words to each side that count as near.
    min_count : int, default=5
        Least number of times that a word must stand in the corpus.

    Returns
    -------
    WordVectors
        The most frequent words first; the same whenever the sentences are.

    Raises
    ------
    TypeError
        If `sentences` is one str, or holds anything else than str.
    ValueError
        If there are no more than `n_features` words of that count, or none of them stand near each other more often
        than by chance.

    Examples
    --------
    >>> from convexformer.datasets import load_documentation_sentences
    >>> sentences, _ = load_documentation_sentences(300, packages=["sklearn"])
    >>> make_word_vectors(sentences, 20).vectors.shape[1]
    20
    """
    check_counts(n_features=n_features, window=window, min_count=min_count)
    checked = check_texts(sentences, "sentences", "an iterable of str", "sentence")
    texts = [split_words(sentence) for sentence in checked]
    counts = Counter(word for text in texts for word in text)
    words = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
    if len(words) <= n_features:
        raise ValueError(
            f"sentences must have more than n_features={n_features} words that stand in them min_count={min_count} "
            f"times, got {len(words)}"
        )
    index = {word: i for i, word in enumerate(words)}
    pairs: Counter[tuple[int, int]] = Counter()
    for text in texts:
        ids = [index[word] for word in text if word in index]
        for distance in range(1, window + 1):
            pairs.update(zip(ids, ids[distance:], strict=False))
    positions = np.array(list(pairs), dtype=np.int64).reshape(-1, 2).T
    together = coo_array((list(pairs.values()), positions), shape=(len(words),) * 2).tocsr().astype(float)
    together = (together + together.T).tocsr()
    return WordVectors(words, _factors(together, n_features))


def _factors(together: coo_array, n_features: int) -> NDArray[np.float32]:
    """Vectors of the positive pointwise mutual information of words that stand together."""
    each = together.sum(0)
    scale = diags_array(1 / np.maximum(each, 1))
    ratio = (scale @ together @ scale * each.sum()).tocoo()
    keep = ratio.data > 1
    positive = coo_array((np.log(ratio.data[keep]), (ratio.row[keep], ratio.col[keep])), shape=ratio.shape).tocsr()
    if positive.nnz == 0:
        raise ValueError("sentences must have words that stand near each other more often than by chance, got none")
    decomposition = TruncatedSVD(n_features, random_state=0)
    vectors = decomposition.fit_transform(positive)
    values = decomposition.singular_values_
    vectors = vectors / np.sqrt(np.where(values > 0, values, 1))  # vectors of a singular value 0 are 0
    size = np.sqrt(np.mean(np.square(vectors)))
    return (vectors / size).astype(np.float32)

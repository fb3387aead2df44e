"""Sentences: of the caller, of a file, and some that are always there."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convexformer.optional import required
from convexformer.validation import check_optional_counts

from ._lines import text_lines

_MIN_WORDS, _MAX_WORDS = 8, 60
_MIN_PLAIN_WORDS = 0.85
_SKIPPED_FOLDERS = re.compile(r"tests?|_?vendored|_?external.*|array_api_.*")
_SKIPPED_SECTIONS = frozenset({"Attributes", "Methods", "References", "See Also"})
_RULE = re.compile(r"(?:([-=~^*+#\"'])\1{2,}\s*)+")
_LITERAL = (".. ", "- ", "* ")
_SKIPPED_LINES = (*_LITERAL, "|", "+-", ":")
# reStructuredText marks and what they leave in print.
_MARKUP = (
    (re.compile(r"\s*\[[\w*#]+\]_"), ""),
    (re.compile(r":(?!math)[\w:-]+:`~?([^`<]+?)(?:\s*<[^`]*>)?`"), r"\1"),
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`<]+?)(?:\s*<[^`]*>)?`_{1,2}"), r"\1"),
    (re.compile(r"(?<!:)`([^`<]+?)`"), r"\1"),
    (re.compile(r"(\*{1,2})(\w[^*]*?)\1"), r"\2"),
)
_SENTENCE_END = re.compile(
    r"(?<=[.?!])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bcf\.)(?<!\bvs\.)(?<!\bFig\.)(?<!\bEq\.)(?<!\bal\.)\s+(?=[A-Z])"
)
_PROSE = re.compile(r"[A-Z][\w ,;:'\"()/-]*(?:\.[\w ,;:'\"()/-]+)*[.?!]", re.ASCII)
_PLAIN_WORD = re.compile(r"[('\"]*[A-Za-z]+(?:[-'/.][A-Za-z]+)*[.,;:?!)'\"]*")


def load_documentation_sentences(
    n_sentences: int | None = None, *, packages: Sequence[str] = ("numpy", "scipy", "sklearn")
) -> tuple[list[str], NDArray[np.str_]]:
    """Load English sentences from the documentation of installed packages: real text without any download.

    Docstrings and bundled descriptions are read from the files; nothing is imported. Code, doctests, lists, tables,
    formulas, headings, references and sections that name other functions are left out, as are sentences of fewer than
    8 or more than 60 words and those with less than 85% of words made of letters. Every sentence comes once.

    Parameters
    ----------
    n_sentences : int, optional
        How many of them, in an order set by a hash of their text, so that any first ones are a fair sample of all.
        Default: all; some 21,000 from the default packages, 2900 of them with 32 BERT word pieces or more.
    packages : sequence of str, default=("numpy", "scipy", "sklearn")
        Importable names of packages. The default are those that this package needs in any case.

    Returns
    -------
    sentences : list of str
        They are the same as long as the versions of the packages are.
    labels : ndarray of str of shape (n_sentences,)
        The package each sentence comes from (the first of `packages`, when several have it): a text classification
        data set that needs no network.

    Raises
    ------
    ValueError
        If a package is not installed or without files, or there are fewer than `n_sentences` sentences.

    Examples
    --------
    >>> sentences, labels = load_documentation_sentences(100, packages=["sklearn"])
    >>> len(sentences), labels.shape, set(labels.tolist())
    (100, (100,), {'sklearn'})
    """
    check_optional_counts(n_sentences=n_sentences)
    names = (packages,) if isinstance(packages, str) else tuple(packages)
    found = _labelled_sentences(names)
    if n_sentences is not None and n_sentences > len(found):
        raise ValueError(
            f"n_sentences={n_sentences} is more than the {len(found)} sentences in the documentation of "
            f"{', '.join(names) or 'no packages'}"
        )
    chosen = found[:n_sentences]
    return [sentence for sentence, _ in chosen], np.array([package for _, package in chosen], dtype=np.str_)


def read_sentences(sentences: Any) -> list[str]:
    """Sentences that the argument ``sentences`` of a loader means; see ``load_attention_activations``."""
    if isinstance(sentences, (str, os.PathLike)):
        if sentences == "documentation":
            return load_documentation_sentences()[0]
        return _read_mrpc() if sentences == "glue/mrpc" else _read_lines(sentences)
    return check_texts(
        sentences, "sentences", "a list of str, the path of a text file, 'documentation' or 'glue/mrpc'", "sentence"
    )


def check_texts(texts: Any, name: str, wanted: str, unit: str) -> list[str]:
    """The texts of an argument, which must hold one or more."""
    if isinstance(texts, str):  # whose characters would be taken for texts
        raise TypeError(f"{name} must be {wanted}, got str; put a single {unit} into a list")
    if isinstance(texts, (Mapping, set, frozenset)) or hasattr(texts, "columns"):
        # A table would give the names of its columns, and a set an order of its own in each process.
        kind = type(texts).__name__
        raise TypeError(f"{name} must be {wanted}, got {kind}; of a table pass one column, of a set a sorted list")
    try:
        checked = list(texts)
    except TypeError as error:
        raise TypeError(f"{name} must be {wanted}, got {type(texts).__name__}") from error
    wrong = next((i for i, text in enumerate(checked) if not isinstance(text, str)), None)
    if wrong is not None:
        raise TypeError(f"{name}[{wrong}] must be a str, got {type(checked[wrong]).__name__}")
    for i, text in enumerate(checked):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a character of UTF-16, as JSON may hold, is none
            raise ValueError(
                f"{name}[{i}] must be text that UTF-8 can hold: {error}; leave such characters out"
            ) from error
    if not checked:
        raise ValueError(f"{name} must hold at least one {unit}, got none")
    return checked


def _read_lines(path: str | os.PathLike[str]) -> list[str]:
    place = f"sentences={os.fspath(path)!r}"
    remedy = (
        "unpack a compressed file; decode another one and pass a list, for example "
        "Path(path).read_text(encoding='latin-1').splitlines() where that is its encoding"
    )
    try:
        lines = list(text_lines(path, f"{place} is not a text file in UTF-8 ({remedy})"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(f"{place} is no file, nor is it 'documentation' or 'glue/mrpc'") from error
    if not lines:
        raise ValueError(f"{place} is an empty file; it must have one sentence a line")
    return lines


def _read_mrpc() -> list[str]:
    instead = "pass sentences='documentation', a list of sentences or the path of a text file"
    datasets = required("datasets", "sentences of 'glue/mrpc'", "'convexformer[disk]'", "datasets", instead=instead)
    try:
        return list(datasets.load_dataset("nyu-mll/glue", "mrpc", split="train")["sentence1"])
    except (OSError, ValueError) as error:
        raise OSError(
            f"sentences='glue/mrpc' is neither stored locally nor to be had from the Hugging Face hub ({error}); "
            f"check the network, or {instead}"
        ) from error


@cache
def _labelled_sentences(packages: tuple[str, ...]) -> list[tuple[str, str]]:
    """Sentences and the package of each, in their final order."""
    label: dict[str, str] = {}
    for package in packages:
        for sentence in _package_sentences(_package_folder(package)):
            label.setdefault(sentence, package)
    return sorted(label.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def _package_folder(package: str) -> Path:
    try:
        spec = find_spec(package)
    except (AttributeError, ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"packages must name installed packages, got {package!r}")
    return Path(next(iter(spec.submodule_search_locations)))


def _package_sentences(folder: Path) -> set[str]:
    texts: set[str] = set()
    for path in folder.rglob("*"):
        if any(_SKIPPED_FOLDERS.fullmatch(part) for part in path.relative_to(folder).parts[:-1]):
            continue
        if path.suffix == ".rst":
            texts.add(path.read_text(encoding="utf-8"))
        elif path.suffix == ".py":
            texts.update(_long_strings(path))
    # Many paragraphs stand in several docstrings.
    paragraphs = {paragraph for text in texts for paragraph in _paragraphs(text)}
    return {sentence for paragraph in paragraphs for sentence in _sentences(paragraph)}


def _long_strings(path: Path) -> Iterator[str]:
    """Strings of several lines in a module, read from its byte code: parsing the source takes ten times as long."""
    try:
        code = SourceFileLoader(path.stem, os.fspath(path)).get_code(path.stem)
    except SyntaxError:  # a file for another version of Python
        return
    pending = [] if code is None else [code]
    while pending:
        for constant in pending.pop().co_consts:
            if isinstance(constant, CodeType):
                pending.append(constant)
            elif isinstance(constant, str) and "\n" in constant.strip():
                yield constant


def _paragraphs(text: str) -> Iterator[str]:
    """Runs of lines of equal indentation, without what is no prose."""
    section, depth, literal, doctest = "", 0, None, False
    paragraph: list[str] = []
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        heading = bool(_RULE.fullmatch(bare))
        doctest = bool(bare) and (doctest or bare.startswith(">>>"))
        if heading and paragraph:
            section = paragraph.pop()
        if heading or not bare or indent != depth:
            if paragraph and section not in _SKIPPED_SECTIONS:
                yield " ".join(paragraph)
            paragraph, depth = [], indent
        if heading or doctest or not bare or (literal is not None and indent > literal):
            continue
        literal = indent if bare.startswith(_LITERAL) or bare.endswith("::") else None
        # Wide gaps are the columns of tables.
        if not bare.startswith(_SKIPPED_LINES) and "   " not in bare:
            paragraph.append(bare)


def _sentences(paragraph: str) -> Iterator[str]:
    if any(mark in paragraph for mark in "`*_"):
        for mark, printed in _MARKUP:
            paragraph = mark.sub(printed, paragraph)
    for sentence in _SENTENCE_END.split(paragraph):
        words = sentence.split()
        if _MIN_WORDS <= len(words) <= _MAX_WORDS and "_" not in sentence and _PROSE.fullmatch(sentence):
            plain = sum(bool(_PLAIN_WORD.fullmatch(word)) for word in words)
            if plain >= _MIN_PLAIN_WORDS * len(words):
                yield " ".join(words)

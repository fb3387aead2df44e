"""Sentences from installed documentation, and what else a loader reads sentences from."""

import gzip
import re
import sys
import types

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from convexformer.datasets import load_documentation_sentences
from convexformer.datasets._sentences import _labelled_sentences, read_sentences

MODULE = '''"""Module line.

This first sentence of the module has more than eight words, a ``name`` and a :class:`~module.Thing` [1]_.
This sentence is broken
over two lines of the file and ends here. Too short.

Parameters
----------
x : array_like
    The values of the parameter, one for every sample (e.g. The first one), as *floats*.

References
----------
.. [1] The Author wrote a very long book about this and that.

Nobody reads the many words that stand under this heading here.

Notes
-----
- A list item of many words that is not prose at all.

.. code-block:: python

    This Is Code Although It Looks Like A Sentence Of Words.

The formula :math:`x + y` makes this sentence unfit for a plain text.
It says 1 2 3 4 5 6 7 8 9 10 and little else.

>>> print("This is a doctest of more than eight words, not prose.")
This is the output of a doctest in more than eight words.

After the doctest comes one more sentence with quite enough words.
"""

COMMENT = 1  # A comment of more than eight words is not part of any docstring.
MESSAGE = "An error message of one line has many words but is no docstring."


def function():
    """Return a thing.

    This first sentence of the module has more than eight words, a name and a Thing.
    Does the docstring of a function count as documentation as well?
    """
'''
OTHER = f"""{MODULE}


class Thing:
    '''A thing.

    The second package alone has this sentence of ten words.
    '''
"""
WANTED = {
    "This first sentence of the module has more than eight words, a name and a module.Thing.",
    "This sentence is broken over two lines of the file and ends here.",
    "The values of the parameter, one for every sample (e.g. The first one), as floats.",
    "After the doctest comes one more sentence with quite enough words.",
    "This first sentence of the module has more than eight words, a name and a Thing.",
    "Does the docstring of a function count as documentation as well?",
}


@pytest.fixture
def make_package(tmp_path, monkeypatch):
    """Function that makes an importable package of one module that must never be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, module, folder="part"):
        (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')\n")
        (tmp_path / name / folder / "module.py").write_text(module)
        return name

    yield make
    _labelled_sentences.cache_clear()


def test_prose_is_found_and_everything_else_is_left_out(make_package):
    sentences, labels = load_documentation_sentences(packages=[make_package("some_package", MODULE)])
    assert set(sentences) == WANTED
    assert labels.tolist() == ["some_package"] * len(WANTED)


def test_tests_copies_of_others_and_files_of_other_pythons_are_left_out(make_package):
    for folder in ("tests", "externals", "_vendored"):
        make_package(f"package_{folder}", MODULE, folder)
        assert load_documentation_sentences(packages=[f"package_{folder}"])[0] == []
    assert load_documentation_sentences(packages=[make_package("broken", MODULE + "\nif\n")])[0] == []


def test_a_sentence_of_several_packages_comes_once_under_the_first(make_package):
    make_package("one", MODULE)
    make_package("two", OTHER)
    sentences, labels = load_documentation_sentences(packages=["one", "two"])
    assert len(sentences) == len(set(sentences)) == len(WANTED) + 1
    assert labels.tolist().count("two") == 1
    assert set(load_documentation_sentences(packages=["two", "one"])[1].tolist()) == {"two"}


def test_documentation_is_plentiful_prose_of_all_packages():
    sentences, labels = load_documentation_sentences()
    assert len(sentences) == len(labels) >= 3000
    assert len(set(sentences)) == len(sentences)
    assert set(labels.tolist()) == {"numpy", "scipy", "sklearn"}
    n_words = np.array([len(sentence.split()) for sentence in sentences])
    assert n_words.min() >= 8
    assert n_words.max() <= 60
    assert (n_words >= 24).sum() >= 2000
    assert all(re.fullmatch(r"[A-Z][^_`<>={}\[\]\\|]+[.?!]", sentence) for sentence in sentences)


def test_first_sentences_are_a_prefix_and_a_fair_sample():
    sentences, labels = load_documentation_sentences()
    few, few_labels = load_documentation_sentences(1000)
    assert few == sentences[:1000]
    for package in ("numpy", "scipy", "sklearn"):
        # Four standard deviations of a share among 1000 are at most .063.
        assert abs((few_labels == package).mean() - (labels == package).mean()) < 0.063


def test_order_depends_on_the_text_alone(make_package):
    packages = [make_package("one", MODULE), make_package("two", OTHER)]
    sentences, _ = load_documentation_sentences(packages=packages)
    assert load_documentation_sentences(packages=packages[::-1])[0] == sentences
    assert load_documentation_sentences(packages="one")[0] == [text for text in sentences if text in WANTED]


@pytest.mark.parametrize("packages", [["no_such_package"], ["six_times_seven", "numpy"], ["re"], [""]])
def test_packages_without_files_are_refused(packages):
    if packages == ["re"] and hasattr(sys.modules["re"], "__path__"):
        packages = ["bisect"]
    with pytest.raises(ValueError, match=f"packages must name installed packages, got {packages[0]!r}"):
        load_documentation_sentences(packages=packages)


def test_more_sentences_than_there_are_are_refused(make_package):
    package = make_package("small", MODULE)
    with pytest.raises(ValueError, match=r"n_sentences=7 is more than the 6 sentences .* of small"):
        load_documentation_sentences(7, packages=[package])
    with pytest.raises(ValueError, match="n_sentences must be a positive integer or None, got 0"):
        load_documentation_sentences(0)


def test_lines_of_a_file_are_sentences_in_order(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("One, “two”.\r\n\nThree\x85 four.".encode())
    assert read_sentences(path) == read_sentences(str(path)) == ["One, “two”.", "", "Three\x85 four."]
    path.write_text("First.\n", encoding="utf-8-sig")
    assert read_sentences(path) == ["First."]


def test_files_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "lines.txt"
    with pytest.raises(FileNotFoundError, match=r"lines\.txt' is no file, nor is it 'documentation' or 'glue/mrpc'"):
        read_sentences(path)
    with pytest.raises(FileNotFoundError, match="is no file, nor is it 'documentation'"):
        read_sentences(tmp_path)
    path.write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"not a text file in UTF-8 .*encoding='latin-1'"):
        read_sentences(path)
    path.write_bytes(gzip.compress(b"a sentence"))
    with pytest.raises(ValueError, match=r"not a text file in UTF-8 \(unpack a compressed file"):
        read_sentences(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="empty file"):
        read_sentences(path)


@pytest.mark.parametrize(
    ("sentences", "error", "message"),
    [
        ([], ValueError, "at least one sentence"),
        (["A.", 3], TypeError, r"sentences\[1\] must be a str, got int"),
        ({"text": ["A."]}, TypeError, "sentences must be a list of str, .* got dict; of a table pass one column"),
        (pd.DataFrame({"text": ["A."]}), TypeError, "got DataFrame; of a table pass one column"),
        (pa.table({"text": ["A."]}), TypeError, "got Table; of a table pass one column"),
        ({"A.", "B."}, TypeError, "got set; of a table pass one column, of a set a sorted list"),
        (None, TypeError, "a list of str, the path of a text file, .* got NoneType"),
        (["fine", "\ud800 is half"], ValueError, r"sentences\[1\] must be text that UTF-8 can hold"),
    ],
)
def test_sentences_that_are_none_are_refused(sentences, error, message):
    with pytest.raises(error, match=message):
        read_sentences(sentences)


def test_arrays_of_sentences_are_taken():
    assert read_sentences(pd.DataFrame({"text": ["One.", "Two."]})["text"]) == ["One.", "Two."]
    assert read_sentences({"One.": 0, "Two.": 1}.keys()) == ["One.", "Two."]
    assert read_sentences(np.array(["A.", "B."])) == ["A.", "B."]


def test_the_extra_that_mrpc_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'convexformer\[disk\]'"):
        read_sentences("glue/mrpc")


def test_mrpc_comes_through_datasets_or_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install datasets; or pass sentences='documentation'"):
        read_sentences("glue/mrpc")

    def offline(*args, **kwargs):
        raise ConnectionError("no route")

    def load(name, part, split):
        assert (name, part, split) == ("nyu-mll/glue", "mrpc", "train")
        return {"sentence1": ["A.", "B."], "sentence2": ["C.", "D."]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(OSError, match=r"neither stored locally nor .* \(no route\); check the network") as caught:
        read_sentences("glue/mrpc")
    assert isinstance(caught.value.__cause__, ConnectionError)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert read_sentences("glue/mrpc") == ["A.", "B."]

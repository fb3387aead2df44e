"""Word vectors: files in both formats, vectors made of sentences, sentences as padded tokens."""

import unicodedata

import numpy as np
import pytest
import torch

from convexformer.datasets import WordVectors, load_documentation_sentences, load_word_vectors, make_word_vectors

WORDS = ["the", "good", "bad"]
VECTORS = np.array([[0.0, 1.0], [1.0, 0.5], [-1.0, 0.5]], dtype=np.float32)
LINES = [f"{word} {' '.join(map(str, vector))}" for word, vector in zip(WORDS, VECTORS.tolist(), strict=True)]


@pytest.mark.parametrize("header", [[], ["3 2"]], ids=["glove", "word2vec"])
def test_text_files(tmp_path, header):
    path = tmp_path / "vectors.txt"
    path.write_text("\n".join(header + LINES) + "\n")
    read = load_word_vectors(path)
    assert list(read.words) == WORDS
    np.testing.assert_array_equal(read.vectors, VECTORS)
    assert len(load_word_vectors(path, n_words=2)) == 2


def test_words_may_contain_spaces(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("\n".join([*LINES, ". . . 0.4 0.5", "at a@b.org -1e-3 2"]) + "\n")
    read = load_word_vectors(path)
    assert list(read.words) == [*WORDS, ". . .", "at a@b.org"]
    np.testing.assert_array_equal(read.vectors[3:], np.array([[0.4, 0.5], [-1e-3, 2.0]], dtype=np.float32))


def test_a_first_word_with_one_number_is_no_line_of_sizes(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("a 0.5\nb 0.7\n")
    assert list(load_word_vectors(path).words) == ["a", "b"]
    path.write_text("2 1\na 0.5\nb 0.7\n")
    assert list(load_word_vectors(path).words) == ["a", "b"]


def test_npz_files(tmp_path):
    np.savez(tmp_path / "vectors.npz", words=np.array(WORDS), vectors=VECTORS)
    read = load_word_vectors(tmp_path / "vectors.npz", n_words=2)
    assert list(read.words) == WORDS[:2]
    np.testing.assert_array_equal(read.vectors, VECTORS[:2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one word"),
        ("good 1.0 x\n", "line 1 must be a word and numbers"),
        ("good 1.0 2.0\nbad 1.0\n", "line 2 must have 2 numbers, got 1"),
        ("good 1.0 2.0\nbad 1.0 2.0 3.0\n", "line 2 must have 2 numbers, got 3"),
        ("good 1.0 2.0\nbad  1.0 2.0\n", "line 2 must be a word and numbers"),
        ("good 1.0 2.0\nbad nan 2.0\n", "vectors.txt must hold words and their vectors: .* finite, .* word 'bad'"),
        ("good\nbad 1.0 2.0\n", r"vectors.txt, line 1 must be a word and numbers, got no numbers"),
    ],
)
def test_bad_text_files(tmp_path, text, message):
    path = tmp_path / "vectors.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_word_vectors(path)


def test_binary_files_are_named(tmp_path):
    np.save(tmp_path / "vectors.npy", VECTORS)
    with pytest.raises(ValueError, match=r"vectors.npy must be word vectors as text in UTF-8, or an .npz file"):
        load_word_vectors(tmp_path / "vectors.npy")


def test_bad_archives(tmp_path):
    np.savez(tmp_path / "vectors.npz", names=np.array(WORDS))
    with pytest.raises(ValueError, match="must hold the arrays words and vectors"):
        load_word_vectors(tmp_path / "vectors.npz")
    np.savez(tmp_path / "objects.npz", words=np.array(WORDS, dtype=object), vectors=VECTORS)
    with pytest.raises(ValueError, match=r"objects.npz must hold the plain arrays words and vectors: .*bject"):
        load_word_vectors(tmp_path / "objects.npz")
    with pytest.raises(FileNotFoundError):
        load_word_vectors(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("words", "vectors", "message"),
    [
        (np.array(WORDS).astype(bytes), VECTORS, "words must be str, got bytes: b'the'"),
        (np.array(WORDS)[:, None], VECTORS, r"words must be str, got list: \['the'\]"),
        (np.arange(3), VECTORS, "words must be str, got int: 0"),
        (WORDS, VECTORS.astype(str), "vectors must hold real numbers, got <U"),
        (WORDS, VECTORS * 1j, "vectors must hold real numbers, got complex64"),
        (WORDS, VECTORS * np.array([[1], [1], [np.inf]]), "vectors must be finite, got others for the word 'bad'"),
    ],
)
def test_archives_of_other_words_and_vectors_are_named(tmp_path, words, vectors, message):
    np.savez(tmp_path / "vectors.npz", words=words, vectors=vectors)
    with pytest.raises(ValueError, match=f"vectors.npz must hold words and their vectors: {message}"):
        load_word_vectors(tmp_path / "vectors.npz")


def test_sentences_are_cut_padded_and_known_words_kept():
    vectors = WordVectors(WORDS, VECTORS)
    tokens = vectors.embed(["The GOOD, the bad", "unknown words", "bad"], n_tokens=3)
    assert tokens.shape == (3, 3, 2)
    np.testing.assert_array_equal(tokens[0], VECTORS[[0, 1, 0]])
    assert not tokens[1].any()
    np.testing.assert_array_equal(tokens[2, 0], VECTORS[2])
    assert vectors.embed(["The good, the bad"]).shape == (1, 4, 2)


@pytest.mark.parametrize("word", ["café", "हिन्दी", "việt", "العربيّة"])
def test_letters_and_the_marks_on_them_are_one_word_in_each_form_of_unicode(word):
    for stored in ("NFC", "NFD"):
        vectors = WordVectors([unicodedata.normalize(stored, word), "good"], np.array([[1.0], [2.0]]))
        for given in ("NFC", "NFD"):
            tokens = vectors.embed([f"{unicodedata.normalize(given, word)} ❤️good, {word}"])
            assert tokens[0, :, 0].tolist() == [1, 2, 1]


@pytest.mark.parametrize("use", [WordVectors(WORDS, VECTORS).embed, make_word_vectors])
def test_one_sentence_is_not_taken_for_its_letters(use):
    with pytest.raises(TypeError, match="sentences must be an iterable of str, got str; put a single sentence into"):
        use("the good")


def test_what_is_no_file_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere.txt"):
        with pytest.raises(FileNotFoundError, match=f"path='{path}' is no file of word vectors"):
            load_word_vectors(path)
    with pytest.raises(TypeError, match="path must be the path of a file, got NoneType"):
        load_word_vectors(None)


def test_bad_vectors():
    for vectors, kind in ((VECTORS.tolist(), "list"), (torch.as_tensor(VECTORS), "Tensor")):
        with pytest.raises(TypeError, match=rf"vectors must be an array, got {kind}; give np\.asarray"):
            WordVectors(WORDS, vectors)
    with pytest.raises(ValueError, match="one row per word"):
        WordVectors(WORDS, VECTORS[:2])
    with pytest.raises(ValueError, match="must be finite"):
        WordVectors(WORDS, np.full((3, 2), np.inf))


@pytest.mark.parametrize("sentences", [["a", "b", "c"] * 5, ["a a", "b b", "a b", "b a"] * 8], ids=["alone", "chance"])
def test_sentences_whose_words_do_not_go_together_are_named(sentences):
    with pytest.raises(ValueError, match="sentences must have words that stand near each other"):
        make_word_vectors(sentences, 1)


def test_words_that_stand_alone_have_zero_vectors():
    made = make_word_vectors(["a b"] * 5 + ["c"] * 5 + ["d"] * 5, 3)
    assert made.words == ["a", "b", "c", "d"]
    np.testing.assert_allclose(made.vectors[2:], 0, atol=1e-6)
    assert (np.linalg.norm(made.vectors[:2], axis=1) > 1).all()


def test_vectors_made_of_a_corpus_put_like_words_together():
    sentences, _ = load_documentation_sentences(4000)
    made = make_word_vectors(sentences, 30)
    again = make_word_vectors(sentences, 30)
    np.testing.assert_array_equal(made.vectors, again.vectors)
    units = made.vectors / np.linalg.norm(made.vectors, axis=1, keepdims=True)

    def likeness(first, second):
        return units[made.words.index(first)] @ units[made.words.index(second)]

    assert likeness("array", "arrays") > likeness("array", "probability")
    assert likeness("random", "seed") > likeness("random", "file")
    assert np.mean(np.square(made.vectors)) == pytest.approx(1, rel=1e-5)
    with pytest.raises(ValueError, match="must have more than n_features=50 words"):
        make_word_vectors(["few words"], 50)


@pytest.mark.parametrize("text", ["3 2\na 1 2\nb 3 4\n", "2 3\na 1 2\nb 3 4\n", "1 2\na 1 2\nb 3 4\n"])
def test_a_file_that_disagrees_with_its_first_line_is_refused(text, tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"vectors\.txt must hold \d words with \d numbers each by its first line"):
        load_word_vectors(path)
    if text.startswith("3 2"):
        assert load_word_vectors(path, n_words=2).words == ["a", "b"]  # of which nothing is missing

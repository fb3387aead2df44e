"""Tables of modular arithmetic: what their rows, splits, waves and warnings say is true."""

import re
import warnings
from collections import Counter, defaultdict
from math import gcd

import numpy as np
import pytest

from convexformer.datasets import make_modular_arithmetic

OPERATIONS = ["+", "-", "x", "/"]
ENCODINGS = ["index", "one_hot", "fourier"]


def rows(data):
    """Operands and labels of the whole table, the training part first."""
    operands = np.concatenate([data.operands_train, data.operands_test])
    return operands[:, 0], operands[:, 1], np.concatenate([data.y_train, data.y_test])


def waves(symbols, n_frequencies):
    """Columns of symbols as complex numbers of shape (..., F)."""
    columns = symbols[..., : 2 * n_frequencies]
    return columns[..., 0::2] + 1j * columns[..., 1::2]


def symbols_of(data):
    """The encoding of each residue, shape (p, d), read off the operands."""
    operands = np.concatenate([data.operands_train, data.operands_test])
    inputs = np.concatenate([data.X_train, data.X_test])
    table = np.full((data.p, inputs.shape[2]), np.nan)
    table[operands] = inputs
    np.testing.assert_array_equal(table[operands], inputs)  # one encoding per symbol, in either place
    return table


def usual_recipe(p):
    with pytest.warns(UserWarning, match="several labels"):
        return make_modular_arithmetic(p, "/", distinct=False, random_state=0)


@pytest.mark.parametrize("p", [11, 15, 16])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_labels_solve_the_equation_on_every_row_of_the_table(p, operation):
    data = make_modular_arithmetic(p, operation, fraction=0.8, random_state=0)
    a, b, y = rows(data)
    assert ((y >= 0) & (y < p)).all()
    left, right = {"+": (y, a + b), "-": (y + b, a), "x": (y, a * b), "/": (b * y, a)}[operation]
    assert ((left - right) % p == 0).all()
    wanted = {(i, j) for i in range(p) for j in range(p) if operation != "/" or gcd(j, p) == 1}
    assert len(a) == len(wanted)
    assert set(zip(a.tolist(), b.tolist(), strict=True)) == wanted
    assert data.label_ceiling == 1.0


@pytest.mark.parametrize(("p", "size"), [(97, 9312), (15, 120), (2, 2)])
def test_division_has_one_row_per_operand_and_invertible_divisor(p, size):
    with warnings.catch_warnings():
        warnings.simplefilter("error" if p > 2 else "ignore")
        data = make_modular_arithmetic(p, random_state=0)
    assert len(data.y_train) + len(data.y_test) == size
    assert len(data.y_train) == size // 2


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.85])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_parts_are_disjoint_and_counted(operation, fraction):
    data = make_modular_arithmetic(13, operation, fraction=fraction, random_state=1)
    train = set(map(tuple, data.operands_train.tolist()))
    test = set(map(tuple, data.operands_test.tolist()))
    n_rows = len(data.y_train) + len(data.y_test)
    assert not train & test
    assert len(train) == len(data.y_train)
    assert len(train | test) == n_rows
    assert abs(len(data.y_train) - fraction * n_rows) <= 0.5
    assert data.n_classes == 13
    for part, labels in (("train", data.y_train), ("test", data.y_test)):
        assert data.class_counts[part].tolist() == [labels.tolist().count(label) for label in range(13)]


def test_every_quotient_is_equally_frequent():
    counts = make_modular_arithmetic(15, random_state=0).class_counts
    assert (counts["train"] + counts["test"] == 8).all()


def test_a_seed_gives_one_split_whatever_the_encoding():
    first = make_modular_arithmetic(23, random_state=3)
    for encoding in ENCODINGS:
        for frequencies in (None, "random") if encoding == "fourier" else (None,):
            data = make_modular_arithmetic(23, encoding=encoding, frequencies=frequencies, random_state=3)
            np.testing.assert_array_equal(data.operands_train, first.operands_train)
            np.testing.assert_array_equal(data.y_test, first.y_test)
    other = make_modular_arithmetic(23, random_state=4)
    assert (other.operands_train != first.operands_train).any()
    generator = np.random.RandomState(3)
    drawn = [make_modular_arithmetic(23, random_state=generator).operands_train for _ in range(2)]
    np.testing.assert_array_equal(drawn[0], first.operands_train)
    assert (drawn[0] != drawn[1]).any()


def test_rows_come_in_random_order():
    (a, _), n_train = make_modular_arithmetic(97, random_state=0).operands_train.T, 4656
    # Under a random order the mean of a half differs from that of all by .3 in standard deviation.
    assert abs(a.mean() - 48) < 2
    assert 0.4 * n_train < (np.diff(a) > 0).sum() < 0.6 * n_train


@pytest.mark.parametrize("p", [15, 12, 9])
def test_the_usual_recipe_loses_accuracy_on_composite_moduli(p):
    data = usual_recipe(p)
    a, b, y = rows(data)
    assert ((b * y - a) % p == 0).all()
    assert {(i, j) for i, j in zip(b.tolist(), y.tolist(), strict=True)} == {
        (i, j) for i in range(1, p) for j in range(p)
    }
    labels = defaultdict(Counter)
    for i, j, label in zip(a.tolist(), b.tolist(), y.tolist(), strict=True):
        labels[i, j][label] += 1
    right = sum(max(count.values()) for count in labels.values())
    assert data.label_ceiling == pytest.approx(right / len(y))
    # A divisor with g factors in common has p / g first operands, each with g labels.
    assert data.label_ceiling == pytest.approx(sum(1 / gcd(j, p) for j in range(1, p)) / (p - 1))


def test_the_warning_puts_the_loss_in_numbers():
    message = r"p=15 is not prime: 26 of the 146 pairs .* more than 69\.5% of the 210 rows.*distinct=True"
    with pytest.warns(UserWarning, match=message) as caught:
        data = make_modular_arithmetic(15, distinct=False, random_state=0)
    assert caught[0].filename == __file__
    assert data.label_ceiling == pytest.approx(146 / 210)
    train = set(map(tuple, data.operands_train.tolist()))
    triples = [
        set(map(tuple, np.column_stack(part).tolist()))
        for part in ((data.operands_train, data.y_train), (data.operands_test, data.y_test))
    ]
    assert not triples[0] & triples[1]
    assert len(triples[0] | triples[1]) == 210
    assert train & set(map(tuple, data.operands_test.tolist()))  # with different labels, as documented


def test_the_usual_recipe_is_the_same_table_for_a_prime():
    for operation in OPERATIONS:
        one = make_modular_arithmetic(13, operation, random_state=0)
        other = make_modular_arithmetic(13, operation, distinct=False, random_state=0)
        np.testing.assert_array_equal(one.operands_train, other.operands_train)
        np.testing.assert_array_equal(one.y_test, other.y_test)


def test_absent_classes_are_warned_of():
    with pytest.warns(UserWarning, match=r"of the 97 classes \(.*\) have no row to train on; take a larger") as caught:
        data = make_modular_arithmetic(97, fraction=0.01, random_state=0)
    absent = (data.class_counts["train"] == 0).sum()
    assert absent > 0
    assert str(caught[0].message).startswith(f"{absent} of the 97")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_index_and_one_hot_hold_the_operands(operation):
    index = make_modular_arithmetic(13, operation, random_state=0)
    np.testing.assert_array_equal(index.X_train, index.operands_train)
    assert index.X_train.dtype.kind == "i"
    one_hot = make_modular_arithmetic(13, operation, encoding="one_hot", random_state=0)
    assert one_hot.X_test.shape == (len(one_hot.y_test), 2, 13)
    np.testing.assert_array_equal(one_hot.X_test.argmax(2), one_hot.operands_test)
    np.testing.assert_array_equal(symbols_of(one_hot), np.eye(13))
    assert index.frequencies is index.columns is index.primitive_root is one_hot.columns is None


@pytest.mark.parametrize("p", [3, 5, 7, 31, 97])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("frequencies", [None, "random"])
@pytest.mark.filterwarnings("ignore:.* of the . classes")
def test_waves_differ_between_symbols(p, operation, frequencies):
    for n_frequencies in {1, (p - 1) // 2, None}:
        data = make_modular_arithmetic(
            p, operation, encoding="fourier", n_frequencies=n_frequencies, frequencies=frequencies, random_state=0
        )
        symbols = symbols_of(data)
        assert symbols.shape == (p, 2 * len(data.frequencies) + (operation in "x/"))
        assert symbols.shape[1] == len(data.columns)
        distance = np.linalg.norm(symbols[:, None] - symbols, axis=2) + 10 * np.eye(p)
        # A wave that tells residues apart does so by a step on the circle at least; zero is at its centre.
        step = 2 * np.sin(np.pi / (p if operation in "+-" else p - 1))
        assert distance.min() > 0.99 * min(step, np.sqrt(2))


@pytest.mark.parametrize("p", [12, 15, 64])
def test_waves_over_residues_differ_for_composite_moduli_too(p):
    for seed in range(5):
        data = make_modular_arithmetic(
            p, "+", encoding="fourier", n_frequencies=2, frequencies="random", random_state=seed
        )
        assert len(np.unique(symbols_of(data).round(9), axis=0)) == p


def takes(p, frequencies):
    """Whether frequencies are accepted for sums."""
    try:
        make_modular_arithmetic(p, "+", encoding="fourier", frequencies=frequencies, random_state=0)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("order", [12, 18])
def test_given_frequencies_are_taken_exactly_when_they_separate_symbols(order):
    angles = 2 * np.pi * np.arange(order) / order
    for first in range(1, order):
        for second in range(1, order):
            if first in (second, order - second):
                continue
            pair = np.exp(1j * np.outer(angles, [first, second]))
            separate = len(np.unique(pair.round(6) + 0.0, axis=0)) == order
            assert takes(order, [first, second]) == separate


@pytest.mark.parametrize(("operation", "sign"), [("+", 1), ("-", -1), ("x", 1), ("/", -1)])
def test_the_operation_multiplies_waves(operation, sign):
    data = make_modular_arithmetic(31, operation, encoding="fourier", random_state=0)
    n_frequencies = len(data.frequencies)
    symbols = symbols_of(data)
    nonzero = np.ones(len(data.y_train), dtype=bool)
    if operation in "x/":
        nonzero = (data.operands_train > 0).all(1)
    first, second = np.moveaxis(waves(data.X_train[nonzero], n_frequencies), 1, 0)
    label = waves(symbols[data.y_train[nonzero]], n_frequencies)
    np.testing.assert_allclose(first * (second if sign > 0 else second.conj()), label, atol=1e-12)
    np.testing.assert_allclose(abs(label), 1, atol=1e-12)


def test_columns_hold_what_they_say():
    environment = {"cos": np.cos, "sin": np.sin, "pi": np.pi}
    for operation in OPERATIONS:
        data = make_modular_arithmetic(29, operation, encoding="fourier", frequencies=[5, 27, 3], random_state=0)
        assert data.frequencies == (5, 27, 3)
        symbols, root = symbols_of(data), data.primitive_root
        logarithm = {pow(root, t, 29): t for t in range(28)} if root else {a: a for a in range(29)}
        for column, description in enumerate(data.columns):
            for a, exponent in logarithm.items():
                formula = re.sub(r"log_\d+\(a\)|\ba\b", str(exponent), description)
                code = formula.replace(" / ", "/").replace(" ", "*")
                wanted = 0 if description == "a is 0" else eval(code, environment)
                assert symbols[a, column] == pytest.approx(wanted, abs=1e-10)
        assert [int(name.split()[2]) for name in data.columns[:6]] == [5, 5, 27, 27, 3, 3]
        if root:
            assert len(logarithm) == 28
            np.testing.assert_array_equal(symbols[0], [0] * 6 + [1])


@pytest.mark.parametrize("p", [97, 113])
def test_default_frequencies_keep_symbols_farther_apart_than_the_lowest_and_most_random_ones(p):
    def nearest(**choice):
        symbols = symbols_of(make_modular_arithmetic(p, "+", encoding="fourier", random_state=0, **choice))
        return np.linalg.norm(symbols[1:] - symbols[0], axis=1).min()

    default = nearest()
    assert default == nearest()
    assert default > 3 * nearest(frequencies=[1, 2, 3, 4, 5])
    generator = np.random.RandomState(0)
    drawn = [1 + generator.permutation(p // 2)[:5] for _ in range(9)]
    assert default > np.median([nearest(frequencies=frequencies) for frequencies in drawn])


def test_random_frequencies_follow_the_seed():
    drawn = [
        make_modular_arithmetic(97, encoding="fourier", frequencies="random", random_state=seed).frequencies
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len({min(k, 96 - k) for k in frequencies}) == 5 for frequencies in drawn)


@pytest.mark.parametrize("encoding", ["one_hot", "fourier"])
def test_dtypes_agree(encoding):
    double = make_modular_arithmetic(23, encoding=encoding, random_state=0)
    single = make_modular_arithmetic(23, encoding=encoding, dtype="float32", random_state=0)
    assert (double.X_train.dtype, single.X_train.dtype, single.X_test.dtype) == (np.float64, np.float32, np.float32)
    np.testing.assert_array_equal(double.X_train.astype(np.float32), single.X_train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1}, "p must be an integer of at least 2, got 1"),
        ({"p": 7.0}, "p must be an integer"),
        ({"p": True}, "p must be an integer"),
        ({"operation": "*"}, r"operation must be '\+', '-', 'x' \(for multiplication\) or '/', got '\*'"),
        ({"fraction": 1}, "fraction must be a number between 0 and 1"),
        ({"fraction": float("nan")}, "fraction must be a number between 0 and 1"),
        ({"fraction": 1e-4}, "fraction=0.0001 leaves one part of the 42 rows empty"),
        ({"fraction": 0.999}, "fraction=0.999 leaves one part"),
        ({"distinct": 1}, "distinct must be True or False"),
        ({"encoding": "onehot"}, "encoding must be 'index', 'one_hot' or 'fourier', got 'onehot'"),
        ({"n_frequencies": 2}, "n_frequencies has no meaning for encoding='index'"),
        ({"encoding": "one_hot", "frequencies": [1]}, "frequencies has no meaning for encoding='one_hot'"),
        ({"dtype": "float32"}, "dtype has no meaning for encoding='index'"),
        ({"encoding": "one_hot", "dtype": "float16"}, "dtype must be None, 'float32' or 'float64'"),
        ({"encoding": "fourier", "n_frequencies": 0}, "n_frequencies must be a positive integer"),
        ({"encoding": "fourier", "n_frequencies": 4}, "n_frequencies must be at most 3"),
        ({"encoding": "fourier", "n_frequencies": 1, "frequencies": [1, 2]}, "n_frequencies=1 contradicts the 2"),
        ({"encoding": "fourier", "frequencies": []}, "frequencies must be None, 'random' or a sequence of integers"),
        ({"encoding": "fourier", "frequencies": 3}, "frequencies must be None, 'random' or a sequence of integers"),
        ({"encoding": "fourier", "frequencies": "all"}, "frequencies must be None, 'random' or a sequence"),
        ({"encoding": "fourier", "frequencies": [1.0]}, "frequencies must be None, 'random' or a sequence"),
        ({"encoding": "fourier", "frequencies": [1, 6]}, "integers from 1 to 5"),
        ({"encoding": "fourier", "frequencies": [1, 5]}, "frequencies must not hold a k twice, nor k and 6 - k"),
        ({"encoding": "fourier", "frequencies": [1, 1]}, "frequencies must not hold a k twice"),
        ({"encoding": "fourier", "frequencies": [2]}, "add one that is coprime to 2"),
        ({"encoding": "fourier", "p": 9}, "p must be an odd prime, got 9"),
        ({"encoding": "fourier", "p": 15, "operation": "x"}, "operation='x' needs discrete logarithms, so p must be"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_modular_arithmetic(**{"p": 7, "random_state": 0, **arguments})

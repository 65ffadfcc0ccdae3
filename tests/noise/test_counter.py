"""Random bits as a function of key and counters."""

import keras
import numpy as np
import pytest
from keras import ops
from scipy.stats import kstest

from tests.flows.tools import numpy
from tfp_ibnn.noise import counter


def word(value):
    return ops.convert_to_tensor(np.uint32(value))


def key(first=1, second=2):
    return word(first), word(second)


@pytest.mark.parametrize(
    ("key", "count", "expected"),
    [  # the known answers published with the generator
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(key, count, expected):
    found = counter.threefry(*map(word, key), *map(word, count))
    assert tuple(int(numpy(part)) for part in found) == expected


@pytest.mark.parametrize("source", [counter.bits, counter.sobol])
def test_words_are_uniform_and_rows_and_columns_independent(source):
    words = numpy(source(key(), ops.arange(2048), 3, 5)) / 2**32
    for column in words.T:
        assert kstest(column, "uniform").pvalue > 1e-4
    assert np.all(np.abs(np.corrcoef(words.T) - np.eye(5)) < 0.1)


def test_numbers_of_the_words():
    words = ops.convert_to_tensor(np.array([[0, 2**31, 2**32 - 1]], "uint32"))
    for dtype in ("float32", "float64"):
        z = numpy(counter.normal(words, dtype))[0]
        assert z.dtype == dtype
        assert np.all(np.isfinite(z))
        assert z[1] == pytest.approx(0, abs=1e-9)
        assert 5 < z[2] == pytest.approx(-z[0], rel=1e-6)
    u = numpy(counter.uniform(words, "float32"))[0]
    assert u[0] == 0
    assert 0.999 < u[2] < 1


def test_sobol_points_are_a_net():
    """Of 2^m points each elementary interval holds as many as its volume says."""
    points = numpy(counter.sobol(key(), ops.arange(64), 0, 2)) / 2**32
    for i in range(7):
        cells = (np.floor(points * [2**i, 2 ** (6 - i)])).astype(int)
        assert len(np.unique(cells, axis=0)) == 64


def test_directions_are_those_of_scipys_points():
    from scipy.stats import qmc

    engine = qmc.Sobol(3, scramble=True, rng=np.random.default_rng(0))
    expected = (engine.random(256) * 2.0**32).astype("uint32")
    found = numpy(counter.sobol(key(), ops.arange(256), 0, 3)).astype("uint32")
    # Up to the shift, and up to the order within the first 256, the points are the same.
    assert {tuple(row) for row in found ^ found[0]} == {
        tuple(row) for row in expected ^ expected[0]
    }


def test_the_shift_depends_on_the_key():
    first, second = (numpy(counter.sobol(key(k), ops.arange(4), 0, 3)) for k in (1, 2))
    assert np.all(first != second)


def test_past_the_last_sobol_dimension(monkeypatch):
    monkeypatch.setattr(counter, "_SOBOL_DIMENSIONS", 3)
    counter._directions.cache_clear()
    words = numpy(counter.sobol(key(), ops.arange(64), 1, 8)) / 2**32
    counter._directions.cache_clear()
    assert words.shape == (64, 8)
    # The first two are Sobol points, one in each interval; the others are independent.
    counts = [len(set(np.floor(64 * column).astype(int))) for column in words.T]
    assert counts[:2] == [64, 64]
    assert max(counts[2:]) < 60
    assert np.mean(np.abs(np.corrcoef(words.T) - np.eye(8))) < 0.1


def test_seeds_of_any_size_have_keys_of_their_own():
    keys = {tuple(counter.key_from_seed(seed)) for seed in (0, 1, 2**31, 2**63, 2**100)}
    assert len(keys) == 5
    assert all(0 <= word < 2**31 for pair in keys for word in pair)


def test_words_do_not_depend_on_the_compiler():
    class Words(keras.Model):
        def call(self, x):
            rows = ops.cast(x[:, 0], "int32")
            return ops.cast(counter.bits(key(), rows, 0, 3), "float32")

    x = np.arange(4, dtype="float32")[:, None]
    model = Words()
    eager = numpy(model(x))
    model.compile(jit_compile=True)
    np.testing.assert_array_equal(model.predict(x, verbose=0), eager)


def test_parts_of_a_key_have_keys_of_their_own():
    whole = ops.convert_to_tensor(counter.key_from_seed(0))
    of_parts = [counter.key_of_part(whole, part) for part in range(3)]
    every = of_parts + [counter.key_of_part(one, part) for one in of_parts for part in range(3)]
    found = {tuple(numpy(one).tolist()) for one in every}
    assert len(found) == 12
    assert all(min(pair) >= 0 for pair in found)
    again = counter.key_of_part(whole, 2)
    np.testing.assert_array_equal(numpy(again), numpy(of_parts[2]))

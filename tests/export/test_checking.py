"""Each file is run in its runtime before it takes its place."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged, data, dense, set_weights, shallow
from tfp_ibnn.export import checking, frozen, onnx_operations
from tfp_ibnn.export.checking import _compare, _examples
from tfp_ibnn.export.inputs import inputs_of
from tfp_ibnn.export.reading import open_exported
from tfp_ibnn.export.served import Served

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow writes ONNX and LiteRT files"),
]


def of(model):
    return Served(model, inputs_of(model.inner, None))


class Logarithm(layers.Layer):
    """log(1 + x)."""

    def call(self, x):
        return ops.log1p(x)


def logarithm(shape):
    return averaged(keras.Sequential([keras.Input(shape), Logarithm()]), 1, head="point", seed=0)


def test_a_file_that_fails_never_replaces_one(tmp_path, monkeypatch):
    """Here by a product with a matrix, where there are other sizes."""
    squared = lambda of, x: of("MatMul", x, x)  # noqa: E731
    monkeypatch.setitem(onnx_operations._FORMULAS, "Log1p", squared)
    path = tmp_path / "m.onnx"
    path.write_text("mine")
    with pytest.raises(ValueError, match="fails for a batch of 1.*Give the inputs a fixed size"):
        ibnn.export(logarithm((None, 3)), path, format="onnx", overwrite=True)
    assert path.read_text() == "mine"
    assert [x.name for x in tmp_path.iterdir()] == ["m.onnx"]


def test_a_file_with_other_numbers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(onnx_operations._FORMULAS, "Log1p", lambda of, x: of("Exp", x))
    with pytest.raises(ValueError, match="returns another 'mean' than the model, by .*SavedModel"):
        ibnn.export(logarithm((4,)), tmp_path / "m.onnx", format="onnx")
    assert list(tmp_path.iterdir()) == []


def in_16_bits():
    parts = [layers.Dense(3, dtype="mixed_bfloat16"), dense(3, "softmax", dtype="mixed_bfloat16")]
    return averaged(set_weights(keras.Sequential([keras.Input((4,)), *parts])), 3, seed=0)


@pytest.mark.parametrize("name", ["m.onnx", "m.tflite"])
def test_mixed_precision_becomes_float32(name, tmp_path):
    """In the file; the model stays as it was."""
    mc, x = in_16_bits(), data(20, 4)
    before = np.asarray(mc(x)["mean"])
    format = {".onnx": "onnx", ".tflite": "litert"}[name[1:]]
    exported = open_exported(ibnn.export(mc, tmp_path / name, format=format))
    found = exported.predict(x, 20)["mean"]
    np.testing.assert_array_equal(mc(x)["mean"], before)
    with frozen.in_float32(mc):
        exact = np.asarray(mc(x)["mean"])
    np.testing.assert_allclose(found, exact, atol=1e-6)
    np.testing.assert_allclose(found, before, atol=0.02)
    assert np.abs(exact - before).max() > 1e-5


def test_a_file_that_cannot_be_loaded_is_refused(tmp_path, monkeypatch):
    """As those with numbers of 16 bits, which onnxruntime does not multiply."""
    monkeypatch.setattr(frozen, "in_float32", lambda model: contextlib.nullcontext())
    with pytest.raises(ValueError, match=r"not written, since it cannot be loaded.*SavedModel"):
        ibnn.export(in_16_bits(), tmp_path / "m.onnx", format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_float64_is_for_other_formats(tmp_path):
    inputs = keras.Input((4,), dtype="float64")
    model = keras.Model(inputs, dense(3, "softmax")(inputs))
    with pytest.raises(ValueError, match="float64, which LiteRT cannot.*dtype='float32'"):
        ibnn.export(model, tmp_path / "m.tflite", format="litert", draws=2)


def test_examples_have_sizes_that_the_model_takes():
    """Convolutions of 20 pixels do not fit into 8, but into 32, and then into 64."""
    parts = [layers.Conv2D(2, 20), layers.GlobalAveragePooling2D(), dense(3, "softmax")]
    model = set_weights(keras.Sequential([keras.Input((None, None, 1), name="images"), *parts]))
    shapes = [example.inputs["images"].shape for example in _examples(of(averaged(model, 2)))]
    assert shapes == [(1, 32, 32, 1), (2, 64, 64, 1)]
    numbers = [example.inputs["inputs"] for example in _examples(of(averaged(shallow(), 2)))]
    assert [x.shape for x in numbers] == [(1, 4), (2, 4)]
    assert all(0 <= x.min() < x.max() <= 1 for x in numbers)


def test_a_large_model_runs_once(monkeypatch):
    monkeypatch.setattr(checking, "_LARGE", 10)
    assert len(_examples(of(averaged(shallow(), 2)))) == 1


def test_a_model_that_takes_no_random_inputs_warns():
    inputs = keras.Input((3,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(1, 2)(inputs))
    mc = averaged(keras.Model(inputs, dense(3, "softmax")(hidden)), 2)
    with pytest.warns(UserWarning, match="not compared with the model.*exported_scores"):
        assert _examples(of(mc)) == []


def test_what_counts_as_the_same():
    """Rounding does; another number, shape or NaN does not."""
    served = of(averaged(shallow(), 2))
    mean = np.array([[1e4, 2.0]], "float32")
    nan = np.array([[np.nan, 2.0]], "float32")
    some = np.arange(300) % 2 == 0
    flipped = np.where(np.arange(300) < 3, ~some, some)
    for found, expected in (
        ({"mean": mean * (1 + 1e-6)}, {"mean": mean}),
        ({"mean": nan}, {"mean": nan}),
        ({"mean": mean, "variance": mean[:, 1:] + 1}, {"mean": mean, "variance": mean[:, 1:]}),
        ({"mean": mean, "set": flipped}, {"mean": mean, "set": some}),
    ):
        _compare(served, found, expected)
    for found, expected, words in (
        ({"mean": mean * 1.01}, {"mean": mean}, "returns another 'mean'"),
        ({"mean": nan}, {"mean": mean}, "returns another 'mean'"),
        ({"mean": mean[0]}, {"mean": mean}, r"in the shape \(2,\) instead of \(1, 2\)"),
        ({"mean": mean, "set": ~some}, {"mean": mean, "set": some}, "another 'set'"),
    ):
        with pytest.raises(ValueError, match=words):
            _compare(served, found, expected)

"""Scores of exported files: those of `MonteCarlo.evaluate`."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged, data, dense, set_weights, shallow
from tfp_ibnn.export.reading import Exported
from tfp_ibnn.export.scores import _likelihood_of, _unusual
from tfp_ibnn.layers import GaussianHead
from tfp_ibnn.likelihoods import Categorical

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow writes the files"),
]

FILES = {"saved_model": "folder", "onnx": "model.onnx", "litert": "model.tflite"}


def classes():
    return averaged(shallow(), 4, seed=0), data(50, 4), np.arange(50) % 3


def gaussian():
    inputs = keras.Input((4,), name="features")
    outputs = GaussianHead()(dense(2)(inputs))
    model = set_weights(keras.Model(inputs, outputs))
    return averaged(model, 4, seed=0), data(50, 4), data(50, 1, seed=1)


def several():
    inputs = keras.Input((4,), name="features")
    hidden = layers.Dense(3, "tanh")(inputs)
    outputs = {"digit": dense(3, "softmax")(hidden), "likes": dense(2, "sigmoid")(hidden)}
    model = set_weights(keras.Model(inputs, outputs))
    y = {"digit": np.arange(50) % 3, "likes": (data(50, 2) > 0).astype("float32")}
    head = {"digit": "softmax", "likes": "sigmoid"}
    return averaged(model, 4, seed=0, head=head), data(50, 4), y


@pytest.mark.parametrize(
    ("make", "format"),
    [
        (classes, "onnx"),
        (gaussian, "litert"),
        pytest.param(several, "onnx", marks=pytest.mark.slow),
        pytest.param(classes, "litert", marks=pytest.mark.slow),
        pytest.param(classes, "saved_model", marks=pytest.mark.slow),
        pytest.param(several, "litert", marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_evaluate(make, format, tmp_path):
    mc, x, y = make()
    weight = np.linspace(0.5, 2, 50)
    path = ibnn.export(mc, tmp_path / FILES[format], format=format)
    for options in ({}, {"sample_weight": weight}):
        expected = mc.evaluate(x, y, verbose=0, return_dict=True, **options)
        found = ibnn.exported_scores(path, x, y, batch_size=20, **options)
        assert found.keys() == expected.keys()
        for name, score in expected.items():
            assert found[name] == pytest.approx(score, abs=2e-5, rel=2e-5), name


def test_ood_scores_by_hand(tmp_path):
    """Of a detector by its score, else by the entropy."""
    mc, x, y = classes()
    ood = 3 * data(30, 4, seed=9)
    plain = ibnn.export(mc, tmp_path / "plain.onnx", format="onnx")
    of_known, of_unknown = (np.asarray(mc(part)["entropy"]) for part in (x, ood))
    expected = ibnn.metrics.auroc(of_known, of_unknown)
    assert ibnn.exported_scores(plain, x, y, ood=ood)["auroc"] == pytest.approx(expected, abs=1e-3)
    detector = ibnn.OODDetector(mc, "knn", k=3).fit(x, y)
    path = ibnn.export(detector, tmp_path / "detector.onnx", format="onnx")
    expected = detector.evaluate(x, ood)["auroc"]
    found = ibnn.exported_scores(path, x, y, ood=ood)["auroc"]
    assert found == pytest.approx(expected, abs=1e-3)
    assert abs(expected - 0.5) > 0.05


def test_padding_has_no_score():
    """The scores of positions that a file has are NaN at padding."""
    outputs = {"score": np.array([[1.0, np.nan], [2.0, 4.0]])}
    found = _unusual(Categorical(from_logits=False), outputs)
    np.testing.assert_array_equal(found, [1, 3])


def test_a_file_of_0_1_0_has_no_scores():
    exported = Exported(lambda **arrays: arrays, {"format": 1, "inputs": {}})
    with pytest.raises(ValueError, match="folder does not record what its outputs mean"):
        _likelihood_of(exported, "folder")


def test_as_many_arrays_as_inputs():
    facts = {"inputs": {name: {"dtype": "float32"} for name in ("wide", "deep")}}
    exported = Exported(lambda **arrays: arrays, facts)
    x = data(5, 4)
    assert exported.predict([x, x[:, :2]], 2)["deep"].shape == (5, 2)
    with pytest.raises(ValueError, match=r"the inputs \['wide', 'deep'\]; got 3 arrays"):
        exported.predict([x, x, x], 2)


def test_wrong_files_and_inputs(tmp_path):
    """The runtime's error, or a line; the file stays."""
    mc, x, y = classes()
    path = ibnn.export(mc, tmp_path / "model.onnx", format="onnx")
    lite = ibnn.export(mc, tmp_path / "model.tflite", format="litert")
    content = path.read_bytes()
    for inputs, targets, words in (
        (x, y[:9], "`x` and `y` must have the same length; got 50 and 9"),
        (x[:0], y[:0], "`x` holds no examples"),
        ({"other": x}, y, r"must hold the inputs \['inputs'\]; got \['other'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            ibnn.exported_scores(path, inputs, targets)
    for file in (path, lite):
        with pytest.raises(Exception, match="(?i)invalid|dimension|mismatch|shape"):
            ibnn.exported_scores(file, x[:, :3], y)
    assert path.read_bytes() == content
    with pytest.raises(FileNotFoundError, match="There is nothing at"):
        ibnn.exported_scores(tmp_path / "none.onnx", x, y)
    for file in (path, lite):
        file.write_bytes(file.read_bytes()[:200])
        with pytest.raises(Exception, match="(?i)protobuf|model|buffer"):
            ibnn.exported_scores(file, x, y)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="was not written by ibnn.export"):
        ibnn.exported_scores(tmp_path / "folder", x, y)


def test_a_likelihood_of_ones_own_has_no_scores(tmp_path):
    from tfp_ibnn import tfd

    model = keras.Sequential([keras.Input((4,)), dense(1)])
    head = lambda outputs: tfd.Poisson(log_rate=outputs)  # noqa: E731
    path = ibnn.export(averaged(model, 2, head=head), tmp_path / "m.onnx", format="onnx")
    with pytest.raises(ValueError, match="a custom likelihood"):
        ibnn.exported_scores(path, data(3, 4), np.zeros((3, 1)))

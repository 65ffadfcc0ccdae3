"""Export: what is in a file beside the prediction, what is refused, and the command."""

import json

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged, data, dense, set_weights, shallow
from tfp_ibnn.__main__ import main
from tfp_ibnn._core import command_line, extras
from tfp_ibnn.calibration.scaling import scaled_model
from tfp_ibnn.conversion.wrappers import innermost
from tfp_ibnn.export import exporting, frozen
from tfp_ibnn.export.command import run
from tfp_ibnn.export.exporting import _default_draws
from tfp_ibnn.export.inputs import inputs_of
from tfp_ibnn.export.reading import open_exported
from tfp_ibnn.export.served import Served

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow writes ONNX and LiteRT files"),
]

FILES = {"saved_model": "folder", "onnx": "model.onnx", "litert": "model.tflite"}
ALL = [pytest.param(x, marks=pytest.mark.slow if x == "saved_model" else ()) for x in FILES]


@pytest.mark.parametrize("format", ALL)
def test_facts_threshold_and_class_names(format, tmp_path):
    """A threshold refuses what `decide` refuses, and a file says what it is."""
    model = ibnn.TemperatureScaling(shallow())
    model.temperature.assign(2.0)
    mc = averaged(model, 4, seed=5)
    x = data(50, 4)
    mean = np.asarray(mc(x)["mean"])
    confidence = np.sort(mean.max(axis=1))
    threshold = float(confidence[24:26].mean())
    path = tmp_path / FILES[format]
    ibnn.export(mc, path, format=format, threshold=threshold, class_names=["a", "b", "c"])
    exported = open_exported(path)
    answer = exported.predict(x, batch_size=20)
    refused = ibnn.decide(mean, refuse=1 - threshold) == -1
    np.testing.assert_array_equal(answer["refuse"], refused)
    assert refused.sum() == 25
    facts = exported.facts
    assert facts["class_names"] == ["a", "b", "c"]
    assert (facts["samples"], facts["seed"], facts["temperature"]) == (4, 5, 2.0)
    assert facts["threshold"] == threshold
    assert facts["outputs"] == {"": "softmax"}
    assert facts["versions"]["keras"] == keras.__version__
    assert facts["inputs"] == {"inputs": {"shape": [None, 4], "dtype": "float32"}}


def test_what_is_not_a_number_is_refused():
    served = Served(averaged(shallow(), 2), inputs_of(shallow(), None), threshold=0.1)
    x = data(3, 4)
    x[1] = np.nan
    refused = served.serve(**{next(iter(served.inputs.specs)): keras.ops.convert_to_tensor(x)})
    assert np.asarray(refused["refuse"]).tolist() == [False, True, False]


def facts_of(model):
    return Served(model, inputs_of(innermost(model), None)).facts()


def test_what_a_decision_has_found_is_in_the_file(tmp_path):
    x, y = data(40, 4), np.arange(40) % 3
    sets = ibnn.Conformal(averaged(shallow(), 3), "raps", 0.8, by="class", k=2).fit(x, y)
    path = ibnn.export(sets, tmp_path / "m.onnx", format="onnx")
    facts = open_exported(path).facts
    decision = facts["decision"]
    assert decision.pop("thresholds") == pytest.approx(sets.thresholds.ravel().tolist())
    options = {"method": "raps", "coverage": 0.8, "by": "class", "k": 2, "penalty": 0.1}
    expected = {"kind": "Conformal", **options, "randomized": None, "per": "pixel", "share": 0.9}
    assert decision == expected
    assert {"tf2onnx", "onnx", "keras"} < facts["versions"].keys()


def test_the_parameters_of_a_scaling_are_facts():
    for scaling, expected in (
        (ibnn.TemperatureScaling(shallow()), {"kind": "TemperatureScaling", "temperature": 1.0}),
        (
            ibnn.VectorScaling(shallow()),
            {"kind": "VectorScaling", "scales": [1, 1, 1], "biases": [0, 0, 0]},
        ),
        (ibnn.IsotonicScaling(shallow()), {"kind": "IsotonicScaling"}),
        (shallow(), None),
    ):
        facts = facts_of(averaged(scaling, 2))
        assert facts["scaling"] == expected
        assert facts["temperature"] == (expected or {}).get("temperature")
        json.dumps(facts)


@pytest.mark.parametrize("kind", ["network", "posterior over weights"])
def test_the_temperature_that_calibrate_has_fitted_is_a_fact(kind):
    inputs = keras.Input((4,))
    inner = keras.Model(inputs, layers.Dense(3, "softmax")(inputs))
    likelihood = averaged(inner, 1).likelihood
    if kind != "network":
        inner = ibnn.DeepEnsemble([inner, keras.models.clone_model(inner)])
    facts = facts_of(scaled_model(likelihood, inner, 2.5))
    assert facts["scaling"] == {"kind": "TemperatureScaling", "temperature": 2.5}
    assert facts["temperature"] == 2.5


def test_thresholds_of_a_detector_for_several_rates_are_facts():
    detector = ibnn.OODDetector(averaged(shallow(), 2), "entropy").fit(data(200, 4))
    decision = facts_of(detector)["decision"]
    thresholds = {str(rate): detector.threshold(rate) for rate in (0.9, 0.95, 0.99)}
    assert decision["thresholds"] == thresholds
    assert decision["threshold"] == thresholds["0.95"]
    assert len(set(thresholds.values())) == 3


def test_a_detector_of_outputs_needs_no_fit(tmp_path):
    """It has a score then, and no threshold."""
    detector = ibnn.OODDetector(averaged(shallow(), 2), "entropy")
    path = ibnn.export(detector, tmp_path / "m.onnx", format="onnx")
    exported = open_exported(path)
    decision = exported.facts["decision"]
    assert (decision["score"], decision["reduction"]) == ("entropy", "mean")
    assert (decision["threshold"], decision["thresholds"]) == (None, {})
    x = data(5, 4)
    np.testing.assert_allclose(exported.predict(x, 5)["score"], detector.score(x), atol=1e-5)


def test_draws(tmp_path):
    """Those of the model, at most 32 without random numbers; or what is asked for."""
    mc = averaged(shallow(), 40)
    for model, options, expected in (
        (mc, {}, 32),
        (mc, {"draws": 34}, 34),
        (keras.Sequential([keras.Input((4,)), layers.Softmax()]), {}, 1),
    ):
        path = ibnn.export(model, tmp_path / "m.onnx", format="onnx", overwrite=True, **options)
        assert open_exported(path).facts["samples"] == expected


def softmax_network():
    """One that computes nothing else, so that many of them are traced quickly."""
    return keras.Sequential([keras.Input((3,)), layers.Softmax()])


def softmax_mixture(count):
    return ibnn.WeightMixture([softmax_network() for _ in range(count)])


def of_statistics(count):
    """MC batch normalization by mini-batches."""
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Softmax()])
    return ibnn.MonteCarlo(model, count, batch_norm=data(40, 3), seed=0).inner


def test_the_draws_of_a_finite_posterior_are_all_its_networks():
    """At most 32 by default, unless there are more networks; never more than in Python."""
    ensemble = ibnn.DeepEnsemble([softmax_network()] * 40)
    halves = [ibnn.DeepEnsemble([softmax_network()] * 20) for _ in range(2)]
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    gaussian = ibnn.Laplace(plain, head="softmax", from_logits=True)
    for model, expected in (
        (ensemble, 40),
        (softmax_mixture(40), 40),
        (ibnn.WeightMixture(halves), 40),
        (of_statistics(36), 36),
        (ibnn.DeepEnsemble([softmax_network()] * 3), 32),
        (gaussian, 32),
        (shallow(), 32),
    ):
        assert _default_draws(model, 128, "onnx") == expected
        assert _default_draws(model, 128, "saved_model") == 128
        assert _default_draws(model, 10, "onnx") == 10


def test_an_ensemble_is_whole_in_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(exporting, "_FIXED_DRAWS", 2)
    chain = [keras.Input((4,)), layers.Dense(3, "softmax")]
    models = [set_weights(keras.models.clone_model(keras.Sequential(chain)), i) for i in range(3)]
    ensemble = averaged(ibnn.DeepEnsemble(models), seed=0)
    path = ibnn.export(ensemble, tmp_path / "m.onnx", format="onnx")
    size = path.stat().st_size / 1e6
    assert capsys.readouterr().out == f"{path}: 3 networks, {size:.3g} MB.\n"
    x = data(5, 4)
    answer = open_exported(path).predict(x, 5)
    np.testing.assert_allclose(answer["epistemic"], ensemble(x)["epistemic"], atol=1e-6)
    exporting._print_size(path, 1)
    assert ": 1 network, " in capsys.readouterr().out


# -------------------------------------------------------------------------------------- refusals


class Noise(layers.Layer):
    """Draws random numbers of its own."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=None)


def network(shape, *parts):
    return set_weights(keras.Sequential([keras.Input(shape, name="features"), *parts]))


def independent():
    return averaged(shallow(), 3, independent=True)


def open_dropout():
    parts = [layers.Dense(3), layers.Dropout(0.5), layers.GlobalAveragePooling1D()]
    model = network((None, 4), *parts, layers.Dense(3, "softmax"))
    return averaged(model, 3, dropout=True)


def open_position():
    parts = [dense(3, noise="position"), layers.GlobalAveragePooling1D()]
    return averaged(network((None, 4), *parts, layers.Dense(3, "softmax")), 3)


def open_recurrence():
    return averaged(network((None, 4), layers.GRU(2), dense(3, "softmax")), 2)


def noisy():
    return averaged(network((4,), Noise(), dense(3, "softmax")), 3)


def strings():
    inputs = keras.Input((), dtype="string", name="text")
    words = layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=2)(inputs)
    outputs = dense(3, "softmax")(layers.Flatten()(layers.Embedding(4, 2)(words)))
    return averaged(keras.Model(inputs, outputs), 2)


def numbers():
    return averaged(shallow(None), 2, head="point")


def labels():
    return averaged(keras.Sequential([keras.Input((4,)), dense(2, "sigmoid")]), 2)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (independent, {}, "without independent=True"),
        (open_dropout, {}, "depends on the size of its inputs.*Give the inputs a fixed size"),
        (open_position, {}, "depends on the size of its inputs"),
        (open_recurrence, {}, "a loop whose length is not fixed.*give the inputs a fixed length"),
        (noisy, {}, "draws random numbers by itself"),
        (strings, {}, "'text' takes strings.*after its TextVectorization"),
        (numbers, {"threshold": 0.5}, "`threshold` is for the confidence of a classifier"),
        (labels, {"threshold": 0.9}, "`threshold` refuses examples with one answer.* 2 labels"),
        (shallow, {"class_names": "abc"}, "`class_names` must be a list of names.*'abc'"),
        (shallow, {"class_names": ["a", "b"]}, r"got 2 names, and outputs of \[3\] classes"),
        (numbers, {"class_names": ["a", "b", "c"]}, "or be left out for numbers; got 3 names"),
        (shallow, {"draws": 2, "samples": 2}, "`samples` is another name for `draws`"),
        (shallow, {"quantization": "int8"}, "`quantization`.* for format='litert'; got 'onnx'"),
        (shallow, {"format": "tflite"}, "`format` must be .*'litert'.* got 'tflite'"),
        (shallow, {"format": "litert"}, "`path` must end in '.tflite'"),
    ],
)
def test_what_no_file_can_hold_is_refused(make, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        ibnn.export(make(), tmp_path / "m.onnx", **{"format": "onnx", **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("largest", [50, 400])
def test_a_file_beyond_its_limit_is_refused(largest, tmp_path, monkeypatch):
    """For its weights (24 numbers), or for its draws (64 times 4)."""
    monkeypatch.setattr(frozen, "_LARGEST", largest)
    with pytest.raises(ValueError, match="files end at 2 GB: give fewer `draws`, or export a Sav"):
        ibnn.export(shallow(), tmp_path / "m.onnx", format="onnx", draws=64)
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_of_litert_are_refused(tmp_path):
    path = tmp_path / "m.tflite"
    for options, words in (
        ({"quantization": "int4"}, "`quantization` must be"),
        ({"quantization": "int8"}, "needs `representative_data`"),
        ({"representative_data": data(2, 4)}, "`representative_data` is for quantization='int8'"),
    ):
        with pytest.raises(ValueError, match=words):
            ibnn.export(shallow(), path, format="litert", **options)
    assert list(tmp_path.iterdir()) == []


def test_decisions_keep_their_draws(tmp_path):
    detector = ibnn.OODDetector(averaged(shallow(), 2), "entropy").fit(data(9, 4))
    with pytest.raises(ValueError, match="`draws`, `samples` and `seed` are fixed by `fit`"):
        ibnn.export(detector, tmp_path / "m.onnx", format="onnx", draws=4)


def test_a_file_is_replaced_only_if_asked(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists: choose another path, or give overwrite=True"):
        ibnn.export(shallow(), path, format="onnx")
    with pytest.raises(ValueError, match="draws random numbers"):
        ibnn.export(noisy(), path, format="onnx", overwrite=True)
    assert path.read_text() == "mine"
    assert [x.name for x in tmp_path.iterdir()] == ["m.onnx"]
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match="must be a file; .* is a folder"):
        ibnn.export(shallow(), tmp_path / "folder.onnx", format="onnx", overwrite=True)


def test_a_missing_extra_says_what_to_install(tmp_path, monkeypatch):
    import sys

    for extra, format in (("onnx", "onnx"), ("litert", "litert")):
        for module in extras.EXTRAS[extra]:
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf'pip install "tfp_ibnn\[{extra}\]"'):
            ibnn.export(shallow(), tmp_path / FILES[format], format=format)


# ----------------------------------------------------------------------------------- the command


def test_the_command(tmp_path, capsys):
    model = shallow()
    file = tmp_path / "model.keras"
    model.save(file)
    words = ["export", str(file), "--format", "onnx", "--draws", "3", "--seed", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"Written to {tmp_path / 'model.onnx'}.\n"
    x = data(5, 4)
    answer = open_exported(tmp_path / "model.onnx").predict(x, 5)
    expected = averaged(model, 3, seed=1)(x)
    np.testing.assert_allclose(answer["epistemic"], expected["epistemic"], atol=1e-6)
    assert main(words) == 1
    assert "exists: choose another path" in capsys.readouterr().err
    mc = tmp_path / "mc.keras"
    averaged(model, 3).save(mc)
    assert main(["export", str(mc), "--format", "onnx", "--head", "softmax"]) == 1
    assert "already set in a MonteCarlo" in capsys.readouterr().err


def test_the_command_quantizes(tmp_path, capsys):
    file, examples = tmp_path / "model.keras", tmp_path / "x.npy"
    shallow().save(file)
    words = ["export", str(file), "--format", "litert", "--draws", "2", "--quantization", "int8"]
    words += ["--representative-data", str(examples)]
    examples.write_text("no numbers")
    assert main(words) == 1
    assert "--representative-data must be an .npy file" in capsys.readouterr().err
    np.save(examples, data(20, 4))
    assert main(words) == 0
    assert open_exported(tmp_path / "model.tflite").facts["quantization"] == "int8"


def test_the_command_averages_all_members(tmp_path, monkeypatch):
    """The networks of an ensemble have no noise, but there are several."""
    plain = [keras.Sequential([keras.Input((4,)), layers.Dense(3)]) for _ in range(2)]
    members = [set_weights(model, seed) for seed, model in enumerate(plain)]
    monkeypatch.setattr(keras.saving, "load_model", lambda path: ibnn.DeepEnsemble(members))
    run(str(tmp_path / "m.keras"), format="onnx", head="softmax", from_logits=True)
    assert open_exported(tmp_path / "m.onnx").facts["samples"] == 2


def test_the_command_runs_on_tensorflow(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    command_line.choose_backend(command_line.parse(["calibrate", "m", "d", "--output", "o"]))
    assert command_line.os.environ["KERAS_BACKEND"] == "jax"
    command_line.choose_backend(command_line.parse(["export", "model.keras"]))
    assert command_line.os.environ["KERAS_BACKEND"] == "tensorflow"


def test_the_shell_assumes_no_batch_size():
    options = command_line.parse(["calibrate", "m", "d", "--output", "o"])
    assert options.batch_size is None

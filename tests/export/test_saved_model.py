"""Export: the file says what the model says, takes TensorFlow alone, and is written whole."""

import collections
import hashlib
import importlib
import importlib.metadata
import json
import random
import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests import saved_files
from tests.monte_carlo_tools import JAX, averaged, data, dense, set_weights, shallow, statistics
from tfp_ibnn.export import command
from tfp_ibnn.export.inputs import inputs_of
from tfp_ibnn.export.saved_model import MANIFEST
from tfp_ibnn.layers import GaussianHead

ROOT = Path(__file__).parents[2]
S = 6


def on_tensorflow(test):
    return pytest.mark.once(pytest.mark.skipif(JAX, reason="TensorFlow writes SavedModels")(test))


def close(actual, desired, tolerance=1e-5):
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)


def same(actual, desired):
    assert actual.keys() == desired.keys()
    for key in desired:
        close(actual[key], desired[key])


def ask(path, signature, **inputs):
    import tensorflow as tf

    function = tf.saved_model.load(str(path)).signatures[signature]
    return run(function, **inputs)


def said(mc, x):
    """What a model in memory says, without `predict`, which is compiled anew for each."""
    if mc.independent:  # each call draws anew
        return mc.predict(x, batch_size=100, verbose=0)
    return {name: np.asarray(value) for name, value in mc(x).items()}


def run(function, **inputs):
    import tensorflow as tf

    outputs = function(**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}


@on_tensorflow
@pytest.mark.slow
def test_what_jax_trained_and_saved_is_exported_by_tensorflow(tmp_path):
    """The expected numbers are those that JAX computed when it wrote the file."""
    path = saved_files.FOLDER / ibnn.__version__ / "jax" / "planar.keras"
    known = json.loads(path.with_name("expected.json").read_text())["planar"]
    model = keras.saving.load_model(path)
    ibnn.export(model, tmp_path / "1", samples=8, seed=0)
    close(ask(tmp_path / "1", "serve", features=saved_files.INPUTS)["mean"], known["mean"])
    at_mean = ask(tmp_path / "1", "deterministic", features=saved_files.INPUTS)["mean"]
    close(at_mean, known["at_mean"])


@pytest.mark.skipif(not JAX, reason="what is said where there is no TensorFlow")
def test_jax_says_where_to_export(tmp_path):
    model = keras.Sequential([keras.Input((4,)), dense(3, "softmax")])
    for write in (lambda path: ibnn.export(model, path), ibnn.MonteCarlo(model, 2).export):
        with pytest.raises(RuntimeError, match="'jax'.*KERAS_BACKEND=tensorflow.*export.py"):
            write(tmp_path / "1")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ what the file says


def chain(shape, *parts):
    return set_weights(keras.Sequential([keras.Input(shape, name="features"), *parts]))


def wide_and_deep(kind):
    """A network of two inputs, whose names are not in the order of the alphabet."""
    wide, deep = keras.Input((3,), name="wide"), keras.Input((2,), name="deep")
    hidden = layers.Concatenate()([wide, deep])
    inputs = {"list": [wide, deep], "dict": {"wide": wide, "deep": deep}}[kind]
    return set_weights(keras.Model(inputs, dense(3, "softmax")(hidden)))


def mixture():
    return ibnn.MixturePosterior(components=3, mean_spread=0.5)


# Name -> (model, options of the MonteCarlo, shapes of the inputs by name).
CASES = {
    "softmax": (lambda: chain((4,), dense(5, "tanh"), dense(3, "softmax")), {}, {"features": (4,)}),
    "sigmoid": (
        lambda: chain((4,), layers.Dense(5, "tanh"), dense(2)),
        {"head": "sigmoid", "from_logits": True, "sampling": "qmc"},
        {"features": (4,)},
    ),
    "gaussian": (
        lambda: chain((4,), layers.Dense(4, "tanh"), dense(4, "tanh"), GaussianHead()),
        {"sampling": "antithetic", "interval": 0.9},
        {"features": (4,)},
    ),
    "point": (
        lambda: chain((4,), dense(4, "tanh"), layers.Dropout(0.5), dense(2)),
        {"head": "point", "dropout": True, "return_samples": True},
        {"features": (4,)},
    ),
    "position": (
        lambda: chain(
            (5, 4), dense(3, "tanh", noise="position"), layers.Flatten(), dense(3, "softmax")
        ),
        {"chunk_size": 4},
        {"features": (5, 4)},
    ),
    "mixture": (
        lambda: chain(
            (4,), dense(5, "tanh", posterior=mixture()), dense(3, "softmax", posterior=mixture())
        ),
        {},
        {"features": (4,)},
    ),
    "list": (lambda: wide_and_deep("list"), {}, {"wide": (3,), "deep": (2,)}),
    "dict": (
        lambda: wide_and_deep("dict"),
        {"independent": True},
        {"wide": (3,), "deep": (2,)},
    ),
}


class Case:
    """A model in memory and in a file, with inputs."""

    def __init__(self, name, path):
        import tensorflow as tf

        make, self.options, shapes = CASES[name]
        self.model = make()
        self.mc = averaged(self.model, S, seed=3, **self.options)
        self.path = ibnn.export(self.mc, path)
        self.signatures = tf.saved_model.load(str(path)).signatures
        numbered = enumerate(shapes.items())
        self.x = {key: data(100, *shape, seed=number) for number, (key, shape) in numbered}

    def named(self, count):
        return {key: value[:count] for key, value in self.x.items()}

    def packed(self, count):
        """The inputs as the model in memory takes them."""
        named = self.named(count)
        if len(named) == 1:
            return named["features"]
        return named if isinstance(self.model.input, dict) else list(named.values())

    def ask(self, signature, count, **more):
        return run(self.signatures[signature], **self.named(count), **more)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """A function that exports a case the first time that it is asked for."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = Case(name, tmp_path_factory.mktemp(name) / "1")
        return known[name]

    return get


# Draws of noise, of dropout, and of components.
QUICK = ("softmax", "point", "mixture")


every_case = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES],
)


@on_tensorflow
@every_case
def test_the_file_says_what_the_model_says(cases, name):
    case = cases(name)
    for count in (1, 7, 100):
        served, again = case.ask("serve", count), case.ask("serve", count)
        same(served, said(case.mc, case.packed(count)))
        assert all(np.array_equal(served[key], again[key]) for key in served)
    assert case.signatures["serve"].structured_input_signature[1].keys() == case.x.keys()


@on_tensorflow
@every_case
def test_seeds_are_the_networks_that_are_averaged(cases, name):
    case = cases(name)
    served = case.ask("serve", 7)["mean"]
    draws = [case.ask("sample", 7, seed=number)["mean"] for number in range(2 * S)]
    close(np.mean(draws[:S], axis=0), served)
    assert np.abs(np.mean(draws[S:], axis=0) - served).max() > 1e-3
    assert np.abs(draws[0] - draws[1]).max() > 1e-3
    assert np.isfinite(case.ask("sample", 7, seed=2**31 - 1)["mean"]).all()


@on_tensorflow
@every_case
def test_deterministic_is_without_noise(cases, name):
    case = cases(name)
    options = {key: case.options[key] for key in ("head", "from_logits") if key in case.options}
    with ibnn.noise_off(case.model):
        expected = statistics(averaged(case.model, 1, **options), case.packed(7))
        raw = keras.ops.convert_to_numpy(case.model(case.packed(7)))
    found = case.ask("deterministic", 7)
    same(found, {key: expected[key] for key in ("mean", "aleatoric")})
    if name == "sigmoid":
        raw = 1 / (1 + np.exp(-raw))
    close(found["mean"], raw[:, : found["mean"].shape[1]])


# ------------------------------------------------------------------------------------- the inputs


def test_each_input_keeps_its_own_name_in_any_order_of_the_keys():
    wide, deep = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    outputs = dense(3, "softmax")(layers.Concatenate()([wide, deep]))
    for kind in (dict, collections.OrderedDict):
        inputs = inputs_of(keras.Model(kind(wide=wide, deep=deep), outputs), None)
        shapes = {name: spec.shape for name, spec in inputs.specs.items()}
        assert shapes == {"wide": (None, 3), "deep": (None, 2)}
        packed = inputs.pack({"wide": 1, "deep": 2})
        assert dict(packed) == {"wide": 1, "deep": 2}


def test_only_equal_names_are_numbered():
    def names(*given):
        specs = [keras.InputSpec(shape=(None, 4), name=name) for name in given]
        return list(inputs_of(shallow(), specs).specs)

    assert names("age", "size") == ["age", "size"]
    assert names("age", "inputs", "inputs") == ["age", "inputs_0", "inputs_1"]
    with pytest.raises(ValueError, match="different names.*'x_0', 'x_0', 'x_1'"):
        names("x", "x_0", "x")


@on_tensorflow
def test_names_of_inputs_become_those_that_tensorflow_takes(tmp_path):
    inputs = [keras.Input((2,), name=name) for name in ("größe", "1 a-b", "x")]
    model = set_weights(keras.Model(inputs, dense(3, "softmax")(layers.Concatenate()(inputs))))
    mc = averaged(model, 2, seed=0)
    x = [data(3, 2, seed=number) for number in range(3)]
    path = ibnn.export(mc, tmp_path / "1")
    served = ask(path, "serve", gr__e=x[0], inputs_1_a_b=x[1], x=x[2])
    same(served, said(mc, x))


@on_tensorflow
def test_inputs_without_names_whole_numbers_and_a_vocabulary(tmp_path):
    words, numbers = keras.Input((2,), dtype="int64"), keras.Input((2,))
    table = layers.IntegerLookup(vocabulary=[10, 20, 30])
    hidden = layers.Flatten()(layers.Embedding(4, 3)(table(words)))
    hidden = layers.Concatenate()([hidden, numbers])
    model = set_weights(keras.Model([words, numbers], dense(3, "softmax")(hidden)))
    mc = averaged(model, 2, seed=0)
    x = [np.array([[10, 30], [20, 99]], "int64"), data(2, 2)]
    path = ibnn.export(mc, tmp_path / "1")
    same(ask(path, "serve", inputs_0=x[0], inputs_1=x[1]), said(mc, x))


class Own(keras.Model):
    """A model whose `call`, and what it is made of, is its own."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, dense(3, "softmax")

    def call(self, inputs):
        return self.layer(self.function(inputs))


@on_tensorflow
def test_a_model_of_its_own_needs_a_signature(tmp_path):
    x, y = data(5, 4), data(5, 4, seed=1)
    single = Own(lambda x: 2 * x)
    several = Own(lambda named: named["x"] - named["y"])
    single(x)
    several({"x": x, "y": y})
    mc = averaged(single, 2, seed=0, from_logits=False)
    with pytest.raises(ValueError, match="inputs of model 'own.*' are unknown.*input_signature="):
        ibnn.export(mc, tmp_path / "1")
    for signature in ([], {}):
        with pytest.raises(ValueError, match="`input_signature` must hold"):
            ibnn.export(mc, tmp_path / "1", input_signature=signature)
    with pytest.raises(ValueError, match="InputSpec with a shape"):
        ibnn.export(mc, tmp_path / "1", input_signature={"x": keras.InputSpec(ndim=2)})
    assert list(tmp_path.iterdir()) == []
    spec = keras.InputSpec(shape=(None, 4), dtype="float32")
    path = ibnn.export(mc, tmp_path / "1", input_signature={"x": spec})
    same(ask(path, "serve", x=x[:2]), said(mc, x[:2]))
    mc = averaged(several, 2, seed=0, from_logits=False)
    path = ibnn.export(mc, tmp_path / "2", input_signature={"x": x, "y": y})
    same(ask(path, "serve", x=x[:2], y=y[:2]), said(mc, {"x": x[:2], "y": y[:2]}))


@pytest.mark.once
def test_a_signature_in_the_forms_of_keras():
    spec = keras.InputSpec(shape=(None, 4), dtype="float32")
    named = keras.InputSpec(shape=(None, 4), dtype="float32", name="flowers")
    for signature, names, packed in (
        (spec, ["inputs"], 0),
        ([named], ["flowers"], 0),
        ({"x": spec}, ["x"], 0),
        ([{"x": spec}], ["x"], {"x": 0}),
        ([spec, spec], ["inputs_0", "inputs_1"], [0, 1]),
        ([{"y": spec, "x": named}], ["x", "y"], {"x": 0, "y": 1}),
    ):
        inputs = inputs_of(Own(None), signature)
        assert inputs.specs == dict.fromkeys(names, ((None, 4), "float32"))
        assert inputs.pack({name: number for number, name in enumerate(names)}) == packed


@on_tensorflow
def test_kerass_own_verb_writes_the_same(cases, tmp_path):
    case, path = cases("softmax"), tmp_path / "1"
    path.mkdir()
    (path / "saved_model.pb").write_text("an old one")
    case.mc.export(str(path), overwrite=True)
    written, other = (
        {x.relative_to(folder) for x in folder.rglob("*")} for folder in (path, case.path)
    )
    assert written == other
    manifest, other = (json.loads((x / MANIFEST).read_text()) for x in (path, case.path))
    del manifest["sha256"], other["sha256"]
    assert manifest == other
    same(ask(path, "serve", **case.named(7)), case.ask("serve", 7))


@on_tensorflow
def test_a_scaled_classifier(tmp_path):
    """Never called, but fitted."""
    inputs = keras.Input((4,), name="flowers")
    model = set_weights(keras.Model(inputs, layers.Dense(3)(inputs)))
    x = data(30, 4)
    scaling = ibnn.TemperatureScaling(model).fit(x, np.arange(30) % 3)
    ibnn.export(scaling, tmp_path / "1")
    logits = model.predict(x, verbose=0) / float(scaling.temperature)
    exponentials = np.exp(logits)
    expected = exponentials / exponentials.sum(axis=-1, keepdims=True)
    close(ask(tmp_path / "1", "serve", flowers=x)["mean"], expected)


@pytest.mark.slow
@on_tensorflow
def test_a_scaled_average(tmp_path):
    mc = averaged(shallow(), 2, seed=0)
    scaling = ibnn.TemperatureScaling(mc)
    scaling.temperature.assign(2.0)
    path = ibnn.export(scaling, tmp_path / "1")
    x = data(3, 4)
    close(ask(path, "serve", inputs=x)["mean"], scaling(x))


# ------------------------------------------------------------------------ the model and the folder


@on_tensorflow
def test_the_model_and_the_file_do_not_touch_each_other(eagerly, tmp_path):
    model = shallow()
    model.compile("sgd", "sparse_categorical_crossentropy")
    x = data(7, 4)
    before = values(model)
    states = random.getstate(), np.random.get_state()[1].tolist()
    path = ibnn.export(model, tmp_path / "1", samples=2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    for value, old in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(value, old)
    served = ask(path, "serve", inputs=x)
    model.fit(x, np.zeros(7, int), epochs=2, verbose=0)
    pairs = zip(values(model), before, strict=True)
    assert max(np.abs(value - old).max() for value, old in pairs) > 1e-3
    same(ask(path, "serve", inputs=x), served)


def values(model):
    return [keras.ops.convert_to_numpy(variable).copy() for variable in model.variables]


@on_tensorflow
def test_samples_and_seed_are_those_that_are_given(tmp_path):
    x, mc = data(7, 4), averaged(shallow(), S)
    before = values(mc)
    path = ibnn.export(mc, tmp_path / "1", samples=3, seed=2**40)
    for value, old in zip(values(mc), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert (mc.samples, mc.seed) == (S, None)
    expected = said(averaged(mc.inner, 3, seed=2**40), x)
    same(ask(path, "serve", inputs=x), expected)
    same(ask(path, "serving_default", inputs=x), expected)
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["samples"], manifest["seed"]) == (3, 2**40)


@on_tensorflow
def test_a_source_tree_that_is_not_installed_exports(tmp_path, monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    path = ibnn.export(averaged(shallow(), 2, seed=1), tmp_path / "1")
    assert json.loads((path / MANIFEST).read_text())["versions"]["tfp_ibnn"] == ibnn.__version__


@on_tensorflow
def test_manifest(cases):
    path = cases("list").path
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["inputs"]["wide"] == {"shape": [None, 3], "dtype": "float32"}
    assert list(manifest["inputs"]) == ["wide", "deep"]
    assert manifest["signatures"] == ["serve", "sample", "deterministic"]
    assert manifest["versions"]["keras"] == keras.__version__
    files = {x.relative_to(path).as_posix(): x for x in path.rglob("*") if x.is_file()}
    assert files.pop(MANIFEST)
    assert manifest["sha256"] == {
        name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()
    }


@on_tensorflow
def test_the_signatures_as_tensorflows_own_tool_shows_them(cases, capsys):
    from tensorflow.python.tools import saved_model_cli

    path = str(cases("list").path)
    given = {"inputs['wide']", "inputs['deep']"}
    got = {"outputs['mean']", "outputs['aleatoric']"}
    more = {f"outputs['{key}']" for key in ("variance", "entropy", "epistemic", "total_variance")}
    for name, expected in (
        ("serve", given | got | more),
        ("sample", given | got | {"inputs['seed']"}),
        ("deterministic", given | got),
    ):
        saved_model_cli._show_inputs_outputs(path, "serve", name)
        text = capsys.readouterr().out
        assert set(re.findall(r"(?:in|out)puts\['\w+'\]", text)) == expected
        assert "Method name is: tensorflow/serving/predict" in text


@on_tensorflow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "`samples` must be a whole number of at least 1; got 0"),
        ({"seed": -1}, "`seed` must be a whole number of at least 0; got -1"),
        ({"seed": 0.5}, "`seed` must be a whole number"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        ibnn.export(shallow(), tmp_path / "1", **options)
    assert list(tmp_path.iterdir()) == []


@on_tensorflow
def test_an_input_named_seed_is_refused(tmp_path):
    inputs = keras.Input((4,), name="seed")
    model = keras.Model(inputs, dense(3, "softmax")(inputs))
    with pytest.raises(ValueError, match="called 'seed', which the file uses itself; got"):
        ibnn.export(ibnn.MonteCarlo(model, 2), tmp_path / "1")


@on_tensorflow
def test_what_is_there_is_refused(tmp_path):
    mc = ibnn.MonteCarlo(shallow(), 2)
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        ibnn.export(mc, file, overwrite=True)
    folder.mkdir()
    (folder / "mine").write_text("mine")
    with pytest.raises(ValueError, match="not empty.*overwrite"):
        ibnn.export(mc, folder)
    with pytest.raises(ValueError, match="contains no SavedModel"):
        ibnn.export(mc, folder, overwrite=True)
    assert (file.read_text(), (folder / "mine").read_text()) == ("mine", "mine")


@on_tensorflow
def test_what_is_there_is_replaced_if_asked(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    (folder / "saved_model.pb").write_text("an old one")
    (folder / "stale").write_text("of the old one")
    link.symlink_to(folder)
    ibnn.export(shallow(), link, samples=2, seed=9, overwrite=True)
    assert json.loads((folder / MANIFEST).read_text())["seed"] == 9
    assert not (folder / "stale").exists()
    assert link.is_symlink()
    assert {x.name for x in tmp_path.iterdir()} == {"folder", "link"}


@on_tensorflow
def test_an_export_that_fails_leaves_all_as_it_was(cases, tmp_path, monkeypatch):
    import tensorflow as tf

    case = cases("softmax")
    old = tmp_path / "old"
    shutil.copytree(case.path, old)
    for path, error in ((tmp_path / "new", KeyboardInterrupt), (old, OSError)):

        def half(module, folder, signatures, error=error):
            Path(folder).mkdir()
            (Path(folder) / "saved_model.pb").write_bytes(b"half")
            raise error

        monkeypatch.setattr(tf.saved_model, "save", half)
        with pytest.raises(error):
            ibnn.export(shallow(), path, samples=2, overwrite=True)
    assert [x.name for x in tmp_path.iterdir()] == ["old"]
    same(ask(old, "serve", **case.named(7)), case.ask("serve", 7))


# ------------------------------------------------------------------------------ scripts/export.py


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    return importlib.import_module("export")


@on_tensorflow
@pytest.mark.slow
def test_the_script_exports_what_was_saved(script, tmp_path, capsys):
    mc, x = averaged(shallow(), 2, seed=3, sampling="antithetic"), data(7, 4)
    mc.save(tmp_path / "mc.keras")
    mc.inner.save(tmp_path / "model.keras")
    assert script.main([str(tmp_path / "mc.keras"), str(tmp_path / "1")]) == 0
    same(ask(tmp_path / "1", "serve", inputs=x), mc.predict(x, verbose=0))
    options = ["--samples", "4", "--seed", "5", "--head", "softmax", "--no-from-logits"]
    arguments = [str(tmp_path / "model.keras"), str(tmp_path / "1"), *options]
    assert script.main(arguments) == 1
    assert "overwrite" in capsys.readouterr().err
    assert script.main([*arguments, "--overwrite"]) == 0
    expected = said(averaged(mc.inner, 4, seed=5), x)
    same(ask(tmp_path / "1", "serve", inputs=x), expected)
    assert "Written to" in capsys.readouterr().out


@on_tensorflow
def test_the_script_hands_on_its_options(script, monkeypatch):
    given = {}
    monkeypatch.setattr(command, "run", lambda *paths, **options: given.update(options))
    words = ["m.keras", "m.tflite", "--format", "litert", "--draws", "3", "--threshold", "0.5"]
    words += ["--class-names", "a", "b", "--quantization", "int8", "--representative-data", "x.npy"]
    assert script.main(words) == 0
    expected = {"format": "litert", "draws": 3, "threshold": 0.5, "class_names": ["a", "b"]}
    expected |= {"quantization": "int8", "representative_data": "x.npy"}
    assert {name: given[name] for name in expected} == expected


@on_tensorflow
def test_the_script_says_what_is_wrong_on_one_line(script, tmp_path, capsys):
    def fails(code, words, *arguments):
        assert script.main([str(argument) for argument in arguments]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert words in line

    (tmp_path / "broken.keras").write_text("no model")
    out = tmp_path / "out"
    fails(1, "none.keras", tmp_path / "none.keras", out)
    fails(1, "broken.keras", tmp_path / "broken.keras", out)
    model = keras.Sequential([keras.Input((2,)), layers.Lambda(lambda x: x), dense(2)])
    model.save(tmp_path / "lambda.keras")
    fails(1, "Lambda", tmp_path / "lambda.keras", out)
    ibnn.MonteCarlo(shallow(), 2).save(tmp_path / "mc.keras")
    fails(2, "--head", tmp_path / "mc.keras", out, "--head", "softmax")
    assert not out.exists()
    for option in ("--samples=0", "--seed=-1", "--head=no"):
        with pytest.raises(SystemExit) as caught:
            script.main(["model.keras", "out", option])
        assert caught.value.code == 2
        assert option.split("=")[0] in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ LiteRT


@pytest.mark.slow
@on_tensorflow
def test_litert_agrees_with_the_deterministic_signature(tmp_path):
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    parts = [layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization()]
    parts += [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(3)]
    det = keras.Sequential([keras.Input((8, 8, 1), name="images"), *parts])
    sto = set_weights(ibnn.to_stochastic(det, ibnn.NormalPlanar1d(), train_size=100))
    path = ibnn.export(ibnn.MonteCarlo(sto, 2, from_logits=True), tmp_path / "1")
    file = tmp_path / "model.tflite"
    ibnn.to_deterministic(sto).export(file, format="litert", verbose=False)
    x = data(5, 8, 8, 1)
    lite = interpreter.Interpreter(model_path=str(file))
    (given,), (got,) = lite.get_input_details(), lite.get_output_details()
    lite.resize_tensor_input(given["index"], x.shape)
    lite.allocate_tensors()
    lite.set_tensor(given["index"], x)
    lite.invoke()
    exponentials = np.exp(lite.get_tensor(got["index"]))
    expected = ask(path, "deterministic", images=x)["mean"]
    close(exponentials / exponentials.sum(axis=-1, keepdims=True), expected)
    assert np.abs(expected - 1 / 3).max() > 0.05

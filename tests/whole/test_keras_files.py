"""Saved models and checkpoints: what they keep, and that those of earlier versions still load."""

import json
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests import registry, saved_files

BACKEND = keras.backend.backend()
# Those of a version; and in "named" those of models of `StochasticDense` and `StochasticConv2D`:
# "functions" was written when these returned a `Stochastic`, "classes" before that.
FILES = sorted(saved_files.FOLDER.glob("*/*/*.keras"))
# Each backend reads the other's files; on JAX a few are enough.
ON_BOTH = [*saved_files.WRITTEN["jax"], "classes", "functions"]
MARKED = [
    path if path.stem in ON_BOTH else pytest.param(path, marks=pytest.mark.once) for path in FILES
]


def label(path):
    return "-".join(path.relative_to(saved_files.FOLDER).with_suffix("").parts)


def kind(posterior):
    """What tells the recipes apart: the classes of a posterior and its flows, and its KL."""
    flows = {type(flow).__name__ for flow in getattr(posterior, "flows", ())}
    return type(posterior).__name__, frozenset(flows), getattr(posterior, "kl", None)


def expected(path):
    return json.loads(path.with_name("expected.json").read_text())[path.stem]


def test_there_is_a_file_of_every_recipe():
    made = [make() for make in saved_files.RECIPES.values()]
    for name, recipe in registry.RECIPES.items():
        known = kind(recipe())
        assert any(kind(posterior) == known for posterior in made), name
    for backend, recipes in saved_files.WRITTEN.items():
        folder = saved_files.FOLDER / ibnn.__version__ / backend
        assert sorted(path.stem for path in folder.glob("*.keras")) == sorted(recipes)


@pytest.mark.parametrize("path", MARKED, ids=label)
def test_files_of_all_versions_load_and_mean_the_same(path):
    known = expected(path)
    found = saved_files.describe(keras.saving.load_model(path))
    for name in ("at_mean", "mean"):
        np.testing.assert_allclose(found[name], known[name], rtol=0, atol=2e-6)
    assert found["random_states"] == known["random_states"]
    assert found["steps"] == known["steps"] == 2
    for name in ("learning_rates", "momentum"):
        np.testing.assert_allclose(found[name], known[name], rtol=1e-5)


def test_named_layers_of_files_keep_their_kinds_and_what_is_frozen():
    path = saved_files.FOLDER / "named" / BACKEND / "classes.keras"
    model = keras.saving.load_model(path)
    conv, frozen, logits = ibnn.stochastic_layers(model)
    assert type(conv) is ibnn.StochasticConv2D
    assert type(frozen) is type(logits) is ibnn.StochasticDense
    assert (conv.noise, frozen.layer.use_bias, logits.layer.units) == ("position", False, 3)
    assert [layer.layer.trainable for layer in (conv, frozen, logits)] == [True, False, True]


@pytest.mark.parametrize("name", ["0.1.0/{}/planar", "0.1.0/{}/mixture", "named/{}/classes"])
def test_a_loaded_model_trains_on_with_the_noise_that_follows(eagerly, name):
    path = saved_files.FOLDER / f"{name.format(BACKEND)}.keras"
    losses = saved_files.next_losses(keras.saving.load_model(path))
    np.testing.assert_allclose(losses, expected(path)["next_losses"], rtol=1e-4)


def test_a_checkpoint_of_the_first_version_resumes(eagerly):
    """Its whole numbers are int32, which no variable is any more on TensorFlow."""
    path = saved_files.FOLDER / "0.1.0" / BACKEND / "checkpoint.npz"
    model = saved_files.make(saved_files.CHECKPOINT_RECIPE)
    assert ibnn.Checkpoint(path).restore(model) == 1
    losses = saved_files.next_losses(model)
    np.testing.assert_allclose(losses, expected(path)["next_losses"], rtol=1e-4)


def augmented():
    """A model with noise, dropout and augmentation, nested, in front of a Keras layer's own."""
    inner = keras.Sequential(
        [keras.Input((6, 6, 1)), keras.layers.GaussianNoise(0.3), keras.layers.Flatten()]
    )
    det = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            ibnn.data.RandomShift(1),
            ibnn.data.RandomMirror(),
            inner,
            keras.layers.Dense(5, "tanh"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    return ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=100)


def random_states(model):
    return [
        ops.convert_to_numpy(v).tolist()
        for v in model.variables
        if v.name == "seed_generator_state"
    ]


def in_training(model, x):
    return ops.convert_to_numpy(model(x, training=True))


def test_random_states_of_all_layers_are_saved(tmp_path):
    model, x = augmented(), np.random.default_rng(0).normal(size=(4, 6, 6, 1)).astype("float32")
    for _ in range(3):
        in_training(model, x)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    states = random_states(model)
    assert len(states) == 6  # two posteriors, shift, mirror, Gaussian noise, dropout
    follows = in_training(model, x)

    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert sorted(random_states(loaded)) == sorted(states)
    np.testing.assert_array_equal(in_training(loaded, x), follows)

    fresh = augmented()
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert sorted(random_states(fresh)) == sorted(states)


def test_random_state_of_a_stochastic_layer_in_any_model(tmp_path):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, ibnn.StochasticDense(2, train_size=10)(inputs))
    x = np.ones((4, 3), "float32")
    model(x)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))


def test_weights_without_random_states_load_and_leave_the_states(tmp_path):
    """Files of Keras's own form, in which a layer's group holds its weights and nothing else."""
    layer = ibnn.NormalAffine(seed=7)
    layer.build((None, 3))
    store = {}
    layer.save_own_variables(store)
    (name,) = [name for name in store if name.startswith("random_state")]
    del store[name]
    before = random_states(layer)
    layer.load_own_variables(store)
    assert random_states(layer) == before


def test_random_states_of_another_model_are_refused():
    layer = ibnn.NormalAffine()
    layer.build((None, 3))
    store = {}
    layer.save_own_variables(store)
    with pytest.raises(ValueError, match="holds 2 random states"):
        layer.load_own_variables({**store, "random_state_1": np.zeros(2, "uint32")})


class Shifted(ibnn.FlowPosterior):
    """A posterior that a user has written and not registered."""

    def mean(self):
        return super().mean() + 1


def test_custom_posterior_loads_with_custom_objects(tmp_path):
    det = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model = ibnn.to_stochastic(det, Shifted(), train_size=10)
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="class 'Shifted', which is not known"):
        keras.saving.load_model(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Shifted": Shifted})
    assert isinstance(loaded.layers[-1].posterior, Shifted)
    with ibnn.noise_off(model), ibnn.noise_off(loaded):
        x = np.ones((1, 3), "float32")
        np.testing.assert_array_equal(loaded(x), model(x))


CALLBACKS = {
    "snapshots": lambda: ibnn.Snapshots(2, 3, "step", "folder"),
    "swag": lambda: ibnn.SWAG(2, 3, "step", rank=7),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_round_trip(name):
    callback = CALLBACKS[name]()
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(callback)))
    copy = keras.saving.deserialize_keras_object(config)
    assert type(copy) is type(callback)
    old, new = callback.get_config(), copy.get_config()
    keras.tree.map_structure(np.testing.assert_array_equal, old, new)


@pytest.mark.parametrize("path", FILES[:1], ids=label)
def test_files_hold_no_code(path):
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == ["config.json", "metadata.json", "model.weights.h5"]
        config = archive.read("config.json").decode()
    assert "__lambda__" not in config
    assert "pickle" not in config


@pytest.mark.once
@pytest.mark.slow
def test_loading_takes_no_more_than_the_import(tmp_path):
    path = saved_files.FOLDER / ibnn.__version__ / BACKEND / "glow.keras"
    code = (
        "import keras, json, sys, numpy as np, tfp_ibnn as ibnn\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        "mc = ibnn.MonteCarlo(model, samples=8, seed=0)\n"
        "x = np.linspace(-1, 1, 24, dtype='float32').reshape(6, 4)\n"
        "print(json.dumps(np.asarray(mc.average(x)['mean']).tolist()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    np.testing.assert_allclose(
        json.loads(done.stdout.splitlines()[-1]), expected(path)["mean"], rtol=0, atol=2e-6
    )


def test_the_choice_of_a_compiler_is_not_saved(tmp_path):
    """What was trained where XLA pays is loaded where it does not, and the other way round."""
    for given, kept in (("auto", "auto"), (False, False)):
        model = augmented()
        model.compile("sgd", "mse", jit_compile=given)
        assert model.get_compile_config()["jit_compile"] == kept
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert loaded.jit_compile == model.jit_compile
        assert loaded.get_compile_config()["jit_compile"] == kept


class Unknown(keras.layers.Layer):
    """Which the program that saves it has, and the one that loads it has not."""

    def call(self, inputs):
        return 2 * inputs


@pytest.mark.once
@pytest.mark.parametrize("kind", ["stochastic", "average", "scaled", "ensemble"])
def test_an_unknown_class_is_named_in_one_line(kind, tmp_path):
    stack = [keras.Input((2,)), Unknown(), keras.layers.Dense(2, "softmax")]
    model = keras.Sequential(stack)
    made = {
        "stochastic": lambda: ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=4),
        "average": lambda: ibnn.MonteCarlo(made["stochastic"](), 2),
        "scaled": lambda: ibnn.TemperatureScaling(keras.Sequential([model])),
        "ensemble": lambda: ibnn.MonteCarlo(ibnn.DeepEnsemble([model, model])),
    }
    made[kind]().save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="The file holds the class 'Unknown'") as caught:
        keras.models.load_model(tmp_path / "model.keras")
    message = str(caught.value)
    assert len(message) < 300
    assert "keras.models.load_model(path, custom_objects={'Unknown': Unknown})" in message
    objects = {"Unknown": Unknown}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=objects)
    assert type(loaded).__name__ == type(made[kind]()).__name__

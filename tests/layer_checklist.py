"""Keras's checklist for layers, for stochastic ones."""

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn

INTEGER = keras.backend.standardize_dtype("int")
"""The type of whole numbers that `dtype="int"` gives: no int32 on TensorFlow."""

__all__ = ["check_layer", "numpy", "posterior_weights", "predict_without_noise", "stir", "z_of"]


def numpy(x):
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def posterior_weights(layer):
    return [weight for weight in layer.weights if "/posterior/" in f"/{weight.path}"]


def stir(model, seed=0, size=0.3):
    """Move all trainable weights of all posteriors away from their start."""
    rng = np.random.default_rng(seed)
    for layer in ibnn.stochastic_layers(model):
        for weight in layer.posterior.trainable_weights:
            value = numpy(weight.value)
            weight.assign(value + size * rng.normal(size=value.shape).astype(value.dtype))


def predict_without_noise(model, x):
    with ibnn.noise_off(model):
        return keras.tree.map_structure(numpy, model(x))


def z_of(layer, x, **options):
    """Return the layer's output and the z it came from."""
    with ibnn.noise.scope(**options) as opened:
        y = layer(x)
    return numpy(y), numpy(opened.recall(layer))


def check_layer(make, input_shape, *, output_shape, trainable, non_trainable, folder):
    """Run the checklist on a stochastic layer.

    Args:
        make: returns a new layer.
        input_shape: without the batch.
        output_shape: without the batch.
        trainable: number of trainable weights.
        non_trainable: number of other weights.
        folder: for files.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, *input_shape)).astype("float32")

    _check_config(make())
    layer = make()
    y = layer(x)
    assert y.shape == (4, *output_shape)
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    assert np.all(np.isfinite(numpy(y)))
    assert len(layer.trainable_weights) == trainable
    assert len(layer.non_trainable_weights) == non_trainable
    assert len(layer.losses) == 1 + len(layer.layer.losses)

    inputs = keras.Input(input_shape)
    symbolic = make()(inputs)
    assert symbolic.shape == (None, *output_shape)
    assert keras.backend.standardize_dtype(symbolic.dtype) == "float32"
    assert tuple(layer.compute_output_shape((None, *input_shape))) == (None, *output_shape)

    _check_fit(make(), x, output_shape)
    _check_mixed_precision(make, x, output_shape)
    _check_saving(make(), x, folder)


def _check_config(layer):
    config = layer.get_config()
    again = type(layer).from_config(config)
    assert again.get_config() == config
    assert again.name == layer.name
    clone = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(clone) is type(layer)
    assert clone.get_config() == config


def _check_fit(layer, x, output_shape):
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, layer(inputs))
    stir(model)  # at their start, some weights of a flow have no gradient
    before = {weight.path: numpy(weight.value).copy() for weight in layer.weights}
    model.compile(keras.optimizers.SGD(0.1), "mse")
    # TensorFlow would trace the first step twice for an optimizer without variables.
    model.optimizer.build(model.trainable_variables)
    history = model.fit(x, np.ones((4, *output_shape), "float32"), batch_size=4, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    for weight in layer.trainable_weights:
        assert not np.array_equal(before[weight.path], numpy(weight.value)), weight.path
    for name in ("beta", "noise_switch"):
        (constant,) = [weight for weight in layer.weights if weight.name == name]
        assert numpy(constant.value) == 1


def _check_mixed_precision(make, x, output_shape):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        layer = make()
        symbolic = layer(keras.Input(x.shape[1:]))
        assert keras.backend.standardize_dtype(symbolic.dtype) == "bfloat16"
        y = layer(x)
        assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
        assert y.shape == (4, *output_shape)
        assert posterior_weights(layer)
        for weight in posterior_weights(layer):
            assert keras.backend.standardize_dtype(weight.value.dtype) in ("float32", INTEGER)
            assert weight.dtype != "bfloat16"
        assert keras.backend.standardize_dtype(layer.losses[0].dtype) == "float32"
    finally:
        keras.config.set_dtype_policy(before)


def _check_saving(layer, x, folder):
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, layer(inputs))
    stir(model)
    path = folder / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert [w.path for w in posterior_weights(loaded)] == [w.path for w in posterior_weights(model)]
    np.testing.assert_array_equal(predict_without_noise(loaded, x), predict_without_noise(model, x))
    assert np.any(numpy(loaded(x)) != numpy(loaded(x)))

"""Layers under TensorFlow Probability's names."""

import inspect

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy

KINDS = {
    "DenseReparameterization": ("shared", (4,), (6,)),
    "DenseFlipout": ("flipout", (4,), (6,)),
    "DenseLocalReparameterization": ("local", (4,), (6,)),
    "Conv1DReparameterization": ("shared", (4, 2), (5, 3)),
    "Conv1DFlipout": ("flipout", (4, 2), (5, 3)),
    "Conv2DReparameterization": ("shared", (4, 2), (5, 5, 3)),
    "Conv2DFlipout": ("flipout", (4, 2), (5, 5, 3)),
    "Conv3DReparameterization": ("shared", (4, 2), (3, 3, 3, 1)),
    "Conv3DFlipout": ("flipout", (4, 2), (3, 3, 3, 1)),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_what_their_names_say(name):
    estimator, sizes, shape = KINDS[name]
    make = getattr(ibnn.layers, name)
    assert make.__name__ == name
    layer = make(*sizes, activation="relu", train_size=10, prior_scale=0.5, name="mine")
    assert layer.posterior.estimator == estimator
    assert layer.name == "mine"
    assert type(layer.layer).__name__ == name.split("Rep")[0].split("Flip")[0].split("Local")[0]
    layer.build((None, *shape))
    # The default posterior of TFP's layers: random kernel, deterministic bias.
    assert [raw.name for raw in layer.posterior.raw_scales] == ["kernel_raw_scale"]
    x = np.ones((2, *shape), "float32")
    y = numpy(layer(x))
    assert y.shape == (2, *layer.layer.compute_output_shape((2, *shape))[1:])
    assert y.min() >= 0
    kernel, scale = numpy(layer.layer.kernel), numpy(layer.posterior.scales()[0])
    kl = np.sum(np.log(0.5 / scale) + (scale**2 + kernel**2) / (2 * 0.25) - 0.5)
    assert float(layer.losses[0]) * 10 == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize(
    "argument",
    [
        *("kernel_divergence_fn", "kernel_prior_fn", "kernel_posterior_fn"),
        *("kernel_posterior_tensor_fn", "bias_posterior_fn", "bias_prior_fn"),
    ],
)
def test_arguments_of_tfp_are_refused_with_the_page_that_translates_them(argument):
    with pytest.raises(TypeError, match=f"`{argument}`.*from_tfp.md.*takes: .*train_size"):
        ibnn.layers.DenseFlipout(4, train_size=10, **{argument: None})


def test_other_errors():
    with pytest.raises(TypeError, match=r"does not take `unit`.*units.*train_size.*prior"):
        ibnn.layers.DenseFlipout(4, train_size=10, unit=3)
    with pytest.raises(TypeError, match="give others by name"):
        ibnn.layers.Conv2DFlipout(4, 3, (1, 1), train_size=10)
    with pytest.raises(ValueError, match="`train_size` is missing"):
        ibnn.layers.DenseFlipout(4)


def files_of_warnings(caught):
    """Return where warnings of regularizers point; Keras has others on JAX."""
    return [x.filename for x in caught if "kernel_regularizer" in str(x.message)]


def test_a_regularizer_beside_the_prior_is_named_at_the_users_line():
    with pytest.warns(UserWarning, match="`kernel_regularizer`.*prior twice") as caught:
        ibnn.layers.DenseFlipout(4, train_size=10, kernel_regularizer="l2")
    assert files_of_warnings(caught) == [__file__]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_regularizer="l2")])
    with pytest.warns(UserWarning, match="`kernel_regularizer`.*prior twice") as caught:
        ibnn.to_stochastic(model, ibnn.MeanField(), train_size=10)
    assert files_of_warnings(caught) == [__file__]


def test_arguments_show_in_signatures_and_are_missed_by_name():
    for name in KINDS:
        make = getattr(ibnn.layers, name)
        names = list(inspect.signature(make).parameters)
        assert names[0] == ("units" if name.startswith("Dense") else "filters")
        assert {"activation", "train_size", "prior_scale", "seed"} < set(names)
        with pytest.raises(TypeError, match=f"'{names[0]}'"):
            make()


def test_they_are_saved(tmp_path):
    inputs = keras.Input((3,))
    layer = ibnn.layers.DenseFlipout(2, train_size=10, bias="stochastic", initial_scale=0.1)
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras").layers[-1]
    assert type(again) is ibnn.layers.MeanFieldLayer
    assert again.posterior.get_config() == layer.posterior.get_config()


@pytest.mark.parametrize("sides", ["input", "both"])
def test_the_penalty_on_the_output_is_in_the_config(sides):
    posterior = ibnn.NormalAffine(sides=sides)
    options = {"activity_regularizer": "l2", "posterior": posterior, "train_size": 10}
    for layer in (ibnn.StochasticDense(2, **options), ibnn.StochasticConv2D(2, 3, **options)):
        again = type(layer).from_config(layer.get_config())
        assert again.layer.activity_regularizer is not None

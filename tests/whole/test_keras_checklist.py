"""Keras's own test of layers, `run_layer_test`, for all layers, flows and posteriors.

It makes a layer by its class and its config, calls it on data and on symbols, counts its weights,
takes a training step, and compares its output in mixed precision with what it announces.
"""

import json

import keras
import pytest
from keras import layers
from keras.src import testing

import tfp_ibnn as ibnn
from tests.registry import FLOWS, IMAGE_FLOWS, POSTERIORS, VARIANTS
from tfp_ibnn.layers.adapter import StochasticAdapter

IMAGE, STEPS = (2, 4, 4, 2), (2, 5, 4)


class Checklist(testing.TestCase):
    """Keras's checks, without its tests."""

    def runTest(self):  # noqa: N802
        """Do nothing: pytest runs what is below."""


# Name -> (a function that makes a layer, the shape of its input with the batch).
PLAIN = {
    "dense": (lambda: layers.Dense(3, activation="tanh"), (2, 4)),
    "einsum": (lambda: layers.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d"), STEPS),
    "conv1d": (lambda: layers.Conv1D(4, 2, groups=2), STEPS),
    "conv2d": (lambda: layers.Conv2D(3, 2), IMAGE),
    "conv3d": (lambda: layers.Conv3D(3, 2), (2, 3, 3, 3, 2)),
    "transposed": (lambda: layers.Conv2DTranspose(3, 2), IMAGE),
    "depthwise": (lambda: layers.DepthwiseConv2D(2, depth_multiplier=2), IMAGE),
    "separable": (lambda: layers.SeparableConv1D(3, 2), STEPS),
}
# Name -> (the class of a stochastic layer, a posterior, further options).
KINDS = {
    "gaussian": (ibnn.Stochastic, ibnn.NormalAffine, {}),
    "both": (ibnn.Stochastic, lambda: ibnn.NormalAffine(sides="both"), {}),
    "flow": (ibnn.Stochastic, lambda: ibnn.NormalPlanar1d(1), {}),
    "position": (ibnn.Stochastic, ibnn.NormalAffine, {"noise": "position"}),
    "flipout": (ibnn.layers.MeanFieldLayer, ibnn.MeanField, {}),
    "shared": (
        ibnn.layers.MeanFieldLayer,
        lambda: ibnn.MeanField(estimator="shared", bias="stochastic"),
        {},
    ),
    "mnf": (ibnn.layers.MNFLayer, ibnn.MNF, {}),
}
QUICK = {
    *(("dense", kind) for kind in KINDS),
    *(("conv2d", "gaussian"), ("conv2d", "flipout"), ("einsum", "both"), ("separable", "shared")),
    *(("transposed", "both"), ("depthwise", "flipout")),
}
PAIRS = [
    pytest.param(plain, kind, marks=[] if (plain, kind) in QUICK else pytest.mark.slow)
    for plain in PLAIN
    for kind in KINDS
    if kind != "mnf" or plain == "dense" or plain.startswith("conv")
]
OTHERS = {
    "dense": (ibnn.StochasticDense, {"units": 3, "train_size": 10}, (2, 4)),
    "conv": (
        ibnn.StochasticConv2D,
        {"filters": 3, "kernel_size": 2, "train_size": 10},
        IMAGE,
    ),
    "head": (ibnn.layers.GaussianHead, {}, (2, 4)),
    "quantiles": (ibnn.layers.QuantileHead, {"levels": [0.1, 0.8], "outputs": 2}, (2, 4)),
    "shift": (ibnn.data.RandomShift, {"padding": 1}, IMAGE),
    "mirror": (ibnn.data.RandomMirror, {}, IMAGE),
}
QUICK_FLOWS = ("affine", "actnorm", "stack", "planar", "squeeze")


def run(kind, options, shape):
    Checklist().run_layer_test(kind, options, input_shape=shape)


@pytest.mark.parametrize(("plain", "kind"), PAIRS)
def test_stochastic_layers(eagerly, plain, kind):
    make, shape = PLAIN[plain]
    layer, posterior, options = KINDS[kind]
    run(layer, {"layer": make(), "posterior": posterior(), "train_size": 10, **options}, shape)


@pytest.mark.once
@pytest.mark.parametrize("name", OTHERS)
def test_layers_with_arguments_of_their_own(eagerly, name):
    run(*OTHERS[name])


def test_adapters(eagerly):
    options = {"layer": layers.Dense(3), "posterior": ibnn.NormalAffine(), "train_size": 10}
    run(StochasticAdapter, {**options, "rank": 2}, (2, 4))


@pytest.mark.once
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_FLOWS else pytest.mark.slow)
        for name in [*FLOWS, *IMAGE_FLOWS]
        if name not in VARIANTS or name in QUICK_FLOWS
    ],
)
def test_flows(eagerly, name):
    shape = (4, 3) if name in FLOWS else (2, 4, 4, 1)
    run({**FLOWS, **IMAGE_FLOWS}[name], {}, shape)


@pytest.mark.once
@pytest.mark.parametrize(
    "make",
    [
        *POSTERIORS.values(),
        ibnn.MeanField,
        ibnn.MNF,
        lambda: ibnn.JointPosterior(ibnn.NormalFull()),
    ],
)
def test_configs_of_posteriors(make):
    config = keras.saving.serialize_keras_object(make())
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(config)))
    assert keras.saving.serialize_keras_object(again) == config
    assert set(dir(again)) == set(dir(make()))

"""A frozen prediction: draws are constants that take little space; nothing random is left."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged, data, dense, set_weights
from tfp_ibnn.export.frozen import freeze
from tfp_ibnn.export.inputs import inputs_of
from tfp_ibnn.export.served import Served

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow freezes graphs"),
]


def frozen(mc):
    return freeze(Served(mc, inputs_of(mc.inner, None)))


def constants(graph):
    """The sizes of the constants of floating-point numbers in a graph, in descending order."""
    nodes = [node for node in graph.definition.node if node.op == "Const"]
    sizes = []
    for node in nodes:
        tensor = node.attr["value"].tensor
        shape = [size.size for size in tensor.tensor_shape.dim]
        if tensor.dtype == 1:  # float32
            sizes.append(int(np.prod(shape)))
    return sorted(sizes, reverse=True)


def convolutional():
    parts = [layers.Conv2D(20, 3, activation="relu"), layers.Conv2D(24, 3, activation="relu")]
    parts += [layers.GlobalAveragePooling2D(), layers.Dense(10, "softmax")]
    plain = set_weights(keras.Sequential([keras.Input((9, 9, 17), name="images"), *parts]))
    return ibnn.to_stochastic(plain, ibnn.NormalPlanar1d(), train_size=100)


def test_draws_take_the_size_of_z():
    """32 draws of z are 32 numbers per channel; the weights are there once."""
    graph = frozen(averaged(convolutional(), 32, seed=0))
    kernels = [9 * 17 * 20, 9 * 20 * 24, 24 * 10]
    draws = [32 * 17, 32 * 20, 32 * 24]
    found = constants(graph)
    large = [size for size in found if size > 32]
    assert sorted(large) == sorted(kernels + draws)
    assert not any("Random" in name or "Bitwise" in name for name in graph.operations)


@pytest.mark.slow
def test_draws_of_vgg16_add_little_to_a_file(tmp_path):
    """32 draws of all its z add at most 3 % to the size of its weights."""
    from lib import networks

    posterior = ibnn.NormalPlanar1d()
    plain = networks.vgg16()
    model = ibnn.to_stochastic(plain, posterior, train_size=100)
    mc = averaged(model, 32, seed=0, from_logits=True)
    path = ibnn.export(mc, tmp_path / "vgg16.onnx", format="onnx")
    size_of_weights = 4 * plain.count_params()
    assert size_of_weights < path.stat().st_size * 1.01
    assert path.stat().st_size < 1.03 * size_of_weights


def test_what_comes_before_the_first_noise_runs_once():
    """Its operations see the examples themselves, and what follows sees them once per draw."""
    parts = [layers.Dense(6, "tanh"), layers.Dense(5, "tanh"), dense(3, "softmax")]
    model = set_weights(keras.Sequential([keras.Input((4,), name="features"), *parts]))
    graph = frozen(averaged(model, 7, seed=0))
    nodes = {node.name: node for node in graph.definition.node}
    products = [node for node in graph.definition.node if node.op == "MatMul"]
    assert len(products) == 3

    def depends_on_blocks(node):
        """Whether an operation comes behind the one that repeats the examples."""
        if node.op == "BroadcastTo":
            return True
        names = [name.split(":")[0] for name in node.input]
        return any(depends_on_blocks(nodes[name]) for name in names)

    assert sorted(map(depends_on_blocks, products)) == [False, False, True]


def test_a_model_is_left_as_it_was():
    """Recurrent layers are written out for the file alone."""
    lstm = layers.LSTM(3)
    plain = keras.Sequential([keras.Input((5, 4), name="features"), lstm, layers.Dense(2)])
    model = ibnn.to_stochastic(set_weights(plain), ibnn.NormalAffine(), train_size=10)
    mc = averaged(model, 2, seed=0, head="point")
    x = data(3, 5, 4)
    before = np.asarray(mc(x)["mean"])
    graph = frozen(mc)
    assert not any("While" in name for name in graph.operations)
    assert not any(layer.unroll for layer in model.layers if hasattr(layer, "unroll"))
    np.testing.assert_array_equal(mc(x)["mean"], before)

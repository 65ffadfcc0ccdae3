"""LiteRT: what quantization keeps, and which parts of a file are in 8 bits."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged, data, set_weights
from tfp_ibnn.export.inputs import Inputs, Spec
from tfp_ibnn.export.litert import _one_by_one
from tfp_ibnn.export.reading import open_exported

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow writes LiteRT files"),
]

# How far probabilities may be from those in float32: 11, 8 and 8 bits.
TOLERANCES = {
    "float16": 2e-3,
    "dynamic": 0.02,
    "int8": 0.05,
}


@pytest.fixture(scope="module")
def mc():
    parts = [layers.Conv2D(8, 3, activation="relu"), layers.Conv2D(8, 3, activation="relu")]
    parts += [layers.Flatten(), layers.Dense(4)]
    plain = keras.Sequential([keras.Input((8, 8, 1), name="images"), *parts])
    set_weights(plain, size=0.25)
    posterior = ibnn.NormalAffine(initial_scale=0.3)
    return averaged(ibnn.to_stochastic(plain, posterior, 100), 8, seed=0, from_logits=True)


def types(path):
    """The types of what the operations of a file compute, by their names."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path))
    type_by_tensor = {x["index"]: x["dtype"].__name__ for x in interpreter.get_tensor_details()}
    found = {}
    for operation in interpreter._get_ops_details():
        of_outputs = {type_by_tensor[index] for index in operation["outputs"]}
        found.setdefault(operation["op_name"], set()).update(of_outputs)
    return found


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param("float16", marks=pytest.mark.slow),
        pytest.param("dynamic", marks=pytest.mark.slow),
        "int8",
    ],
)
def test_quantization(mc, quantization, tmp_path):
    """A network in 8 bits, and its statistics in 32."""
    x = data(60, 8, 8, 1)
    options = {"representative_data": x[:30]} if quantization == "int8" else {}
    path = tmp_path / "model.tflite"
    ibnn.export(mc, path, format="litert", quantization=quantization, **options)
    exported = open_exported(path)
    assert exported.facts["quantization"] == quantization
    found = exported.predict(x, batch_size=25)
    tolerance = TOLERANCES[quantization]
    expected = mc(x)
    for name in ("mean", "epistemic", "entropy"):
        np.testing.assert_allclose(found[name], expected[name], atol=2 * tolerance, err_msg=name)
    assert np.abs(found["mean"] - expected["mean"]).max() < tolerance
    assert np.std(expected["mean"], axis=0).max() > 0.05
    np.testing.assert_allclose(found["mean"].sum(axis=1), 1, atol=1e-5)
    kinds = types(path)
    is_whole = quantization == "int8"
    assert kinds["CONV_2D"] == ({"int8"} if is_whole else {"float32"})
    assert kinds["LOG"] == {"float32"}


def test_representative_data_go_by_name():
    """A dict is sorted by its keys, and the inputs of a model need not be."""
    specs = {"wide": Spec((None, 3), "float32"), "deep": Spec((None, 2), "float32")}
    inputs = Inputs(specs, None)
    arrays = {"wide": data(4, 3), "deep": data(4, 2)}
    for given in (arrays, [arrays["wide"], arrays["deep"]]):
        examples = list(_one_by_one(inputs, given))
        assert len(examples) == 4
        for name, array in arrays.items():
            joined = np.concatenate([example[name] for example in examples])
            np.testing.assert_array_equal(joined, array)
    with pytest.raises(ValueError, match="same number of examples of each input"):
        list(_one_by_one(inputs, {"wide": data(4, 3), "deep": data(3, 2)}))

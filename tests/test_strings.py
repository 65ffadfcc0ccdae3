"""Models of texts take strings in any array, and keep their vocabulary."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's")

TEXTS = np.array(["good film", "bad film", "great fun", "no fun"] * 10)
LABELS = np.array([1, 0, 1, 0] * 10)
KINDS = {
    "strings": TEXTS,
    "objects": TEXTS.astype(object),
    "bytes": np.char.encode(TEXTS),
    "column": TEXTS[:, None],
}


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing said here is about compiled graphs."""


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    words = layers.TextVectorization(20, output_sequence_length=3)
    words.adapt(TEXTS)
    inputs = keras.Input((), dtype="string")
    x = layers.Flatten()(layers.Embedding(20, 2)(words(inputs)))
    made = keras.Model(inputs, layers.Dense(2)(layers.Dense(4, "tanh")(x)))
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_strings_in_any_array(model, kind):
    x = KINDS[kind]
    stochastic = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=40)
    mc = ibnn.MonteCarlo(stochastic, 2, seed=0, head="softmax", from_logits=True)
    expected = mc.predict(KINDS["objects"], verbose=0)["mean"]
    np.testing.assert_allclose(mc.predict(x, verbose=0)["mean"], expected, rtol=1e-5)
    assert np.isfinite(mc.evaluate(x, LABELS, verbose=0)).all()
    ibnn.TemperatureScaling(model).fit(x, LABELS)
    assert ibnn.Conformal(model).fit(x, LABELS).predict(x).shape == (40, 2)
    assert ibnn.OODDetector(model, "knn", k=3).fit(x).score(x).shape == (40,)
    laplace = ibnn.Laplace(model).fit(x, LABELS, verbose=0)
    assert ibnn.MonteCarlo(laplace, 2).predict(x, verbose=0)["mean"].shape == (40, 2)


def test_a_dataset_of_strings(model):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(16)
    expected = ibnn.Laplace(model).fit(KINDS["objects"], LABELS, verbose=0)
    found = ibnn.Laplace(model).fit(data, verbose=0)
    one, other = (float(x.prior_precision) for x in (found, expected))
    assert one == pytest.approx(other, rel=1e-4)

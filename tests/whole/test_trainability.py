"""Every posterior trains: `fit` on the digits lowers a loss that stays finite."""

import keras
import numpy as np
import pytest
from keras import ops
from sklearn.datasets import load_digits

import tfp_ibnn as ibnn
from tests.registry import POSTERIORS, RECIPES

ON_JAX = keras.backend.backend() == "jax"

CASES = [
    *RECIPES,
    "mixture-base-planar",
    "mixture-base-shared",
    "affine-first",
    "learned-prior-scale",
    "over-batchnorm",
]


# Enough to show that each kind trains: closed form, estimate, network, mixture.
KINDS = ("NormalAffine", "NormalInvConv", "NormalIAF", "mixture-base-shared")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in CASES],
)
def test_fit_lowers_the_loss(name):
    x, y = load_digits(return_X_y=True)
    x, y = (x[:1024] / 16).astype("float32"), y[:1024]
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(16, activation="relu")(inputs)
    layer = ibnn.StochasticDense(10, posterior=POSTERIORS[name](), train_size=len(x))
    model = ibnn.StochasticModel(inputs, layer(hidden))
    model.compile(
        ibnn.two_speed(keras.optimizers.Adam(1e-2), stochastic_lr=5e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=ON_JAX,  # XLA compiles slowly, and JAX cannot do without
    )
    # TensorFlow traces the first step twice for an optimizer without variables.
    model.optimizer.build(model.trainable_variables)
    before = [ops.convert_to_numpy(w.value) for w in layer.posterior.trainable_variables]
    history = model.fit(x, y, batch_size=64, epochs=4, verbose=0).history
    assert np.all(np.isfinite([*history["loss"], *history["kl"]]))
    # The KL may fall by much more than the likelihood, so each is asked for by itself.
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert history["nll"][-1] < 0.7 * history["nll"][0]
    after = [ops.convert_to_numpy(w.value) for w in layer.posterior.trainable_variables]
    assert all(np.any(a != b) for a, b in zip(after, before, strict=True))

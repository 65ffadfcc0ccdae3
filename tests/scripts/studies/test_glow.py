"""Glow steps as a posterior stay finite, where the original report saw them fail."""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import tfp_ibnn as ibnn

STEPS, BATCH = 2000, 128


class StepLosses(keras.callbacks.Callback):
    """Each step's loss, from the running mean over batches of equal size that Keras reports."""

    def __init__(self):
        super().__init__()
        self.running = []

    def on_train_batch_end(self, batch, logs=None):
        self.running.append(float(logs["loss"]))

    def losses(self):
        totals = np.array(self.running) * np.arange(1, len(self.running) + 1)
        return np.diff(totals, prepend=0.0)


pytestmark = pytest.mark.slow


def test_three_glow_steps_stay_finite():
    x, y = load_digits(return_X_y=True)
    x, y = (x[:1536] / 16).astype("float32"), y[:1536]
    order = np.random.default_rng(0).permuted(np.tile(np.arange(len(x)), (167, 1)), axis=1)
    order = order.ravel()[: STEPS * BATCH]
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(32, activation="relu")(inputs)
    posterior = ibnn.NormalGlowStep(depth=3)
    for units, activation in ((32, "relu"), (10, None)):
        hidden = ibnn.StochasticDense(
            units, activation=activation, posterior=posterior, train_size=len(x)
        )(hidden)
    model = ibnn.StochasticModel(inputs, hidden)
    model.compile(
        ibnn.two_speed(keras.optimizers.Adam(2e-4), stochastic_lr=2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # XLA compiles slowly, and JAX cannot do without.
        jit_compile=keras.backend.backend() == "jax",
    )
    steps = StepLosses()
    model.fit(x[order], y[order], batch_size=BATCH, shuffle=False, callbacks=[steps], verbose=0)
    losses = steps.losses()
    assert len(losses) == STEPS
    assert np.all(np.isfinite(losses))
    assert losses[-100:].mean() < 0.3 * losses[:10].mean()
    assert losses.max() < 2 * losses[:10].max()
    for layer in ibnn.stochastic_layers(model):
        z, kl = layer.posterior.sample_and_kl((100,))
        assert np.all(np.isfinite(z))
        assert 0 < float(keras.ops.mean(kl)) < 1000

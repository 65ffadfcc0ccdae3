"""A guard: a training with a fixed seed must follow the curve that was stored for its backend.

`python -m tests.whole.test_loss_curve` stores a new one. Do so only for a change that is meant to
alter training, and say so in the changelog.
"""

import json
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfp_ibnn as ibnn
from tests import autodiff
from tests.registry import AT_PRIOR, ELBO
from tfp_ibnn._core import backend

STORED = Path(__file__).parents[1] / "files" / f"loss_curve_{backend.NAME}.json"
EPOCHS, STEPS = 20, 10


def curve():
    """Loss, NLL and KL of 200 steps on digits, averaged over each 10."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    keras.utils.set_random_seed(0)
    det = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(6, 3, activation="tanh", name="first"),
            keras.layers.Conv2D(8, 3, activation="tanh", name="second"),
            keras.layers.Flatten(),
            keras.layers.Dense(16, "tanh", name="third"),
            keras.layers.Dense(10, name="fourth"),
        ]
    )
    templates = {
        "second": ibnn.NormalInvConv(depth=1, **AT_PRIOR),
        "third": ibnn.NormalPlanar1d(**AT_PRIOR),
        "fourth": ibnn.MixturePosterior(components=2, **ELBO),
        "first": ibnn.NormalAffine(**AT_PRIOR),
    }
    model = ibnn.to_stochastic(det, templates, train_size=len(x), noise="position", seed=1)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(
        ibnn.two_speed(optimizer, stochastic_lr=0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=backend.jit_pays(),
    )
    model.optimizer.build(model.trainable_variables)
    batches = ibnn.data.ShuffledBatches(x[: 32 * STEPS], y[: 32 * STEPS], 32, seed=2)
    history = model.fit(
        batches,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[batches.follow(), ibnn.KLAnnealing(epochs=10)],
    ).history
    return {name: history[name] for name in ("loss", "nll", "kl")}


def test_training_follows_the_stored_curve():
    stored, found = json.loads(STORED.read_text()), curve()
    assert len(stored["loss"]) * STEPS == 200
    assert stored["nll"][-1] < 0.5 * stored["nll"][0]
    for name, values in stored.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)


if __name__ == "__main__":
    autodiff.enable_float64()
    STORED.write_text(json.dumps(curve(), indent=1) + "\n")

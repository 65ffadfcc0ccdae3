"""Members that train in one step learn as they would apart."""

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.weights.members import JAX, LABELS, LOSS, SLOW, SMALL, dropping, small


def with_state(seed, rate=0.01):
    """Return a network with batch normalization and dropout, and an optimizer with a state."""
    # No bias before the normalization: its gradient is rounding alone, which Adam makes large.
    first = keras.layers.Dense(6, use_bias=False)
    inside = [first, keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((5,)), *inside, keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(rate), LOSS)
    return model


@pytest.mark.parametrize(
    "size", [pytest.param(10, marks=() if JAX else SLOW), pytest.param(8, marks=SLOW)]
)
def test_side_by_side_it_learns_the_same(size):
    """As in separate trainings on the same batches, of which the last may be smaller."""
    options = {"seed": 3, "epochs": 2, "batch_size": size, "verbose": 0}
    found = ibnn.DeepEnsemble.train(with_state, 2, SMALL, LABELS, side_by_side=True, **options)
    assert found.count == 2
    for number in range(2):
        keras.utils.set_random_seed(3 + number)
        model = with_state(3 + number)
        before = model.get_weights()
        model.fit(SMALL, LABELS, epochs=2, batch_size=size, verbose=0, shuffle=False)
        learned = model.get_weights()
        assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(before, learned, strict=True))
        for value, expected in zip(found.sample(None, number), learned, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not JAX, reason="elsewhere they train one after the other")
def test_side_by_side_a_member_that_diverges_is_left_out(capsys):
    """And the loss of each is its own."""

    def build(seed):
        model = with_state(seed)
        if seed == 1:
            model.set_weights([w + np.inf for w in model.get_weights()])
        return model

    with pytest.warns(UserWarning, match="seed 1 diverged"):
        found = ibnn.DeepEnsemble.train(build, 3, SMALL, LABELS, side_by_side=True, epochs=2)
    assert found.count == 2
    losses = [line.split("loss ")[1] for line in capsys.readouterr().out.splitlines()]
    keras.utils.set_random_seed(2)
    log = build(2).fit(SMALL, LABELS, epochs=2, verbose=0, shuffle=False)
    assert float(losses[1].rstrip(".")) == pytest.approx(log.history["loss"][-1], rel=1e-3)
    assert losses[0] != losses[1]


@pytest.mark.once
def test_what_cannot_train_side_by_side():
    train = ibnn.DeepEnsemble.train
    with pytest.raises(ValueError, match="`callbacks` must be None"):
        train(small, 2, SMALL, LABELS, side_by_side=True, callbacks=[])


@pytest.mark.skipif(not JAX, reason="elsewhere they train one after the other")
def test_what_cannot_train_in_one_step(stochastic_models):
    builds = (lambda seed: small(seed, rate=0.1 * (seed + 1)), lambda seed: stochastic_models[seed])
    for build in builds:
        with pytest.raises(ValueError, match="plain models with one optimizer"):
            ibnn.DeepEnsemble.train(build, 2, SMALL, LABELS, side_by_side=True)


@pytest.mark.skipif(not JAX, reason="elsewhere they train one after the other")
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("dense", "`kernel_regularizer`"),
        ("loss", "`compile` of"),
    ],
)
def test_what_would_train_by_the_loss_of_the_first(option, words):
    focal = keras.losses.CategoricalFocalCrossentropy
    values = {
        "dense": lambda seed: {"kernel_regularizer": keras.regularizers.L2(0.1 * seed)},
        "loss": lambda seed: focal(gamma=float(seed)),
    }

    def build(seed):
        return dropping(seed, rate=0.1, **{option: values[option](seed)})

    with pytest.raises(ValueError, match=rf"{words}.* Leave `side_by_side` out"):
        ibnn.DeepEnsemble.train(build, 2, SMALL, LABELS, side_by_side=True)

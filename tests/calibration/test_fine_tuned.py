"""The control and the posterior are fine-tuned alike."""

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.calibration.tools import classes
from tfp_ibnn.calibration import fine_tuned
from tfp_ibnn.calibration.examples import Training
from tfp_ibnn.calibration.trials import Setting


def number(tensor):
    return float(keras.ops.convert_to_numpy(tensor))


def test_both_train_as_long_with_a_rate_that_decays_to_0(small):
    training = Training((small.x, small.y), 160, 5, 32, 0)
    setting = Setting(
        model=small.model,
        output=classes(3, from_logits=False),
        optimizer=keras.optimizers.SGD(0.1),
        loss="sparse_categorical_crossentropy",
        training=training,
        data=None,
        samples=2,
        seed=0,
        epochs=2,
    )
    (control,) = fine_tuned.fine_tuned(setting)
    (posterior,) = fine_tuned.gaussian(setting)
    assert control.trained
    assert posterior.trained
    (layer, _) = ibnn.stochastic_layers(posterior.engine.network)
    assert number(layer.posterior.beta) == fine_tuned.BETA
    starts = []
    for trial in (control, posterior):
        optimizer = trial.engine.network.optimizer
        parts = [optimizer]
        if isinstance(optimizer, ibnn.TwoSpeed):
            parts = [optimizer.deterministic, optimizer.stochastic]
        starts += [number(part.learning_rate) for part in parts]
        state = trial.state
        for epoch in (1, 2):
            state = trial.engine.train(state, lambda x, epoch=epoch: training.epoch(x, epoch))
        ends = [number(part.learning_rate) for part in parts]
        np.testing.assert_allclose(ends, 0, atol=1e-6)
    assert starts == pytest.approx([0.1, 0.1, 0.5])
    # What was given is as it was.
    assert number(setting.optimizer.iterations) == 0

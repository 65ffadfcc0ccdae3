"""Noise in a trained network that nothing is trained for."""

import types

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import expit

import tfp_ibnn as ibnn
from tests.calibration.tools import classes
from tfp_ibnn.calibration import untrained_noise
from tfp_ibnn.calibration.costs import passes
from tfp_ibnn.calibration.examples import Examples, Training, Validation
from tfp_ibnn.calibration.trials import Setting, Trial
from tfp_ibnn.prediction.batch_norm import BatchStatistics


def overconfident(count=500):
    """A network that is sure of small differences between large features, and examples.

    It is right as often as its average under noise of the scale 0.3 says.
    """
    rng = np.random.default_rng(0)
    large, small = rng.choice([-6.0, -0.3, 0.3, 6.0], count), rng.normal(size=count)
    x = np.stack([large + small, large - small], axis=1).astype("float32")
    z = 1 + 0.3 * rng.normal(size=(500, 2))
    p = expit(2 * (x * [1, -1]) @ z.T).mean(axis=1)
    y = (rng.random(count) < p).astype(int)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    model.layers[0].set_weights([np.array([[-1.0, 1.0], [1.0, -1.0]]), np.zeros(2)])
    return model, Examples(x, y)


def setting_of(model, examples, folds=None, **training):
    given = {"data": tuple(examples), "size": examples.size, "steps": 1, "batch_size": None}
    training = Training(**{**given, **training}, seed=0)
    output = classes(2, from_logits=True)
    data = Validation(examples, examples, folds)
    return Setting(model, output, None, None, training, data, samples=32, seed=3)


def test_the_scale_of_the_noise_is_that_of_the_least_nll():
    model, examples = overconfident()
    setting = setting_of(model, examples)
    (trial,) = untrained_noise.noise(setting)
    folds = setting_of(model, examples, np.arange(500) % 5)
    (cross_fitted,) = untrained_noise.noise(folds)
    for one in (trial, cross_fitted):
        one.try_states(folds.data, setting.output)
        assert not one.fate
    noisy = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=500, seed=3)
    mc = ibnn.MonteCarlo(noisy, 32, head="point", seed=3, return_samples=True)
    (layer,) = ibnn.stochastic_layers(noisy)
    expected = []
    for scale in untrained_noise.SCALES:
        layer.posterior.affine.raw_scale.assign([np.log(np.expm1(scale))] * 2)
        raw = keras.ops.convert_to_numpy(mc(examples.x)["samples"])
        expected.append(setting.output.best_nll(raw, examples.y))
    assert trial.nll == pytest.approx(min(expected), abs=1e-5)
    assert cross_fitted.nll == trial.nll
    assert len(cross_fitted.states) < len(expected)
    assert len(trial.states) == 1
    as_it_is = keras.ops.convert_to_numpy(model(examples.x))[:, None]
    assert trial.nll < setting.output.best_nll(as_it_is, examples.y) - 0.01
    assert untrained_noise.SCALES[np.argmin(expected)] in (0.2, 0.3, 0.5)
    # What the trial becomes has that scale.
    copy = trial.engine.copy(trial.best)
    (layer,) = ibnn.stochastic_layers(copy)
    _, scale = layer.posterior.loc_and_scale()
    chosen = untrained_noise.SCALES[np.argmin(expected)]
    np.testing.assert_allclose(keras.ops.convert_to_numpy(scale), chosen, rtol=1e-5)


@pytest.mark.once
def test_a_model_without_a_place_for_noise_is_left_out():
    model = keras.Sequential([keras.Input((2,)), layers.Rescaling(2.0)])
    _, examples = overconfident(80)
    (trial,) = untrained_noise.noise(setting_of(model, examples))
    assert "has no layer to convert" in trial.fate


@pytest.mark.once
def test_nothing_is_tried_after_the_end_of_the_time():
    _, examples = overconfident(80)
    model = keras.Sequential([keras.Input((2,)), layers.BatchNormalization(), layers.Dense(2)])
    late = setting_of(model, examples)._replace(end=0.0)
    trials = [*untrained_noise.noise(late), *untrained_noise.mc_batch_norm(late)]
    assert [trial.name for trial in trials] == ["noise", "MC batch normalization"]
    assert [(trial.engine, trial.fate) for trial in trials] == 2 * [(None, "")]


@pytest.mark.once
def test_scales_are_compared_by_few_draws_until_the_time_is_over(monkeypatch):
    """Nothing is scored at a scale by half: the model is kept without noise."""
    model, examples = overconfident(80)
    drawn = []
    real = untrained_noise.Engine.draw

    def draw(engine, state, x):
        drawn.append(engine.samples)
        return real(engine, state, x)

    monkeypatch.setattr(untrained_noise.Engine, "draw", draw)
    clock = iter([*np.zeros(4), *np.full(100, 99.0)])
    own = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(untrained_noise, "time", own)
    (trial,) = untrained_noise.noise(setting_of(model, examples)._replace(end=1e12))
    assert drawn == [8] * len(untrained_noise.SCALES)
    drawn.clear()
    clock = iter([*np.zeros(4), *np.full(100, np.inf)])  # the start, and three scales
    (late,) = untrained_noise.noise(setting_of(model, examples)._replace(end=1e12))
    assert drawn == [8] * 3
    assert (late.engine, late.fate) == (None, "")


@pytest.mark.once
def test_statistics_of_mini_batches_of_the_training_data():
    model, examples = overconfident()
    setting = setting_of(model, examples)
    assert list(untrained_noise.mc_batch_norm(setting)) == []
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(inputs)))
    setting = setting_of(model, examples, batch_size=20)
    (trial,) = untrained_noise.mc_batch_norm(setting)
    assert isinstance(trial, Trial)
    assert passes(trial.engine) == 32
    raw = trial.engine.draw(trial.state, examples.x)
    posterior = BatchStatistics.of(model, examples.x, 32, batch_size=20, seed=3)
    mc = ibnn.MonteCarlo(posterior, 32, head="point", return_samples=True)
    np.testing.assert_allclose(raw, mc.predict(examples.x, verbose=0)["samples"], atol=1e-6)
    (trial,) = untrained_noise.mc_batch_norm(setting_of(model, examples, batch_size=500))
    assert "more examples than the 500 of a mini-batch" in trial.fate

"""Patterns choose layers by their names, and what they leave is told."""

import warnings

import keras
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.conversion.tools import N, Scale, close, data, names, nested
from tests.layer_checklist import numpy, predict_without_noise

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:These layers stay deterministic"),
]


def to_stochastic(model, posterior=None):
    return ibnn.to_stochastic(model, posterior or ibnn.NormalAffine(), train_size=N)


def patterned():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(2, 3, name="conv1"),
            layers.BatchNormalization(name="conv1_bn"),
            layers.MaxPooling2D(name="pool1"),
            layers.Conv2D(2, 2, name="conv11"),
            layers.Flatten(name="flatten"),
            layers.Dense(3, name="fc1"),
            layers.Dense(2, name="head"),
        ]
    )


@pytest.mark.once
def test_patterns_match_whole_names_and_the_first_wins():
    copy = to_stochastic(
        patterned(),
        {
            "conv1": ibnn.NormalPlanar1d(1),
            "conv.*": ibnn.NormalPlanar1d(2),
            "fc(1|2)": ibnn.NormalAffine(),
        },
    )
    found = {layer.name: len(layer.posterior.flows) for layer in ibnn.stochastic_layers(copy)}
    assert found == {"conv1": 1, "conv11": 2, "fc1": 0}
    assert isinstance(copy.get_layer("head"), layers.Dense)


def test_any_pattern_passes_over_other_layers_silently():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        copy = to_stochastic(
            patterned(), {"conv1": ibnn.NormalPlanar1d(), ".*": ibnn.NormalAffine()}
        )
    assert names(copy) == ["conv1", "conv11", "fc1", "head"]


def test_patterns_reach_nested_layers():
    model, _, _ = nested()
    copy = to_stochastic(model, {"same": ibnn.NormalAffine()})
    assert names(copy) == ["same", "same"]


@pytest.mark.once
def test_warning_lists_layers_that_cannot_be_converted():
    inputs = keras.Input((5, 4))
    x = layers.LSTM(4, return_sequences=True, name="memory")(inputs)
    x = layers.TimeDistributed(layers.Dense(4), name="steps")(x)
    x = layers.Bidirectional(layers.GRU(2, return_sequences=True), name="both")(x)
    x = layers.MultiHeadAttention(2, 2, name="attention")(x, x)
    x = layers.LayerNormalization(name="norm")(x)
    x = Scale(name="scale")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(layers.Dropout(0.1, name="drop")(x)))
    with pytest.warns(UserWarning, match="cannot be converted") as caught:
        copy = to_stochastic(model)
    (warning,) = [w for w in caught if "cannot be converted" in str(w.message)]
    message = str(warning.message)
    assert warning.filename == __file__
    assert "converted: scale (Scale). To" in message
    assert "ibnn.Stochastic(layer, posterior, train_size)" in message
    x = data(2, 5, 4)
    close(predict_without_noise(copy, x), numpy(model(x)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        to_stochastic(model, {"head|.*/query": ibnn.NormalAffine()})
    with pytest.warns(
        UserWarning,
        match=r"converted: memory/lstm_cell\S* \(LSTMCell, which needs a posterior over z\), both/",
    ):
        to_stochastic(model, ibnn.MeanField())


@pytest.mark.parametrize("pattern", ["conv", "fc2", "pool1"])
def test_pattern_that_converts_nothing(pattern):
    with pytest.raises(ValueError, match=f"'{pattern}'.*converts no layer") as caught:
        to_stochastic(patterned(), {".*": ibnn.NormalAffine(), pattern: ibnn.NormalAffine()})
    assert "conv1, conv11, fc1, head" in str(caught.value)


def test_nothing_need_be_left_for_the_rest():
    posteriors = {"conv.*|fc.*|head": ibnn.NormalPlanar1d(), ".*": ibnn.NormalAffine()}
    copy = to_stochastic(patterned(), posteriors)
    found = [copy.get_layer(name).posterior for name in ("conv1", "conv11", "fc1", "head")]
    assert all(len(posterior.flows) > 1 for posterior in found)


def test_model_without_convertible_layers():
    model = keras.Sequential([keras.Input((4,)), layers.ReLU()])
    with pytest.raises(ValueError, match="no layer to convert. Those that can be are Dense, ") as e:
        to_stochastic(model)
    assert "pattern" not in str(e.value)
    model = keras.Sequential([keras.Input((4, 2)), Scale(name="scale")])
    with pytest.raises(
        ValueError, match=r"no layer to convert.*scale \(Scale\).*ibnn.Stochastic\("
    ):
        to_stochastic(model)

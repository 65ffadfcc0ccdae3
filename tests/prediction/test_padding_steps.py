"""Steps of padding count in no prediction and no score."""

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn

DATA = np.random.default_rng(1)
IDS = DATA.integers(1, 9, (12, 7))
for row, length in zip(IDS, DATA.integers(2, 8, 12), strict=True):
    row[length:] = 0
KEPT = IDS > 0
TAGS = DATA.integers(0, 3, (12, 7))


@pytest.fixture(scope="module")
def tagger():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    x = layers.LSTM(5, return_sequences=True)(x)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    return ibnn.to_stochastic(model, ibnn.NormalAffine(initial_scale=0.3, seed=0), train_size=12)


@pytest.mark.parametrize("weighted", [False, True])
def test_padding_does_not_count(request, tagger, weighted):
    if weighted:  # the other case is compiled
        request.getfixturevalue("eagerly")
    mc = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    weight = DATA.random(12).astype("float32") if weighted else None
    each = (np.ones(12) if weight is None else weight)[:, None] * np.ones(7)
    mean = mc.predict(IDS, verbose=0)["mean"]
    nll = -np.log(np.take_along_axis(mean, TAGS[..., None], -1)[..., 0])
    right = mean.argmax(axis=-1) == TAGS
    scores = mc.evaluate(IDS, TAGS, sample_weight=weight, verbose=0, return_dict=True)
    average = {"weights": each[KEPT]}
    small = mc.evaluate(IDS, TAGS, 5, 0, sample_weight=weight, return_dict=True)
    for key in ("nll", "accuracy", "brier", "ece"):  # whatever the batches
        assert small[key] == pytest.approx(scores[key], rel=1e-4)
    assert scores["nll"] == pytest.approx(np.average(nll[KEPT], **average), rel=1e-4)
    assert scores["accuracy"] == pytest.approx(np.average(right[KEPT], **average), rel=1e-4)
    if not weighted:
        assert scores["loss"] == pytest.approx(scores["nll"], rel=1e-4)
        others = mc.evaluate(IDS, np.where(KEPT, TAGS, 0), verbose=0, return_dict=True)
        assert others == pytest.approx(scores, rel=1e-5)  # of what is padding nothing matters


@pytest.mark.slow
def test_longer_batches_have_the_same_scores(tagger):
    mc = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    longer = np.pad(IDS, ((0, 0), (0, 4))), np.pad(TAGS, ((0, 0), (0, 4)))
    scores = [
        mc.evaluate(*pair, batch_size=12, verbose=0, return_dict=True)
        for pair in ((IDS, TAGS), longer)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.slow
def test_weights_of_steps_and_added_metrics(tagger):
    mc = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    mc.compile(metrics=["sparse_categorical_accuracy"])
    weight = DATA.random((12, 7)).astype("float32")
    mean = mc.predict(IDS, verbose=0)["mean"]
    nll = -np.log(np.take_along_axis(mean, TAGS[..., None], -1)[..., 0])
    scores = mc.evaluate(IDS, TAGS, sample_weight=weight, verbose=0, return_dict=True)
    right = np.average(nll[KEPT], weights=weight[KEPT])
    assert scores["nll"] == pytest.approx(right, rel=1e-4)
    accuracy = (mean.argmax(axis=-1) == TAGS)[KEPT].mean()
    assert scores["sparse_categorical_accuracy"] == pytest.approx(accuracy, rel=1e-4)


@pytest.mark.slow
def test_several_outputs_each_have_their_padding(tagger):
    pooled = layers.GlobalAveragePooling1D()(tagger.outputs[0])
    model = keras.Model(tagger.input, {"tags": tagger.outputs[0], "one": layers.Dense(1)(pooled)})
    heads = {"tags": "softmax", "one": "point"}
    mc = ibnn.MonteCarlo(model, samples=6, seed=0, head=heads)
    alone = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    right = alone.evaluate(IDS, TAGS, batch_size=12, verbose=0, return_dict=True)
    y = {"tags": TAGS, "one": np.zeros(12)}
    scores = mc.evaluate(IDS, y, batch_size=12, verbose=0, return_dict=True)
    assert scores["tags_nll"] == pytest.approx(right["nll"], rel=1e-4)
    size = mc.predict(IDS, verbose=0)["one"]["mean"]
    assert scores["one_rmse"] == pytest.approx(np.sqrt((size**2).mean()), rel=1e-4)

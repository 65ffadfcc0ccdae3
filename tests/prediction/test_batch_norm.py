"""Monte Carlo batch normalization, against a loop that sets the statistics by hand."""

import keras
import numpy as np
import pytest
from keras import layers
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import data, numpy, set_weights
from tfp_ibnn.prediction.batch_norm import BatchStatistics

X = data(200, 4, seed=1) * [1, 2, 3, 4]
BATCHES = [X[start : start + 16] for start in range(0, 200, 16)]  # the last has eight examples
NEW = data(7, 4)
LABELS = np.arange(200) % 3


def network(trainable=True, dropout=0.0):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6),
            layers.BatchNormalization(epsilon=1e-3, trainable=trainable),
            layers.ReLU(),
            layers.Dropout(dropout),
            layers.Dense(5),
            layers.BatchNormalization(epsilon=1e-3, trainable=trainable),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return set_weights(model, size=1.0)


def by_hand(model, batch, x):
    """The outputs for x with the statistics of a batch, in NumPy."""
    first, norm, _, _, second, last_norm, last = model.layers
    rows = np.concatenate([batch, x]).astype("float64")
    for dense, normalize in ((first, norm), (second, last_norm)):
        kernel, bias = map(numpy, (dense.kernel, dense.bias))
        rows = rows @ kernel + bias
        of_batch = rows[: len(batch)]
        scaled = (rows - of_batch.mean(axis=0)) / np.sqrt(of_batch.var(axis=0) + 1e-3)
        rows = scaled * numpy(normalize.gamma) + numpy(normalize.beta)
        if dense is first:
            rows = np.maximum(rows, 0)
    logits = rows[len(batch) :] @ numpy(last.kernel) + numpy(last.bias)
    return softmax(logits, axis=1)


def batches():
    """A dataset of batches in a known order."""
    return ((batch, np.zeros(len(batch))) for batch in BATCHES)


def test_draws_are_those_of_a_loop_by_hand(tmp_path):
    model = network()
    before = [numpy(x).copy() for x in model.variables]
    options = {"seed": 0, "return_samples": True}
    mc = ibnn.MonteCarlo(model, 5, batch_norm=batches(), **options)
    prediction = mc.predict(NEW, verbose=0)
    expected = np.stack([by_hand(model, batch, NEW) for batch in BATCHES[:5]], axis=1)
    np.testing.assert_allclose(prediction["samples"], expected, atol=2e-5)
    np.testing.assert_allclose(prediction["mean"], expected.mean(axis=1), atol=2e-5)
    assert np.ptp(expected, axis=1).max() > 0.05
    # The network itself stays as it is, and is what the draws are around.
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(numpy(variable), old)
    assert model.layers[1].momentum == 0.99
    np.testing.assert_allclose(numpy(mc.at_mean(NEW)["mean"]), numpy(model(NEW)), atol=1e-6)
    chunked = ibnn.MonteCarlo(model, 5, batch_norm=batches(), chunk_size=2, **options)
    again = chunked.predict(NEW, batch_size=3, verbose=0)["samples"]
    np.testing.assert_allclose(again, prediction["samples"], atol=1e-6)
    mc.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    found = loaded.predict(NEW, verbose=0)["samples"]
    np.testing.assert_allclose(found, prediction["samples"], atol=1e-6)


@pytest.mark.once
def test_a_smaller_last_batch_is_left_out():
    mc = ibnn.MonteCarlo(network(), 128, batch_norm=batches(), return_samples=True)
    assert mc.samples == len(BATCHES) - 1
    found = mc.predict(NEW, verbose=0)["samples"]
    np.testing.assert_allclose(found[:, -1], by_hand(network(), BATCHES[-2], NEW), atol=2e-5)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return BATCHES[index], LABELS[16 * index : 16 * index + 16]


def of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(16)


@pytest.mark.parametrize("dataset", [Batches, of_tensorflow])
def test_datasets_and_scores_that_a_file_keeps(dataset, tmp_path):
    mc = ibnn.MonteCarlo(network(), 6, batch_norm=dataset())
    scores = mc.evaluate(X, LABELS, verbose=0, return_dict=True)
    mean = np.mean([by_hand(network(), batch, X) for batch in BATCHES[:6]], axis=0)
    assert scores["accuracy"] == pytest.approx(np.mean(mean.argmax(axis=1) == LABELS))
    nll = -np.log(mean[np.arange(200), LABELS]).mean()
    assert scores["nll"] == pytest.approx(nll, rel=1e-4)
    mc.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    again = loaded.evaluate(X, LABELS, verbose=0, return_dict=True)
    assert again == pytest.approx(scores, rel=1e-6)


@pytest.mark.once
def test_a_temperature_acts_on_each_draw():
    model = network()
    model.compile("sgd", "sparse_categorical_crossentropy")
    easy = np.argmax(numpy(model(X)), axis=1)
    labels = np.where(np.arange(200) % 10, easy, LABELS)
    scaled = ibnn.TemperatureScaling(model).fit(X, labels, verbose=0)
    mc = ibnn.MonteCarlo(scaled, 5, batch_norm=batches(), return_samples=True)
    power = 1 / float(scaled.temperature)
    assert abs(power - 1) > 0.1
    plain = np.stack([by_hand(model, batch, NEW) for batch in BATCHES[:5]], axis=1)
    expected = plain**power / (plain**power).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(mc.predict(NEW, verbose=0)["samples"], expected, atol=2e-5)


@pytest.mark.once
def test_arrays_are_cut_into_random_mini_batches():
    model = network(dropout=0.5)
    found = {}
    for seed in (1, 1, 2):
        posterior = BatchStatistics.of(model, (X, np.zeros(200)), 40, seed=seed)
        variances = numpy(posterior.sample(None, 3)[1])
        mean = np.mean([numpy(posterior.sample(None, number)[0]) for number in range(40)], axis=0)
        if seed in found:  # the random state of the dropout stays
            np.testing.assert_array_equal(found[seed], variances)
        found[seed] = variances
    assert np.abs(found[1] / found[2] - 1).max() > 0.01
    inputs = X @ numpy(model.layers[0].kernel) + numpy(model.layers[0].bias)
    spread = inputs.std(axis=0) / np.sqrt(32 * 40)
    assert np.all(np.abs(mean - inputs.mean(axis=0)) < 4 * spread)


@pytest.mark.once
def test_noise_of_stochastic_layers_joins():
    sto = ibnn.to_stochastic(network(), ibnn.NormalAffine(initial_scale=0.3), train_size=200)
    mc = ibnn.MonteCarlo(sto, 2, batch_norm=batches(), seed=0)
    both = [numpy(mc.draw(NEW, number)["mean"]) for number in range(2)]
    ibnn.set_noise(sto, False)
    for number, noisy in enumerate(both):
        alone = numpy(mc.draw(NEW, number)["mean"])
        assert np.abs(noisy - alone).max() > 0.01
        assert np.abs(alone - numpy(mc.draw(NEW, 1 - number)["mean"])).max() > 0.01


@pytest.mark.once
def test_what_it_is_not_for():
    plain = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")], name="plain")
    frozen = network(trainable=False)
    for model in (plain, frozen):
        with pytest.raises(ValueError, match=f"BatchNormalization.*{model.name!r} has none.*Leave"):
            ibnn.MonteCarlo(model, 4, batch_norm=X)
    with pytest.raises(ValueError, match="more examples than the 32 of a mini-batch; got 32"):
        ibnn.MonteCarlo(network(), 4, batch_norm=X[:32])
    for option in ({"dropout": True}, {"independent": True}, {"sampling": "antithetic"}):
        (name,) = option
        with pytest.raises(ValueError, match=f"`{name}` must be .* for `batch_norm`"):
            ibnn.MonteCarlo(network(), 4, batch_norm=X, **option)
    ensemble = ibnn.DeepEnsemble([network(), network()])
    with pytest.raises(ValueError, match="got a DeepEnsemble, which has its own statistics"):
        ibnn.MonteCarlo(ensemble, 2, batch_norm=X)
    for given in (True, 3, "x_train"):
        with pytest.raises(ValueError, match=f"training inputs, such as.*got {given!r}"):
            ibnn.MonteCarlo(network(), 4, batch_norm=given)


@pytest.mark.once
def test_statistics_that_are_not_finite_are_refused():
    broken = [BATCHES[0], np.full((16, 4), np.nan, "float32")]
    with pytest.raises(ValueError, match=r"1 of 2 mini-batches are not finite: `batch_norm`, or"):
        ibnn.MonteCarlo(network(), 4, batch_norm=((batch, None) for batch in broken))

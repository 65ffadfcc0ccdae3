"""A last layer with an output at each position is one of features, each position an example."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.special import softmax

import tfp_ibnn as ibnn
from tests.weights.laplace_tools import dense
from tfp_ibnn.data.positions import MOST_POSITIONS, PositionSample
from tfp_ibnn.weights.laplace import positions

pytestmark = pytest.mark.filterwarnings("ignore:The network does not seem to be trained")

RNG = np.random.default_rng(0)
STEPS = RNG.normal(size=(9, 6, 3)).astype("float32")
IMAGES = RNG.normal(size=(9, 4, 5, 2)).astype("float32")
MASK = np.arange(6) < RNG.integers(1, 7, size=(9, 1))


@pytest.fixture(autouse=True)
def fast(eagerly, full_precision):
    """Nothing said here is about compiled graphs, or about TF32."""


def set_weights(model):
    rng = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    return model


def steps(*end, masked=False, length=None):
    """A network of sequences, whose features are a tanh of a matrix product."""
    masking = [layers.Masking()] if masked else []
    hidden = layers.Dense(4, "tanh")
    return set_weights(keras.Sequential([keras.Input((length, 3)), *masking, hidden, *end]))


def images(*end, size=(4, 5)):
    hidden = layers.Conv2D(4, 1, activation="tanh")
    return set_weights(keras.Sequential([keras.Input((*size, 2)), hidden, *end]))


def features_of(model, x):
    kernel, bias = model.weights[:2]
    kernel = np.reshape(ops.convert_to_numpy(kernel), (-1, 4))
    return np.tanh(x @ kernel + ops.convert_to_numpy(bias))


def head_of(model, end, width):
    """The same last layer on features (rows, F), a network as any other."""
    head = keras.Sequential([keras.Input((width,)), *end])
    kernel, *bias = (ops.convert_to_numpy(w) for w in model.weights[2:])
    head.set_weights([kernel.reshape(width, -1), *bias])
    return head


def patches_of_three(features):
    """What a kernel of three steps sees, with zeros at the ends."""
    wide = np.pad(features, [(0, 0), (1, 1), (0, 0)])
    return np.concatenate([wide[:, i : i + features.shape[1]] for i in range(3)], axis=-1)


SOFTMAX = [layers.Dense(3, "softmax")]
GAUSSIAN = [layers.Dense(4), ibnn.layers.GaussianHead()]

# The end of the network; that of the network of rows; and the inputs.
CASES = {
    "dense": (lambda: steps(layers.Dense(3, "softmax")), SOFTMAX, STEPS),
    "time": (lambda: steps(layers.TimeDistributed(layers.Dense(3, "softmax"))), SOFTMAX, STEPS),
    "pointwise": (
        lambda: images(layers.Conv2D(3, 1, activation="softmax"), size=(None, None)),
        SOFTMAX,
        IMAGES,
    ),
    "reshaped": (
        lambda: images(layers.Conv2D(3, 1), layers.Reshape((-1, 3)), layers.Softmax()),
        SOFTMAX,
        IMAGES,
    ),
    "kernel of three": (
        lambda: steps(layers.Conv1D(3, 3, padding="same", activation="softmax"), length=6),
        SOFTMAX,
        STEPS,
    ),
    "gaussian": (lambda: steps(layers.Dense(4), ibnn.layers.GaussianHead()), GAUSSIAN, STEPS),
}


def data_of(name):
    """A network, the same of rows, and inputs and targets of both."""
    make, end, x = CASES[name]
    model = make()
    features = features_of(model, x)
    if name == "kernel of three":
        features = patches_of_three(features)
    positions = ops.convert_to_numpy(model(x)).shape[:-1]
    width = features.shape[-1]
    rng = np.random.default_rng(1)
    y = rng.integers(3, size=positions)
    if name == "gaussian":
        y = rng.normal(size=(*positions, 2))
    end = [type(layer).from_config(layer.get_config()) for layer in end]
    rows = features.reshape(-1, width).astype("float32")
    return model, head_of(model, end, width), x, y, rows


def predicted(posterior, x, **options):
    mc = ibnn.MonteCarlo(posterior, samples=5, seed=0, **options)
    return {name: ops.convert_to_numpy(part) for name, part in mc(x).items()}


def assert_same(found, expected):
    assert found.log_marginal_likelihood() == pytest.approx(expected.log_marginal_likelihood())
    assert float(found.prior_precision) == pytest.approx(float(expected.prior_precision))
    assert float(found.noise_scale) == pytest.approx(float(expected.noise_scale))
    eigenvalues = (la.structure.eigenvalues() for la in (found, expected))
    np.testing.assert_allclose(*eigenvalues, rtol=1e-4, atol=1e-5)


def assert_same_predictions(found, expected, x, rows):
    one, other = predicted(found, x), predicted(expected, rows)
    assert one["epistemic"].max() > 1e-4
    for name in ("mean", "epistemic"):
        shape = one["mean"].shape[:-1]
        wanted = other[name].reshape(*shape, *other[name].shape[1:])
        np.testing.assert_allclose(one[name], wanted, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_the_layer_on_rows(name):
    model, head, x, y, rows = data_of(name)
    found = ibnn.Laplace(model).fit(x, y, batch_size=4, verbose=0)
    loss = {"head": "gaussian"} if name == "gaussian" else {}
    flat = y.reshape(-1, *y.shape[2:]) if name == "gaussian" else y.ravel()
    expected = ibnn.Laplace(head, **loss).fit(rows, flat, batch_size=1024, verbose=0)
    assert_same(found, expected)
    assert_same_predictions(found, expected, x, rows)


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
def test_other_structures(structure):
    model, head, x, y, rows = data_of("time")
    options = {"hessian_structure": structure, "prior_precision": 0.7}
    found = ibnn.Laplace(model, **options).fit(x, y, verbose=0)
    expected = ibnn.Laplace(head, **options).fit(rows, y.ravel(), batch_size=1024, verbose=0)
    assert_same(found, expected)
    assert_same_predictions(found, expected, x, rows)
    if structure == "full":
        np.testing.assert_allclose(dense(found.structure), by_a_loop(head, rows), atol=1e-3)


def by_a_loop(head, rows, weights=None):
    """The Hessian of all positions, one after the other."""
    kernel, bias = head.get_weights()
    total = np.zeros((15, 15))
    for row, weight in zip(rows, np.ones(len(rows)) if weights is None else weights, strict=True):
        p = softmax(row @ kernel + bias)
        a = np.append(row, 1)
        total += weight * np.kron(np.outer(a, a), np.diag(p) - np.outer(p, p))
    return total


def test_probit_and_its_blocks(monkeypatch):
    """The variances of 54 rows are those of blocks of ten."""
    monkeypatch.setattr("tfp_ibnn.weights.laplace.samplers.ROWS", 10)
    model, head, x, y, rows = data_of("dense")
    options = {"hessian_structure": "full", "prior_precision": 0.7, "link_approx": "probit"}
    found = ibnn.Laplace(model, **options).fit(x, y, verbose=0)
    mean = predicted(found, x)["mean"]
    covariance = np.linalg.inv(by_a_loop(head, rows) + 0.7 * np.eye(15))
    kernel, bias = head.get_weights()
    for row, p in zip(rows, mean.reshape(-1, 3), strict=True):
        jacobian = np.kron(np.append(row, 1), np.eye(3))
        variance = np.diag(jacobian @ covariance @ jacobian.T)
        logits = (row @ kernel + bias) / np.sqrt(1 + np.pi / 8 * variance)
        np.testing.assert_allclose(p, softmax(logits), atol=1e-4)


def test_masks_and_weights(tmp_path):
    """Masked positions do not enter the Hessian, and their labels may be anything."""
    end = layers.TimeDistributed(layers.Dense(3, "softmax"))
    model = steps(end, masked=True)
    x = np.where(MASK[..., None], STEPS, 0)
    y = np.where(MASK, np.arange(6) % 3, -1)
    weight = RNG.uniform(0.5, 2, size=(9, 6)) * (np.arange(6) != 2)
    options = {"hessian_structure": "full", "prior_precision": 0.7}
    found = ibnn.Laplace(model, **options).fit(x, y, sample_weight=weight, verbose=0)
    head = head_of(model, [layers.Dense(3, "softmax")], 4)
    rows = features_of(model, x).reshape(-1, 4)
    counts = (weight * MASK).ravel()
    expected = by_a_loop(head, rows, counts)
    np.testing.assert_allclose(dense(found.structure), expected, atol=1e-3)
    # The same of rows, with weights of examples; and of a dataset.
    rows = rows.astype("float32")
    kept = counts > 0
    same = ibnn.Laplace(head, **options)
    same.fit(rows, np.where(kept, y.ravel(), 0), sample_weight=counts, verbose=0)
    np.testing.assert_allclose(dense(same.structure), expected, atol=1e-3)
    assert same.log_marginal_likelihood() == pytest.approx(found.log_marginal_likelihood())
    parts = [(x[s], y[s], weight[s]) for s in (slice(5), slice(5, 9))]
    again = ibnn.Laplace(model, **options).fit(iter(parts), verbose=0)
    np.testing.assert_allclose(dense(again.structure), expected, atol=1e-3)
    # In a file.
    mc = ibnn.MonteCarlo(found, samples=3, seed=0)
    mc.save(tmp_path / "laplace.keras")
    loaded = keras.saving.load_model(tmp_path / "laplace.keras")
    np.testing.assert_allclose(loaded(x)["mean"], mc(x)["mean"], atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow writes SavedModels")
@pytest.mark.parametrize("link_approx", ["mc", "probit"])
def test_exports_take_images_of_any_size(link_approx, tmp_path, monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr("tfp_ibnn.weights.laplace.samplers.ROWS", 32)
    model, _, x, y, _ = data_of("pointwise")
    la = ibnn.Laplace(model, link_approx=link_approx, prior_precision=1.0).fit(x, y, verbose=0)
    mc = ibnn.MonteCarlo(la, samples=3, seed=0)
    ibnn.export(mc, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
    for part in (x, x[:2, :3, :2]):
        found = served(inputs=tf.constant(part))["mean"]
        np.testing.assert_allclose(found, mc(part)["mean"], atol=1e-6)


@pytest.mark.once
def test_a_sample_stands_for_all_positions(monkeypatch):
    model, _, x, y, _ = data_of("pointwise")
    whole = ibnn.Laplace(model, hessian_structure="full", prior_precision=1.0)
    whole = dense(whole.fit(x, y, verbose=0).structure)
    totals = []
    for seed in range(12):
        sample = PositionSample(60, seed)
        monkeypatch.setattr(positions, "PositionSample", lambda sample=sample: sample)
        la = ibnn.Laplace(model, hessian_structure="full", prior_precision=1.0)
        totals.append(np.trace(dense(la.fit(x, y, verbose=0).structure)))
        assert la._fit["examples"] == pytest.approx(180)
    error = np.std(totals) / np.sqrt(12)
    assert 0 < error < 0.05 * np.trace(whole)
    assert np.mean(totals) == pytest.approx(np.trace(whole), abs=4 * error)
    assert MOST_POSITIONS >= 10_000


@pytest.mark.once
def test_draws_of_large_outputs_run_one_at_a_time():
    sizes = {"small": (4, 5), "large": (256, 256), "open": (None, None)}
    networks = {
        name: ibnn.Laplace(images(layers.Conv2D(3, 1, activation="softmax"), size=size))
        for name, size in sizes.items()
    }
    draws = {name: positions.draws_at_once(la.logit_network) for name, la in networks.items()}
    assert draws == {"small": 64, "large": 1, "open": 1}


@pytest.mark.once
def test_the_prior_is_chosen_by_positions():
    model, head, x, y, rows = data_of("dense")
    options = {"prior_precision": "validation"}
    found = ibnn.Laplace(model, **options).fit(x, y, validation_data=(x[:4], y[:4]), verbose=0)
    pair = rows[:24], y[:4].ravel()
    expected = ibnn.Laplace(head, **options)
    expected.fit(rows, y.ravel(), validation_data=pair, batch_size=1024, verbose=0)
    assert float(found.prior_precision) == float(expected.prior_precision)
    found.prior_precision.assign(1.0)
    assert found.optimize_prior_precision("validation", (x[:4], y[:4])) == pytest.approx(
        float(expected.prior_precision)
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: images(layers.Conv2DTranspose(3, 1, activation="softmax")), "of another kind"),
        (lambda: images(layers.Conv2D(4, 1, groups=2, activation="softmax")), "several groups"),
        (lambda: steps(layers.Dense(3, "relu"), layers.Softmax()), "followed by relu"),
        (lambda: steps(layers.Dense(3), layers.Rescaling(2.0), layers.Softmax()), "by rescaling"),
    ],
)
def test_ends_that_are_not_taken(make, words):
    with pytest.raises(ValueError, match=f"got .None, .*{words}.*take ibnn.TemperatureScaling"):
        ibnn.Laplace(make())


@pytest.mark.once
def test_data_that_are_not_taken():
    model = steps(layers.Dense(3, "softmax"))
    y = np.zeros((9, 6), int)
    for labels, weight, words in (
        (y.T, None, "as many examples"),
        (y[:, :5], None, r"at each position of the outputs, \(9, 6\), .*; got .* \(9, 5\)"),
        (y, np.zeros((9, 6)), "There are no positions"),
        (y, -np.ones(9), "`sample_weight` must be finite, and 0 or above; got -1"),
        (y, np.ones((9, 5)), "`sample_weight` must have the shape"),
        (y + 3, None, "from 0 to 2; got 3"),
    ):
        with pytest.raises(ValueError, match=words):
            ibnn.Laplace(model).fit(STEPS, labels, sample_weight=weight, verbose=0)
    with pytest.raises(ValueError, match="of shape .N, K.; got .*ibnn.Laplace of the last layer"):
        ibnn.Laplace(model, "all")

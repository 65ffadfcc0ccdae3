"""The loss as a whole: trained by plain `fit`, it is the ELBO of problems with a known evidence."""

import keras
import numpy as np
import pytest
from keras import ops
from scipy.special import logsumexp

import tfp_ibnn as ibnn
from tests.flows.tools import numpy
from tests.registry import perturb

# XLA compiles slowly, and JAX cannot do without.
JIT = keras.backend.backend() == "jax"


class NegativeLogLikelihood(keras.losses.Loss):
    """Of y ~ N(prediction, sigma^2)."""

    def __init__(self, sigma):
        super().__init__()
        self.sigma = sigma

    def call(self, y_true, y_pred):
        error = ops.square((y_true - y_pred) / self.sigma)[:, 0]
        return 0.5 * error + np.log(self.sigma) + 0.5 * np.log(2 * np.pi)


def linear(posterior, train_size, channels):
    """A stochastic layer whose output is z * x: the identity is its frozen weight."""
    return ibnn.StochasticDense(
        channels,
        use_bias=False,
        kernel_initializer="identity",
        posterior=posterior,
        train_size=train_size,
    )


def compiled(model, sigma, rate, steps):
    ibnn.freeze(model, "deterministic")
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps, alpha=1e-3)
    model.compile(keras.optimizers.Adam(schedule), NegativeLogLikelihood(sigma), jit_compile=JIT)
    # TensorFlow would trace the first step twice for an optimizer without variables.
    model.optimizer.build(model.trainable_variables)
    return model


def elbo_by_evaluate(model, x, y, examples, repeats):
    """-N * loss, from many draws for each example."""
    x, y = np.tile(x, (repeats, 1)), np.tile(y, (repeats, 1))
    logs = model.evaluate(x, y, batch_size=2**16, verbose=0, return_dict=True)
    return -examples * logs["loss"]


# ----------------------------------------------------------------- one channel, a conjugate problem

N, SIGMA, PRIOR_SCALE = 203, 3.0, 0.5


def conjugate_data():
    rng = np.random.default_rng(1)
    x = rng.uniform(0.5, 1.5, (N, 1)).astype("float32")
    return x, (2.2 * x + SIGMA * rng.normal(size=(N, 1))).astype("float32")


def exact_posterior():
    x, y = (part.astype("float64") for part in conjugate_data())
    precision = 1 / PRIOR_SCALE**2 + np.sum(x**2) / SIGMA**2
    mean = (1 / PRIOR_SCALE**2 + np.sum(x * y) / SIGMA**2) / precision
    return mean, precision**-0.5


def log_evidence():
    """log N(y; x * 1, sigma^2 I + prior_scale^2 x x')."""
    x, y = (part[:, 0].astype("float64") for part in conjugate_data())
    covariance = SIGMA**2 * np.eye(N) + PRIOR_SCALE**2 * np.outer(x, x)
    error = y - x
    quadratic = error @ np.linalg.solve(covariance, error)
    return -0.5 * (quadratic + np.linalg.slogdet(covariance)[1] + N * np.log(2 * np.pi))


def closed_form_elbo(m, s):
    x, y = (part.astype("float64") for part in conjugate_data())
    squares = np.sum((y - x * m) ** 2 + (x * s) ** 2)
    likelihood = -0.5 * squares / SIGMA**2 - N * np.log(SIGMA) - 0.5 * N * np.log(2 * np.pi)
    kl = np.log(PRIOR_SCALE / s) + (s**2 + (m - 1) ** 2) / (2 * PRIOR_SCALE**2) - 0.5
    return likelihood - kl


class Batches(keras.utils.PyDataset):
    """Many epochs in one, each in an order of its own and with a small last batch.

    After `keras.utils.set_random_seed`, `fit` on arrays goes through every epoch in the same order
    on TensorFlow, so that the examples of the last, small batch would weigh more than the others.
    """

    def __init__(self, x, y, batch_size, epochs):
        super().__init__()
        rng = np.random.default_rng(2)
        starts = range(0, len(x), batch_size)
        orders = (rng.permutation(len(x)) for _ in range(epochs))
        self.rows = [order[k : k + batch_size] for order in orders for k in starts]
        self.x, self.y = x, y

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.x[self.rows[index]], self.y[self.rows[index]]


def gaps(train_size, train_samples=4, epochs=100):
    """Evidence minus ELBO after training: at the learnt q in closed form, and as -N * loss."""
    inputs = keras.Input((1,))
    layer = linear(ibnn.NormalAffine(prior_scale=PRIOR_SCALE), train_size, 1)
    model = ibnn.StochasticModel(inputs, layer(inputs), train_samples=train_samples)
    x, y = conjugate_data()
    batches = Batches(x, y, 64, epochs)
    assert {len(rows) for rows in batches.rows} == {64, 11}
    compiled(model, SIGMA, 0.03, len(batches))
    model.fit(batches, shuffle=False, verbose=0)
    np.testing.assert_array_equal(numpy(layer.layer.kernel.value), [[1.0]])
    affine = layer.posterior.affine.bijector()
    m, s = float(affine.shift[0]), float(affine.scale[0])
    learnt = closed_form_elbo(m, s)
    measured = elbo_by_evaluate(model, x, y, N, repeats=3000)
    return log_evidence() - learnt, log_evidence() - measured, (m, s)


def test_the_closed_forms_agree():
    np.testing.assert_allclose(closed_form_elbo(*exact_posterior()), log_evidence(), atol=1e-9)


# JAX takes these steps three times as fast; TensorFlow's turn is `make test-slow`.
@pytest.mark.parametrize(
    "train_samples", [pytest.param(n, marks=[] if JIT else pytest.mark.slow) for n in (1, 4)]
)
def test_fit_finds_the_evidence(train_samples):
    gap, measured, (m, s) = gaps(N, train_samples, epochs=800 if train_samples == 1 else 200)
    assert -1e-9 <= gap < 1e-2
    assert abs(measured) < 4e-2  # within the error of the draws
    mean, scale = exact_posterior()
    assert abs(m - mean) < 0.15 * scale
    assert abs(s / scale - 1) < 0.1


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("train_size", [N // 2, 2 * N])
def test_a_wrong_train_size_misses_the_evidence(train_size):
    gap, measured, _ = gaps(train_size)
    assert gap > 2e-2
    assert abs(measured) > 0.2


# ------------------------------------------------------------ two channels, a posterior with a bend

ROWS, NOISE = 16, 1.2


def bent_data(copies):
    y = 1.0 + NOISE * np.linspace(-1, 1, ROWS)[:, None]
    return np.ones((ROWS * copies, 2), "float32"), np.tile(y, (copies, 1)).astype("float32")


def bent_model(posterior):
    """y ~ N(z1 * z2, sigma^2): the posterior lies along a hyperbola."""
    inputs = keras.Input((2,))
    layer = linear(posterior, ROWS, 2)
    hidden = layer(inputs)
    product = keras.layers.Multiply()([hidden[:, :1], hidden[:, 1:]])
    return ibnn.StochasticModel(inputs, product), layer


def true_posterior(points=401):
    """A grid, the log of the true posterior on it, the size of a cell, and the log evidence."""
    axis = np.linspace(-5, 7, points)
    z = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    y = bent_data(1)[1].astype("float64")[:, 0]
    error = (y[:, None] - z[:, 0] * z[:, 1]) / NOISE
    joint = np.sum(-0.5 * error**2 - np.log(NOISE) - 0.5 * np.log(2 * np.pi), axis=0)
    joint += np.sum(-0.5 * (z - 1) ** 2 - 0.5 * np.log(2 * np.pi), axis=-1)
    cell = (axis[1] - axis[0]) ** 2
    evidence = logsumexp(joint) + np.log(cell)
    return z, joint - evidence, cell, evidence


def trained_gap(posterior, steps, rate):
    """Evidence minus ELBO after training, and KL(q || true posterior) on the grid."""
    model, layer = bent_model(posterior)
    x, y = bent_data(steps * 256 // ROWS)
    compiled(model, NOISE, rate, steps)
    model.fit(x, y, batch_size=256, verbose=0)
    z, log_posterior, cell, evidence = true_posterior()
    log_q = numpy(layer.posterior.distribution().log_prob(ops.convert_to_tensor(z, "float32")))
    log_q = log_q.astype("float64")
    q = np.exp(log_q)
    np.testing.assert_allclose(np.sum(q) * cell, 1, atol=2e-3)
    kl = np.sum(q * (log_q - log_posterior)) * cell
    x, y = bent_data(1)
    return evidence - elbo_by_evaluate(model, x, y, ROWS, repeats=2**17), kl


@pytest.mark.slow
def test_the_gap_is_the_kl_from_the_true_posterior_and_flows_close_it():
    gaussian, kl = trained_gap(ibnn.NormalAffine(prior_scale=1.0), 600, 0.03)
    assert abs(gaussian - kl) < 1e-2
    flow, kl = trained_gap(ibnn.NormalIAF(4, 16, prior_scale=1.0), 1200, 0.02)
    assert abs(flow - kl) < 1e-2
    assert gaussian > 0.2
    assert flow < 0.4 * gaussian


# ------------------------------------------------------------------------------- the terms by hand


@pytest.mark.parametrize("kl_reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["channel", "position"])
def test_added_term_against_the_formula(float64, kind, kl_reduction):
    posterior = ibnn.NormalAffine(beta=0.7, gamma=0.3, prior_scale=0.4)
    layer = ibnn.Stochastic(
        keras.layers.Identity(), posterior, 50, noise=kind, kl_reduction=kl_reduction
    )
    layer.build((None, 4, 5, 3))
    perturb(layer.posterior.affine, seed=1)
    layer(ops.ones((2, 4, 5, 3)))
    affine = layer.posterior.affine.bijector()
    m, s = numpy(affine.shift, affine.scale)
    kl = np.sum(np.log(0.4 / s) + (s**2 + (m - 1) ** 2) / (2 * 0.4**2) - 0.5)
    entropy = np.sum(np.log(s) + 0.5 * np.log(2 * np.pi * np.e))
    positions = 20 if (kind, kl_reduction) == ("position", "sum") else 1
    (found,) = layer.losses
    np.testing.assert_allclose(float(found), positions * (0.7 * kl - 0.3 * entropy) / 50, rtol=1e-6)


@pytest.mark.parametrize("kind", ["channel", "position"])
def test_estimated_term_is_the_mean_over_draws(float64, kind):
    posterior = ibnn.NormalPlanar1d(beta=0.7, gamma=0.3)
    layer = ibnn.Stochastic(keras.layers.Identity(), posterior, 50, noise=kind)
    layer.build((None, 4, 3))
    perturb(layer.posterior, seed=1, size=0.5)
    layer.posterior.beta.assign(0.7)
    z = numpy(layer(ops.ones((6, 4, 3))))
    z = z if kind == "position" else z[:, 0]
    q, p = layer.posterior.distribution(), layer.posterior.prior()
    log_q, log_p = (numpy(d.log_prob(ops.convert_to_tensor(z))) for d in (q, p))
    positions = 4 if kind == "position" else 1
    expected = positions * np.mean(0.7 * (log_q - log_p) + 0.3 * log_q) / 50
    np.testing.assert_allclose(float(layer.losses[0]), expected, rtol=1e-6)


@pytest.mark.once
def test_report_of_nll_and_kl_adds_up_to_the_loss():
    inputs = keras.Input((1,))
    layer = linear(ibnn.NormalAffine(prior_scale=0.5), N, 1)
    model = ibnn.StochasticModel(inputs, layer(inputs), train_samples=3)
    compiled(model, SIGMA, 1e-3, 10)
    x, y = conjugate_data()
    for logs in (
        model.evaluate(x, y, batch_size=64, verbose=0, return_dict=True),
        {k: v[0] for k, v in model.fit(x, y, batch_size=64, verbose=0).history.items()},
    ):
        np.testing.assert_allclose(logs["loss"], logs["nll"] + logs["kl"] / N, rtol=1e-5)
        assert logs["kl"] > 1

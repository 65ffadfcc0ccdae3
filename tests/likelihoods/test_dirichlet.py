"""Dirichlet and Beta distributions of probabilities: closed forms against SciPy and sampling."""

import keras
import numpy as np
import pytest
import scipy.special
import scipy.stats
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.autodiff import gradient
from tests.layer_checklist import numpy
from tfp_ibnn._core.gamma import dirichlet_nll
from tfp_ibnn.likelihoods import Beta, Dirichlet

CONCENTRATIONS = np.array([[0.05, 0.2, 1.5], [3.0, 1.0, 0.4], [200.0, 5.0, 30.0]])


def predicted(head, *outputs, **options):
    """Return the prediction of networks with given outputs, each a draw of a posterior."""
    sets = [[np.float32(output)] for output in outputs]
    examples, width = np.shape(outputs[0])
    network = keras.Sequential(
        [keras.Input((examples,)), layers.Dense(width, use_bias=False, name="rows")]
    )
    posterior = ibnn.weights.WeightSets.of(network, sets)
    mc = ibnn.MonteCarlo(posterior, samples=len(sets), head=head, **options)
    return mc.predict(np.eye(examples, dtype="float32"), verbose=0)


def entropy(p):
    return scipy.special.entr(p).sum(axis=-1)


def test_uncertainty_of_one_pass_is_that_of_sampled_probabilities():
    prediction = predicted(Dirichlet(), np.log(CONCENTRATIONS), interval=0.8)
    rng = np.random.default_rng(0)
    for row, concentrations in enumerate(CONCENTRATIONS):
        p = rng.dirichlet(concentrations, 100_000)
        aleatoric = entropy(p)
        divergence = scipy.special.rel_entr(p, p.mean(axis=0)).sum(axis=-1)
        expected = {
            "mean": p,
            "variance": (p - p.mean(axis=0)) ** 2,
            "aleatoric": aleatoric,
            "epistemic": divergence,
        }
        for name, draws in expected.items():
            margin = 5 * draws.std(axis=0) / np.sqrt(len(draws)) + 1e-6
            difference = prediction[name][row] - draws.mean(axis=0)
            assert (np.abs(difference) < margin).all(), name
        marginals = scipy.stats.beta(concentrations, concentrations.sum() - concentrations)
        np.testing.assert_allclose(prediction["lower"][row], marginals.ppf(0.1), atol=2e-6)
        np.testing.assert_allclose(prediction["upper"][row], marginals.ppf(0.9), atol=2e-6)
    total = prediction["aleatoric"] + prediction["epistemic"]
    np.testing.assert_allclose(prediction["entropy"], total, rtol=1e-5)
    np.testing.assert_allclose(
        prediction["total_variance"], prediction["variance"].sum(axis=-1), rtol=1e-6
    )


def test_small_uncertainty_is_precise_in_float32():
    """A detector ranks inputs by it: it must not drown in the rounding of entropies."""
    mean = np.array([1 - 3e-5, 2e-5, 1e-5])
    precision = np.array([[1e-3], [1.0], [1e4], [1e8]])
    concentrations = mean * precision
    found = predicted(Dirichlet(), np.log(concentrations))["epistemic"]
    g = scipy.special.digamma(concentrations + 1) - np.log(concentrations)
    expected = (mean * g).sum(axis=-1)
    total = concentrations.sum(axis=-1)
    expected -= scipy.special.digamma(total + 1) - np.log(total)
    for row, tolerance in enumerate((3e-3, 1e-3, 1e-5)):
        np.testing.assert_allclose(found[row], expected[row], rtol=tolerance)
    assert 0 < found[3] < 1e-7  # 1 / precision, where float64 itself has few digits left


def test_several_passes_are_a_mixture():
    first, second = np.log(CONCENTRATIONS), np.log(CONCENTRATIONS[::-1])
    prediction = predicted(Dirichlet(), first, second)
    alone = [predicted(Dirichlet(), outputs) for outputs in (first, second)]
    mean = (alone[0]["mean"] + alone[1]["mean"]) / 2
    aleatoric = (alone[0]["aleatoric"] + alone[1]["aleatoric"]) / 2
    within = (alone[0]["variance"] + alone[1]["variance"]) / 2
    between = (alone[0]["mean"] - alone[1]["mean"]) ** 2 / 4
    np.testing.assert_allclose(prediction["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(prediction["aleatoric"], aleatoric, rtol=1e-5)
    np.testing.assert_allclose(prediction["epistemic"], entropy(mean) - aleatoric, rtol=1e-4)
    np.testing.assert_allclose(prediction["variance"], within + between, rtol=1e-4, atol=1e-7)


def test_labels_have_beta_distributions():
    no = np.array([[0.5, 40.0], [2.0, 0.03]])
    yes = np.array([[1.5, 3.0], [2.0, 7.0]])
    outputs = np.log(np.concatenate([no, yes], axis=1))
    prediction = predicted(Beta(), outputs, interval=0.5)
    marginals = scipy.stats.beta(yes, no)
    np.testing.assert_allclose(prediction["mean"], marginals.mean(), rtol=1e-5)
    np.testing.assert_allclose(prediction["variance"], marginals.var(), rtol=1e-5)
    np.testing.assert_allclose(prediction["lower"], marginals.ppf(0.25), atol=2e-6)
    both = np.stack([no, yes], axis=-1)
    for row, label in np.ndindex(2, 2):
        as_classes = predicted(Dirichlet(), np.log(both[None, row, label]))
        for name in ("entropy", "aleatoric", "epistemic"):
            np.testing.assert_allclose(prediction[name][row, label], as_classes[name][0], rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_density_is_that_of_scipy(scale):
    rng = np.random.default_rng(1)
    concentrations = np.array([0.3, 2.0, 5.0]) * scale
    p = rng.dirichlet(concentrations, 7)
    expected = -scipy.stats.dirichlet(concentrations).logpdf(p.T).mean()
    mean_log_p = np.log(p).mean(axis=0)
    found = dirichlet_nll(np.float32(np.log(concentrations)), np.float32(mean_log_p))
    np.testing.assert_allclose(numpy(found), expected, rtol=1e-5, atol=1e-6 * scale)


def test_gradient_of_the_density_is_its_closed_form():
    concentrations = np.array([0.3, 2.0, 5.0, 300.0])
    mean_log_p = np.log([0.01, 0.04, 0.05, 0.9])
    total = concentrations.sum()
    digamma = scipy.special.digamma
    expected = concentrations * (digamma(concentrations) - digamma(total) - mean_log_p)
    function = lambda log_a: dirichlet_nll(log_a, ops.convert_to_tensor(mean_log_p))  # noqa: E731
    np.testing.assert_allclose(gradient(function, np.log(concentrations)), expected, rtol=1e-6)


@pytest.mark.parametrize("head", [Dirichlet(3), Beta(4)], ids=lambda head: type(head).__name__)
def test_loss_is_lowest_at_the_teacher(head):
    """Its gradient vanishes where all uncertainty is the teacher's, and nowhere near."""
    rng = np.random.default_rng(2)
    outputs = rng.normal(size=(5, head.width))
    teacher = predicted(head, outputs)
    teacher = {name: ops.convert_to_tensor(np.float64(x)) for name, x in teacher.items()}
    loss = lambda x: ops.sum(head.distillation_loss(x, teacher))  # noqa: E731
    np.testing.assert_allclose(gradient(loss, outputs), 0, atol=1e-5)
    best = numpy(loss(ops.convert_to_tensor(outputs)))
    for _ in range(5):
        moved = outputs + 0.1 * rng.normal(size=outputs.shape)
        assert numpy(loss(ops.convert_to_tensor(moved))) > best + 1e-4


def test_second_head_starts_at_the_precision_of_the_teacher():
    concentrations = 20 * np.array([[0.2, 0.3, 0.5], [0.7, 0.2, 0.1]])
    teacher = predicted(Dirichlet(), np.log(concentrations))
    start = Dirichlet(3).start(teacher)
    np.testing.assert_allclose(numpy(start), [np.log(20)], rtol=1e-4)
    certain = {"mean": teacher["mean"], "variance": np.zeros_like(teacher["mean"])}
    assert np.isfinite(numpy(Dirichlet(3).start(certain))).all()

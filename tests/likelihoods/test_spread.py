"""Numbers with the spread of their means: the law of total variance, and quantiles."""

import numpy as np
import pytest
import scipy.stats
from keras import ops

from tests.autodiff import gradient
from tests.layer_checklist import numpy
from tests.likelihoods.test_dirichlet import predicted
from tfp_ibnn.likelihoods import SpreadGaussian, SpreadPoint

MEAN = np.array([[0.5], [-2.0], [30.0]])
NOISE = np.array([[0.3], [1.0], [4.0]])
SPREAD = np.array([[0.4], [0.01], [3.0]])
OUTPUTS = {
    SpreadGaussian: np.concatenate([MEAN, NOISE, SPREAD], axis=1),
    SpreadPoint: np.concatenate([MEAN, SPREAD], axis=1),
}


@pytest.mark.filterwarnings("ignore:`interval` holds")
@pytest.mark.parametrize("kind", [SpreadGaussian, SpreadPoint])
def test_variance_is_split_by_the_law_of_total_variance(kind):
    prediction = predicted(kind(), OUTPUTS[kind], interval=0.9)
    noise = NOISE if kind is SpreadGaussian else 0 * NOISE
    np.testing.assert_allclose(prediction["mean"], MEAN, rtol=1e-6)
    np.testing.assert_allclose(prediction["aleatoric"], noise**2, rtol=1e-5)
    np.testing.assert_allclose(prediction["epistemic"], SPREAD**2, rtol=1e-5)
    total = noise**2 + SPREAD**2
    np.testing.assert_allclose(prediction["total_variance"], total, rtol=1e-5)
    bounds = scipy.stats.norm(MEAN, np.sqrt(total)).interval(0.9)
    np.testing.assert_allclose(prediction["lower"], bounds[0], rtol=1e-4)
    np.testing.assert_allclose(prediction["upper"], bounds[1], rtol=1e-4)


def test_several_passes_are_a_mixture():
    outputs = OUTPUTS[SpreadGaussian]
    other = outputs + [1.0, 0.0, 0.0]
    prediction = predicted(SpreadGaussian(), outputs, other)
    np.testing.assert_allclose(prediction["mean"], MEAN + 0.5, rtol=1e-5)
    np.testing.assert_allclose(prediction["epistemic"], SPREAD**2 + 0.25, rtol=1e-4)


def test_evaluation_is_that_of_the_total_variance():
    head = SpreadGaussian(3)
    prediction = predicted(head, OUTPUTS[SpreadGaussian])
    y = MEAN + 1
    expected = -scipy.stats.norm(MEAN, np.hypot(NOISE, SPREAD)).logpdf(y)[:, 0]
    np.testing.assert_allclose(numpy(head.loss(y, prediction)), expected, rtol=1e-4)
    density = head.log_prob(ops.convert_to_tensor(OUTPUTS[SpreadGaussian]), y)
    np.testing.assert_allclose(numpy(density), -expected, rtol=1e-4)
    of_points = predicted(SpreadPoint(), OUTPUTS[SpreadPoint])
    np.testing.assert_allclose(numpy(SpreadPoint(2).loss(y, of_points)), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", [SpreadGaussian, SpreadPoint])
def test_loss_is_lowest_at_the_teacher(kind):
    teacher = predicted(kind(), OUTPUTS[kind])
    teacher = {name: ops.convert_to_tensor(np.float64(x)) for name, x in teacher.items()}
    head = kind(OUTPUTS[kind].shape[1])
    loss = lambda x: ops.sum(head.distillation_loss(x, teacher))  # noqa: E731
    np.testing.assert_allclose(gradient(loss, OUTPUTS[kind]), 0, atol=1e-3)
    start = numpy(head.start(teacher))
    np.testing.assert_allclose(start, np.log((SPREAD**2).mean()) / 2, rtol=1e-5)


def test_a_network_of_another_width_is_refused():
    with pytest.raises(ValueError, match="SpreadGaussian has 3 outputs for each number; .* 2 out"):
        predicted(SpreadGaussian(), OUTPUTS[SpreadPoint])

import numpy as np
import pytest

from tests.flows.tools import close, draws, forward, inverse, log_det
from tests.registry import make_flow
from tfp_ibnn.flows import GlowStep

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", ["glow-identity", "glow-orthogonal"])
def test_parts_act_in_order(float64, name):
    flow, x = make_flow(name, 5, seed=2), draws((10, 5))
    y, total = x, 0.0
    for part in (flow.actnorm, flow.conv, flow.coupling):
        total = total + log_det(part, y)
        y = forward(part, y)
    close(forward(flow, x), y, 1e-12)
    close(log_det(flow, x), total, 1e-12)
    close(inverse(flow, y), x, 1e-8)


def test_weights_are_those_of_the_parts():
    flow = make_flow("glow-orthogonal", 4)
    parts = (flow.actnorm, flow.conv, flow.coupling)
    assert len(flow.weights) == sum(len(part.weights) for part in parts)
    assert all(part.weights for part in parts)


def test_config_holds_the_arguments():
    config = GlowStep(hidden=5, swap=True, start="identity").get_config()
    assert (config["hidden"], config["swap"], config["start"]) == (5, True, "identity")
    twin = GlowStep.from_config(config)
    assert (twin.coupling.hidden, twin.coupling.swap, twin.conv.start) == (5, True, "identity")


def test_extreme_weights_keep_the_log_det_bounded():
    flow, x = make_flow("glow-identity", 4), draws((5, 4), dtype="float32")
    for weight in flow.trainable_weights:
        weight.assign(np.full(weight.shape, 1e3, "float32"))
    bound = 4 * flow.actnorm.limit + 4 * flow.conv.limit + 2 * flow.coupling.limit
    assert np.all(np.abs(log_det(flow, x)) <= bound + 1e-3)

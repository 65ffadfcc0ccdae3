from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import metrics, plots

pytestmark = pytest.mark.once

UNCERTAINTY, LOSS = [0.1, 0.9, 0.3, 0.2], [0.0, 1.0, 1.0, 0.0]


def test_pairs_become_curves_of_risk():
    ax = plots.risk_coverage({"flow": (UNCERTAINTY, LOSS)})
    (line,) = ax.lines
    expected = [[0.25, 0], [0.5, 0], [0.75, 1 / 3], [1, 0.5]]
    np.testing.assert_allclose(line.get_xydata()[-4:], expected)
    area = metrics.risk_coverage(np.array(UNCERTAINTY), np.array(LOSS)).area
    assert line.get_label() == f"flow (AURC {area:#.3g})"


def test_curves_made_before_are_drawn_as_they_are():
    made = SimpleNamespace(coverage=[0.5, 1.0], risk=[0.25, 0.75], area=0.5)
    ax = plots.risk_coverage({"a": made, "b": (UNCERTAINTY, LOSS)}, label="error rate")
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0.5, 0.25], [1.0, 0.75]])
    assert ax.get_legend().get_texts()[0].get_text() == "a (AURC 0.500)"
    assert ax.lines[0].get_linestyle() != ax.lines[1].get_linestyle()
    assert ax.get_ylabel() == "error rate"


def test_it_draws_where_it_is_told():
    given = plt.subplots()[1]
    assert plots.risk_coverage({"a": (UNCERTAINTY, LOSS)}, ax=given) is given


@pytest.mark.parametrize(
    ("curves", "words"),
    [
        ({}, "`curves` must map at least one name"),
        ([UNCERTAINTY, LOSS], "`curves` must map at least one name"),
        ({"a": UNCERTAINTY}, r"`curves\['a'\]` must be a pair of uncertainty and loss"),
        ({"a": (UNCERTAINTY, LOSS[:2])}, r"`curves\['a'\]\[1\]` must have the shape \(4,\)"),
        ({"a": ([], [])}, r"`curves\['a'\]\[0\]` .* not be empty"),
        ({"a": ([0.1, float("nan")], [0, 1])}, r"`curves\['a'\]\[0\]` must be finite; got nan"),
        (
            {"a": SimpleNamespace(coverage=[1.0], risk=[], area=0.0)},
            r"`curves\['a'\].risk`",
        ),
    ],
)
def test_bad_input_is_refused(curves, words):
    with pytest.raises(ValueError, match=words):
        plots.risk_coverage(curves)
    assert plt.get_fignums() == []

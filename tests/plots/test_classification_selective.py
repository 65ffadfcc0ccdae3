import matplotlib.pyplot as plt
import numpy as np
import pytest

from tfp_ibnn import metrics, plots

pytestmark = pytest.mark.once

UNCERTAINTY, LOSS = [0.1, 0.9, 0.3, 0.2], [0.0, 1.0, 1.0, 0.0]


CURVE = metrics.risk_coverage(UNCERTAINTY, LOSS)


def test_curves_are_those_of_risk():
    ax = plots.risk_coverage({"flow": CURVE})
    (line,) = ax.lines
    expected = [[0.25, 0], [0.5, 0], [0.75, 1 / 3], [1, 0.5]]
    np.testing.assert_allclose(line.get_xydata()[-4:], expected)
    assert line.get_label() == f"flow (AURC {CURVE.area:#.3g})"


def test_several_curves_have_names_and_lines_of_their_own():
    made = CURVE._replace(area=0.5)
    ax = plots.risk_coverage({"a": made, "b": CURVE}, label="error rate")
    assert ax.get_legend().get_texts()[0].get_text() == "a (AURC 0.500)"
    assert ax.lines[0].get_linestyle() != ax.lines[1].get_linestyle()
    assert ax.get_ylabel() == "error rate"


def test_it_draws_where_it_is_told():
    given = plt.subplots()[1]
    assert plots.risk_coverage({"a": CURVE}, ax=given) is given


@pytest.mark.parametrize(
    ("curves", "words"),
    [
        ({}, "`curves` must map names to `metrics.risk_coverage"),
        (CURVE, "`curves` must map names"),
        ({"a": (UNCERTAINTY, LOSS)}, "`curves` must map names"),
    ],
)
def test_bad_input_is_refused(curves, words):
    with pytest.raises(ValueError, match=words):
        plots.risk_coverage(curves)
    assert plt.get_fignums() == []

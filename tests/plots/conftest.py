from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
from matplotlib.testing import set_font_settings_for_testing


def pytest_collection_modifyitems(items):
    """Pictures of arrays show nothing about the backend."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.once)


@pytest.fixture(autouse=True)
def pinned_style():
    """The same style and fonts whatever a user's own settings are; all figures closed after."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["font.family"] = "DejaVu Sans"
        set_font_settings_for_testing()
        yield
        plt.close("all")

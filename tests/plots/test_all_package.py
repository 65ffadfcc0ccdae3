import ast
from pathlib import Path

import tfp_ibnn


def imported(path):
    """Full names of what a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_only_plots_import_matplotlib():
    root = Path(tfp_ibnn.__file__).parent
    # The reports of `calibrate` and of diagnostics import them when they draw.
    drawing = {"plots", "figures.py", "report.py", "comparison.py"}
    files = [path for path in root.rglob("*.py") if not drawing & {*path.relative_to(root).parts}]
    names = {name for path in files for name in imported(path)}
    assert "tfp_ibnn.posteriors.Posterior" in names
    assert [name for name in names if name.startswith(("matplotlib", "tfp_ibnn.plots"))] == []

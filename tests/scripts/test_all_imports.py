"""The application code uses the library as its users do."""

import ast
from pathlib import Path

import pytest

import tfp_ibnn as ibnn

pytestmark = pytest.mark.once

SCRIPTS = Path(__file__).parents[2] / "scripts"
FILES = sorted(path for name in ("lib", "studies") for path in (SCRIPTS / name).rglob("*.py"))


def used(text):
    """Full names of what a source takes from the library, by import or as an attribute of it."""
    tree, names = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tfp_ibnn":
                    names[alias.asname or "tfp_ibnn"] = alias.name if alias.asname else "tfp_ibnn"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfp_ibnn":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                path, inner = [inner.attr, *path], inner.value
            if isinstance(inner, ast.Name) and inner.id in names:
                yield ".".join([names[inner.id], *path])


def private(text):
    return sorted(
        {
            name
            for name in used(text)
            for part in name.split(".")
            if part.startswith("_") and not part.endswith("__")
        }
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SCRIPTS).as_posix())
def test_only_public_names_are_used(path):
    text = path.read_text()
    assert private(text) == []
    first = {name.split(".")[1] for name in used(text) if "." in name}
    assert first - {*ibnn.__all__, "__version__", "__all__"} <= {
        *("calibration", "plots", "prediction", "training"),
    }


@pytest.mark.parametrize(
    "line",
    [
        "from tfp_ibnn import _core",
        "from tfp_ibnn._core.backend import NAME",
        "import tfp_ibnn._core.files",
        "import tfp_ibnn as ibnn\nibnn.layers._hidden()",
        "from tfp_ibnn.metrics._base import checked",
        "from tfp_ibnn import plots\nplots._grid.grid",
    ],
)
def test_a_private_name_is_noticed(line):
    assert private(line) != []


def test_there_is_something_to_look_at():
    assert len(FILES) > 10

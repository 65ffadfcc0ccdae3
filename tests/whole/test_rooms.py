"""The package is a house of rooms; imports point one way only."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from tfp_ibnn._core.backend.shared import NAMES

PACKAGE = Path(__file__).parents[2] / "tfp_ibnn"
ROOMS = (
    "_core",
    "noise",
    "flows",
    "data",
    "layers",
    "posteriors",
    "conversion",
    "metrics",
    "likelihoods",
    "prediction",
    "training",
    "weights",
    "distillation",
    "decisions",
    "export",
    "plots",
    "diagnostics",
    "generative",
    "calibration",
)
"""Each may import those before it, and none after it."""

MOST_LINES = 400


def module_of(path, package=PACKAGE):
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path, package=PACKAGE):
    """Return the modules of the package that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            # What is imported may be a module, or a name in one.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [x if is_module(x, package) else node.module for x in inside]
        else:
            continue
        found |= {name for name in names if name.split(".")[0] == "tfp_ibnn"}
    return found


def is_module(name, package=PACKAGE):
    path = package.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def wrong_imports(package=PACKAGE):
    """Return the imports that do not point upwards."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        own = module_of(path, package).split(".")
        if len(own) == 1 or own[1] == "__main__":
            continue
        for name in imported(path, package):
            room = name.split(".")[1:2]
            if not room or ROOMS.index(room[0]) > ROOMS.index(own[1]):
                wrong.append(f"{'.'.join(own)} imports {name}")
    return wrong


def test_every_folder_is_a_room():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    folders |= {path.name for path in PACKAGE.iterdir() if path.name == "_core"}
    assert folders == set(ROOMS)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_imports_point_upwards():
    assert wrong_imports() == []


@pytest.mark.parametrize(
    "line",
    [
        "from tfp_ibnn.prediction import MonteCarlo",
        "import tfp_ibnn.weights",
        "import tfp_ibnn",
        "def f():\n    from tfp_ibnn import training",
    ],
)
def test_an_import_from_a_lower_room_is_found(tmp_path, line):
    package = tmp_path / "tfp_ibnn"
    for room in ("layers", "prediction", "weights", "training"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "layers" / "new.py").write_text(line)
    assert len(wrong_imports(package)) == 1


def test_no_module_imports_itself_through_others():
    graph = {module_of(path): imported(path) for path in PACKAGE.rglob("*.py")}
    done, open_ = set(), []

    def visit(name):
        assert name not in open_, f"a circle: {' -> '.join([*open_, name])}"
        if name in done:
            return
        open_.append(name)
        for other in graph.get(name, ()):
            visit(other)
        open_.pop()
        done.add(name)

    for name in graph:
        visit(name)


def test_no_file_is_long():
    lengths = {module_of(x): len(x.read_text().splitlines()) for x in PACKAGE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def undocumented(module):
    """Return the public methods without a docstring, but for those that override one."""
    classes = [x for x in vars(module).values() if inspect.isclass(x)]
    return [
        f"{kind.__name__}.{name}"
        for kind in classes
        if kind.__module__ == module.__name__ and not kind.__name__.startswith("_")
        for name, method in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isroutine(method) or isinstance(method, property | classmethod | staticmethod))
        and not any(name in vars(base) for base in kind.__mro__[1:])
        and not method.__doc__
    ]


@pytest.mark.once
def test_methods_that_override_nothing_have_docstrings():
    names = {module_of(path) for path in PACKAGE.rglob("*.py")}
    left_out = re.compile(r".*(__main__|_core\.backend\..*)")
    modules = [importlib.import_module(name) for name in names if not left_out.fullmatch(name)]
    assert [name for module in modules for name in undocumented(module)] == []
    # It can find one: this class has a method of its own, and one that overrides.
    assert undocumented(importlib.import_module(__name__)) == ["Undocumented.own"]


class Undocumented(dict):
    def own(self):
        return self

    def keys(self):
        return super().keys()


def test_only_one_room_knows_the_backend():
    asks = re.compile(
        r"backend\.backend\(\)|backend\.NAME|^\s*(import|from) (tensorflow|jax)\b", re.M
    )
    knows = {
        module_of(path)
        for path in PACKAGE.rglob("*.py")
        if asks.search(re.sub(r"^\s*>>> .*", "", path.read_text(), flags=re.M))
    }
    assert {name for name in knows if not name.startswith("tfp_ibnn._core.backend")} == set()


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_both_backends_have_the_same_names(backend):
    def names(node):
        if isinstance(node, ast.Assign):
            return [n.id for target in node.targets for n in ast.walk(target) if hasattr(n, "id")]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return [alias.asname or alias.name for alias in node.names]
        return [getattr(node, "name", None)]

    tree = ast.parse((PACKAGE / "_core" / "backend" / f"{backend}.py").read_text())
    defined = {name for node in tree.body for name in names(node)}
    assert set(NAMES) - defined == set()

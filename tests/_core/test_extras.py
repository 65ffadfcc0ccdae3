"""A plain install is enough for `import tfp_ibnn`; what else a feature needs, it asks for."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tfp_ibnn as ibnn
from tfp_ibnn._core.extras import BACKENDS, EXTRAS, needs, needs_backend

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PACKAGES = {"PIL": "pillow", "sklearn": "scikit_learn"}
OTHERS = {  # the modules of extras that only scripts and examples import
    "examples": ("sklearn",),
    "experiments": ("PIL", "importlib_resources", "pandas", "tensorflow_datasets"),
    "serve": ("fastapi", "uvicorn"),
}
ABSENT = sorted({"arviz_stats", "pydantic", "starlette", *sum((EXTRAS | OTHERS).values(), ())})

# As if the extras were not installed. Keras and TensorFlow Probability try to import some of them,
# too, and do without: what counts is who asks.
PLAIN = f"""
import json, sys

asked = []

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            asked.append((frame.f_globals["__name__"], name))
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Absent())
import tfp_ibnn as ibnn
"""


def plain(code):
    """Run code after `import tfp_ibnn as ibnn` without the extras, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", f"{PLAIN}\n{code}"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


USE = f"""
loaded = [name for name in {ABSENT} if name in sys.modules]
own = [pair for pair in asked if pair[0].startswith("tfp_ibnn")]
try:
    from tfp_ibnn import plots
except ImportError as error:
    message = str(error)
score = ibnn.metrics.auroc([0.0], [1.0])
print(json.dumps([loaded, own, message, score]))
"""


MESSAGE = 'matplotlib is missing. Run: pip install "tfp_ibnn[plots]"'
ARVIZ = 'arviz is missing. Run: pip install "tfp_ibnn[diagnostics]"'


@pytest.mark.slow
def test_the_package_imports_no_extra_and_says_which_one_a_feature_needs():
    loaded, asked, message, score = plain(USE)
    assert (loaded, asked, message) == ([], [], MESSAGE)
    assert score == 1.0  # which needs no extra


def test_a_feature_says_which_extra_it_needs(monkeypatch):
    for name in list(sys.modules):
        if name.startswith("tfp_ibnn.plots"):
            monkeypatch.delitem(sys.modules, name)
        elif name.split(".")[0] in ABSENT:
            monkeypatch.setitem(sys.modules, name, None)
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(ibnn, "plots", raising=False)
    with pytest.raises(ImportError) as caught:
        from tfp_ibnn import plots  # noqa: F401
    assert str(caught.value) == MESSAGE
    with pytest.raises(ImportError) as caught:
        ibnn.diagnostics.k_hat(range(100))
    assert str(caught.value) == ARVIZ


def imports(nodes):
    """What is imported when a module is: neither in functions nor for type checkers alone."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(ast.iter_child_nodes(node))


def test_no_module_but_those_of_plots_imports_an_extra():
    for path in (ROOT / "tfp_ibnn").rglob("*.py"):
        if "plots" in path.parts:
            continue
        found = set(imports(ast.parse(path.read_text()).body))
        assert not {name for name in found if name.startswith("tfp_ibnn.plots")}, path
        assert not {name.split(".")[0] for name in found} & set(ABSENT), path


def test_other_missing_modules_are_not_taken_for_an_extra():
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        with needs("plots"):
            import no_such_module  # noqa: F401


NO_BACKEND = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "jax"):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Absent())
try:
    import tfp_ibnn
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax", None])
def test_without_a_backend_the_import_says_what_to_run(tmp_path, backend):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_HOME": str(tmp_path)}
    env.pop("KERAS_BACKEND", None)
    env |= {"KERAS_BACKEND": backend} if backend else {}
    command = [sys.executable, "-c", NO_BACKEND]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    asked = f", and KERAS_BACKEND is {backend!r}" if backend else ""
    assert done.stdout.startswith(f"{backend or 'tensorflow'} is missing{asked}. "), done.stderr
    for extra in ("tensorflow", "jax", "both"):
        assert f'pip install "tfp_ibnn[{extra}]"' in done.stdout
    assert "KERAS_BACKEND=jax" in done.stdout


@pytest.mark.parametrize("module", BACKENDS)
def test_a_missing_part_of_a_backend_is_named(module):
    error = ModuleNotFoundError(f"No module named '{module}.a'", name=f"{module}.a")
    with pytest.raises(ImportError, match=f"^{module} is missing") as caught:
        with needs_backend():
            raise error
    assert caught.value.__cause__ is error


def test_other_missing_modules_are_not_taken_for_a_backend():
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        with needs_backend():
            import no_such_module  # noqa: F401


def names(requirements):
    found = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in requirements}
    return found - {"tfp_ibnn"}  # an extra may take in others


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_extras_are_no_dependencies_and_all_has_them(project):
    extras = project["optional-dependencies"]
    for extra, modules in (EXTRAS | OTHERS).items():
        assert names(extras[extra]) == {PACKAGES.get(name, name) for name in modules}
        assert not names(extras[extra]) & names(project["dependencies"])
    assert extras["all"] == ["tfp_ibnn[diagnostics,examples,litert,onnx,plots,serve]"]


def test_the_requirements_have_everything_pinned(project):
    extras = project["optional-dependencies"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if re.match(r"\w", line)]
    assert [line for line in pinned if "==" not in line] == []
    parts = ("tensorflow", *EXTRAS, *OTHERS, "dev")
    for part in (project["dependencies"], *(extras[x] for x in parts)):
        assert names(part) <= names(pinned)


def test_the_backends_are_extras_that_never_hold_two_packages_of_one_name(project):
    extras = project["optional-dependencies"]
    assert names(project["dependencies"]) == {"keras", "numpy", "scipy"}
    assert names(extras["tensorflow"]) == {"tensorflow", "tensorflow_probability", "tf_keras"}
    assert names(extras["jax"]) == {"jax", "tfp_nightly"}
    assert extras["both"][0] == "tfp_ibnn[jax]"
    assert names(extras["both"]) == {"tensorflow", "tf_keras"}
    assert set(extras["both"][1:]) < set(extras["tensorflow"])


def test_the_bounds_of_the_versions_are_tried(project):
    extras = project["optional-dependencies"]
    matrix = tomllib.loads((ROOT / "tests" / "versions.toml").read_text())
    tried = {pin for entry in matrix.values() for pin in entry["pins"]}
    for line in (project["dependencies"][0], extras["tensorflow"][0], extras["jax"][0]):
        name, low = re.match(r"(\w+)>=([\d.]+),<", line).groups()
        assert any(pin.startswith(f"{name}=={low}.") for pin in tried), line
        newest = "requirements-jax.txt" if name == "jax" else "requirements.txt"
        (pinned,) = re.findall(rf"^{name}==[\d.]+", (ROOT / newest).read_text(), re.MULTILINE)
        assert pinned in tried
    minors = {re.match(r"keras==3\.(\d+)", pin)[1] for pin in tried if pin.startswith("keras==")}
    assert minors == {"12", "13", "14", "15"}
    backends = {entry["extras"].split(",")[0] for entry in matrix.values()}
    assert backends == {"tensorflow", "jax", "both"}


def test_the_citation_matches_the_project(project):
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    cited = dict(line.split(": ", 1) for line in lines if re.match(r"[\w-]+: ", line))
    assert cited["title"] == f'"{project["name"]}: {project["description"]}"'
    assert cited["version"] == project["version"] == ibnn.__version__
    assert cited["license"] == project["license"]
    assert cited["repository-code"] == project["urls"]["Repository"]

"""The wheel is complete, and an install of it with a backend works in an empty environment."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

EXTRAS = ("matplotlib", "PIL", "pandas", "sklearn", "tensorflow_datasets", "fastapi", "uvicorn")
PROBE = f"""
import importlib.metadata, importlib.util, json, tfp_ibnn
try:
    from tfp_ibnn import plots
except ImportError as error:
    message = str(error)
print(json.dumps({{
    "file": tfp_ibnn.__file__,
    "version": tfp_ibnn.__version__,
    "metadata_version": importlib.metadata.version("tfp_ibnn"),
    "has_normal_affine": hasattr(tfp_ibnn, "NormalAffine"),
    "extras": [name for name in {EXTRAS} if importlib.util.find_spec(name)],
    "plots": message,
}}))
"""


def run(*command, **kwargs):
    """Runs a command and returns its standard output; a failure shows all it printed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in names if ".dist-info/" not in name}
    sources = (ROOT / "tfp_ibnn").rglob("*.py")
    expected = {path.relative_to(ROOT).as_posix() for path in sources} | {"tfp_ibnn/py.typed"}
    assert files == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_install_in_an_empty_environment(wheel, tmp_path):
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    # Compiling every module of TensorFlow would take longer than unpacking it.
    install = (python, "-m", "pip", "install", "--quiet", "--no-compile")

    # -I: neither PYTHONPATH nor the working folder can lend the module. No KERAS_BACKEND and no
    # Keras settings file either: this is what a new user meets.
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    env["KERAS_HOME"] = str(empty)

    run(*install, wheel)  # without a backend
    refusal = (python, "-I", "-c", "import tfp_ibnn")
    done = subprocess.run(refusal, capture_output=True, text=True, cwd=empty, env=env)
    assert done.returncode == 1
    assert 'pip install "tfp_ibnn[tensorflow]"' in done.stderr
    assert 'pip install "tfp_ibnn[jax]"' in done.stderr

    run(*install, f"tfp_ibnn[tensorflow] @ {wheel.as_uri()}")
    run(python, "-m", "pip", "check")
    found = json.loads(run(python, "-I", "-c", PROBE, cwd=empty, env=env).splitlines()[-1])

    assert Path(found["file"]).resolve().is_relative_to(venv.resolve())
    assert found["version"] == found["metadata_version"]
    assert found["has_normal_affine"]
    assert found["extras"] == []
    assert found["plots"] == 'matplotlib is missing. Run: pip install "tfp_ibnn[plots]"'


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("all", {"fastapi", "matplotlib", "scikit-learn", "uvicorn"}),
        ("experiments", {"fastapi", "matplotlib", "pandas", "pillow", "tensorflow-datasets"}),
        ("tensorflow", {"tensorflow", "tensorflow-probability", "tf-keras"}),
        ("jax", {"jax", "tfp-nightly"}),
        ("both", {"jax", "tensorflow", "tf-keras", "tfp-nightly"}),
    ],
)
def test_an_extra_brings_its_packages(wheel, tmp_path, extra, packages):
    report = tmp_path / "report.json"
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", report)
    run(sys.executable, "-m", "pip", "install", *options, f"tfp_ibnn[{extra}] @ {wheel.as_uri()}")
    found = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    found = {name.lower().replace("_", "-") for name in found}
    assert packages <= found
    of_backends = {"tensorflow", "jax", "tensorflow-probability", "tfp-nightly"}
    assert found & of_backends == packages & of_backends

"""The notebooks run, each .ipynb is its .py, and its outputs are fit to be read."""

import re
import runpy
from pathlib import Path

import keras
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
# A machine's own paths: homes, temporary folders, installed packages, Windows drives.
MACHINE_PATH = re.compile(
    r"(?:/(?:home|root|Users|tmp|work|var|opt|mnt)/\w|site-packages|[A-Z]:\\\\)"
)

pytestmark = pytest.mark.once

on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the notebook tools are in that environment"
)


def read(path):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


def cells(notebook):
    """Return the type and the text of each cell."""
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def shows_something(source):
    """Whether a cell prints or draws by itself, not only in functions that it defines."""
    run = re.sub(r"^(?:def|class) .*\n(?:(?:[ \t]+.*)?\n)*", "", source + "\n", flags=re.M)
    return bool(re.search(r"\bprint\(|plt\.show\(", run))


def problems(notebook):
    """Return what is wrong with the outputs of an executed notebook."""
    found = []
    counts = [cell.execution_count for cell in code(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"executed out of order: {counts}")
    for number, cell in enumerate(code(notebook), start=1):
        if shows_something(cell.source) and not cell.outputs:
            found.append(f"cell {number} has no output")
        if "execution" in cell.metadata:
            found.append(f"cell {number} has the times of its execution")
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"cell {number} failed: {output.ename}")
            elif output.output_type == "stream" and output.name == "stderr":
                found.append(f"cell {number} writes to stderr: {output.text[:200]}")
            texts = [output.get("text", ""), *output.get("traceback", [])]
            texts += [v for k, v in output.get("data", {}).items() if k.startswith("text/")]
            for text in texts:
                if MACHINE_PATH.search(text):
                    found.append(f"cell {number} shows a path: {text[:200]}")
    return found


def test_there_are_notebooks():
    assert NAMES[:2] == ["01_two_dimensions", "02_what_a_flow_learns"]


# The longest are left to `make test-slow`.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Limiting", "ignore:Your input ran out of data")
@pytest.mark.parametrize("name", NAMES)
def test_runs_as_a_script(few_steps, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFP_IBNN_FAST", "1")
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context():
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        plt.close("all")
    assert capsys.readouterr().out.strip()


@on_tensorflow
def test_the_runner_executes_a_notebook(tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import run_notebooks

    source = tmp_path / "small.py"
    source.write_text("# %% [markdown]\n# Text.\n\n# %%\nprint(6 * 7)\n")
    notebook = run_notebooks.execute(source, timeout=60)
    assert problems(notebook) == []
    assert notebook.cells[1].outputs[0].text == "42\n"


@on_tensorflow
@pytest.mark.parametrize("name", NAMES)
def test_pair_is_in_sync(name):
    jupytext = pytest.importorskip("jupytext")
    text = jupytext.read(FOLDER / f"{name}.py")
    assert cells(read(FOLDER / f"{name}.ipynb")) == cells(text)
    assert text.metadata["jupytext"]["formats"] == "ipynb,py:percent"


@on_tensorflow
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_fit_to_be_read(name):
    notebook = read(FOLDER / f"{name}.ipynb")
    assert problems(notebook) == []
    figures = [
        o for cell in code(notebook) for o in cell.outputs if "image/png" in o.get("data", {})
    ]
    assert figures


def test_every_notebook_has_its_pair_and_is_small():
    executed = {path.stem: path.stat().st_size for path in FOLDER.glob("*.ipynb")}
    assert sorted(executed) == NAMES
    assert {name: size for name, size in executed.items() if size > 1_000_000} == {}


@on_tensorflow
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"execution_count": 2}, "out of order"),
        ({"outputs": []}, "no output"),
        ({"metadata": {"execution": {"iopub.status.busy": "2026"}}}, "times"),
        ({"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}, "failed"),
        ({"output_type": "stream", "name": "stderr", "text": "a warning"}, "stderr"),
        ({"output_type": "stream", "name": "stdout", "text": "in /home/me/x.py"}, "path"),
    ],
)
def test_problems_are_found(change, expected):
    v4 = pytest.importorskip("nbformat").v4
    good = v4.new_output("stream", name="stdout", text="1\n")
    cell = v4.new_code_cell("print(1)", execution_count=1, outputs=[good])
    notebook = v4.new_notebook(cells=[cell])
    assert problems(notebook) == []
    if "output_type" in change:
        cell.outputs.append(v4.new_output(**change))
    else:
        cell.update(change)
    assert [problem for problem in problems(notebook) if expected in problem]

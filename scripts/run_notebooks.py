"""Execute the notebooks: notebooks/NAME.py becomes NAME.ipynb, with its outputs and figures.

    python scripts/run_notebooks.py
    python scripts/run_notebooks.py 01_two_dimensions 04_regression --output outputs/notebooks

The text and the code come from the .py file; the .ipynb is written anew. What a reader need not
see is left out: execution times, and what libraries print below Python (TensorFlow's notes on
the machine). Python's own warnings stay, so that they are noticed.
"""

import argparse
import base64
import io
import os
import tempfile
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parents[1] / "notebooks"


def execute(source, timeout):
    """Return the notebook of a .py file, executed."""
    notebook = jupytext.read(source)
    # A backend that is set outside would keep the figures from the notebook.
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    with tempfile.TemporaryDirectory() as folder:
        sockets = str(Path(folder) / "kernel")
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=sockets)
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=timeout,
            record_timing=False,
            extra_arguments=["--IPKernelApp.capture_fd_output=False"],
        )
        client.execute(cwd=str(source.parent), env=env)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same in each run, so that the differences stay small
        for output in cell.get("outputs", ()):
            if png := output.get("data", {}).get("image/png"):
                output["data"]["image/png"] = smaller(png)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def smaller(png):
    """Return a picture, in base64, with 256 colours, or itself if that is not smaller."""
    found = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(found, "png", optimize=True)
    return min(png, base64.b64encode(found.getvalue()).decode(), key=len)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks, without a suffix (default: all)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for the .ipynb files")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds a cell may take")
    options = parser.parse_args(arguments)
    known = sorted(path.stem for path in FOLDER.glob("*.py"))
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no notebook {unknown[0]!r}; there are {', '.join(known)}")
    options.names = options.names or known
    return options


def main():
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        notebook = execute(FOLDER / f"{name}.py", options.timeout)
        target = options.output / f"{name}.ipynb"
        nbformat.write(notebook, target)
        print(f"{name}.ipynb  {target.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()

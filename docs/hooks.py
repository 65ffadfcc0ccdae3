"""Extend MkDocs: formulas become MathML; notebooks and results become pages."""

import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
RESULTS = sorted(ROOT.glob("results/**/README.md"), key=lambda path: (len(path.parts), path))

# What runs networks in the browser, for the page try.md; `make web` fetches it.
RUNTIME = ROOT / ".venv-web" / "node_modules" / "onnxruntime-web" / "dist"
RUNTIME_FILES = (
    "ort.wasm.bundle.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
)

# A link from a page of docs/ to a notebook or a report, which the site has one folder lower.
_OUT_OF_DOCS = re.compile(r"\]\(((?:\.\./)*)\.\./((?:notebooks|results)/)")

# A link from a report to a page of docs/, which the site has one folder higher.
_INTO_DOCS = re.compile(r"\]\(((?:\.\./)+)docs/")

# A notebook, of which the site has a page.
_NOTEBOOK = re.compile(r"(\]\([^)\s]*notebooks/[^)\s]*)\.ipynb")

# What pymdownx.arithmatex leaves of $...$ and of $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> None:
    """Add the notebooks and the results to the navigation, before the reference."""
    config.nav[-1:-1] = [
        {"Notebooks": [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]},
        {"Results": [path.relative_to(ROOT).as_posix() for path in RESULTS]},
    ]


def on_files(files: Files, config: Any) -> None:
    """Add notebooks with outputs, results with figures and numbers, and the browser's runtime."""
    for path in NOTEBOOKS:
        for name, content in _notebook(path):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for path in (*RESULTS, *ROOT.glob("results/**/*.png"), *ROOT.glob("results/**/*.json")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name in RUNTIME_FILES:
        if (RUNTIME / name).exists():
            files.append(
                File.generated(config, f"try/ort/{name}", abs_src_path=str(RUNTIME / name))
            )


def _notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the names and contents of a notebook's figures, then of its page."""
    text, figures = [], 0
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            text.append(source)
        elif source:
            text.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                figures += 1
                name = f"{path.stem}_{figures}.png"
                yield name, base64.b64decode("".join(data["image/png"]))
                text.append(f"![Figure {figures}]({name})")
            elif printed := "".join(output.get("text") or data.get("text/plain", ())):
                text.append(f"```{{.text .printed}}\n{printed.rstrip()}\n```")
    yield f"{path.stem}.md", "\n\n".join(text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links between pages, notebooks and reports to the places that they have in the site."""
    markdown = _NOTEBOOK.sub(r"\1.md", markdown)
    if page.file.src_uri.startswith("results/"):
        return _INTO_DOCS.sub(r"](\1", markdown)
    return _OUT_OF_DOCS.sub(r"](\1\2", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace each formula by MathML, which browsers draw without a script."""

    def mathml(match: re.Match) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return _FORMULA.sub(mathml, content)

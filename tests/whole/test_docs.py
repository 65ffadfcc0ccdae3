import html
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the pages are built and run on TensorFlow", allow_module_level=True)
pytest.importorskip("mkdocs")
pytest.importorskip("material")

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# A block that is a part of something, and does not run by itself, has this line above it.
BLOCK = re.compile(r"(<!-- fragment -->\n)?```python\n(.*?)```", flags=re.DOTALL)


class Page(HTMLParser):
    """The ids of a page, what it links to and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif "src" in attributes or "href" in attributes:
            self.loads.append(attributes.get("src") or attributes["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_is_built(site):
    assert [name for name in PAGES if not (site / name).with_suffix(".html").is_file()] == []


def test_notebooks_and_results_are_pages(site, pages):
    names = [f"notebooks/{path.stem}.html" for path in ROOT.glob("notebooks/*.ipynb")]
    assert len(names) >= 4
    for name in (*names, "results/vgg16/index.html"):
        assert any(load.endswith(".png") for load in pages[site / name].loads), name


def test_links_lead_to_pages_and_their_headings(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            url = urlsplit(html.unescape(link))
            if url.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.exists():
                broken.append(f"{path.name}: {link}")
            elif url.fragment and target.suffix == ".html":
                if unquote(url.fragment) not in pages[target].ids:
                    broken.append(f"{path.name}: {link}")
    assert broken == []


def test_nothing_comes_from_another_host(site, pages):
    outside = [link for page in pages.values() for link in page.loads if urlsplit(link).netloc]
    for style in site.rglob("*.css"):
        outside += re.findall(
            r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")]+)", style.read_text()
        )
    assert outside == []


def test_formulas_are_mathml(site):
    text = (site / "how_it_works.html").read_text()
    assert text.count("<math") >= 10
    assert "arithmatex" not in text
    assert "\\frac" not in re.sub(r"<annotation.*?</annotation>", "", text, flags=re.DOTALL)


def test_reference_has_the_public_names(site):
    import tfp_ibnn

    reference = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    names = [name for name in tfp_ibnn.__all__ if not hasattr(getattr(tfp_ibnn, name), "__path__")]
    missing = [n for n in names if f">{n}<" not in reference and f"tfp_ibnn.{n}" not in reference]
    assert missing == []
    assert set(re.findall(r"tfp_ibnn\.flows\.\w*Bijector\b", reference)) == set()


def test_howto_lists_every_flow():
    from tfp_ibnn import flows

    bases = (flows.Flow, flows.Surjection, flows.DiscreteFlow)
    text = (DOCS / "howto.md").read_text()
    kinds = [x for x in vars(flows).values() if isinstance(x, type) and issubclass(x, bases)]
    missing = [x.__name__ for x in kinds if x not in bases and f"`{x.__name__}(" not in text]
    assert len(kinds) > 20
    assert missing == []


# The longest pages, and one whose example is the README's, are left to `make test-slow`.
SLOW = {
    *("choosing.md", "decisions.md", "densities.md", "distributed.md"),
    *("ensembles_and_samplers.md", "from_tfp.md", "index.md", "is_it_right.md", "laplace.md"),
    *("refine.md", "serving.md", "troubleshooting.md", "weight_posteriors.md"),
}
# What is collected while a model trains needs more than a few steps; chains are slow uncompiled.
WHOLE = ("ensembles_and_samplers.md", "is_it_right.md")


@pytest.mark.filterwarnings("ignore:Limiting", "ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else [])
        for name in PAGES
        if BLOCK.search((DOCS / name).read_text())
    ],
)
def test_examples_run(request, name, tmp_path, monkeypatch):
    """The blocks of one page run in order, as a reader would paste them."""
    if name not in WHOLE:
        request.getfixturevalue("few_steps")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for fragment, code in BLOCK.findall((DOCS / name).read_text()):
        if not fragment:
            exec(compile(code, name, "exec"), namespace)


def test_images_are_small():
    heavy = [path.name for path in (DOCS / "images").iterdir() if path.stat().st_size > 150_000]
    assert heavy == []

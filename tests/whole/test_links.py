"""Links lead to files and headings of a checkout. test_docs.py asks the same of the site."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted([*ROOT.glob("results/**/README.md"), *ROOT.glob("docs/**/*.md")])
CODE = re.compile(r"```.*?```|`[^`\n]*`", flags=re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:href|src)=\"([^\"]+)\"")

pytestmark = pytest.mark.once


def anchors(text):
    """Return the anchors of a page's headings, as GitHub and MkDocs make them, and its ids."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.*?) *$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    found = {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}
    return found | set(re.findall(r"\bid=\"([^\"]+)\"", text))


def broken(path):
    """Return the links of a page that lead nowhere in a checkout."""
    found = []
    for groups in LINK.findall(CODE.sub("", path.read_text())):
        link = urlsplit("".join(groups))
        if link.scheme:
            continue
        target = path.parent / link.path if link.path else path
        if not target.exists():
            found.append(link.geturl())
        elif link.fragment and link.fragment not in anchors(target.read_text()):
            found.append(link.geturl())
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(path):
    assert broken(path) == []


def test_there_are_links():
    assert len(LINK.findall(CODE.sub("", (ROOT / "README.md").read_text()))) > 10


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `name`, and [more](page.md)\n"
        "[a](page.md#one-name-and-more) [b](none.md) [c](#two) `[d](code.md)` ![e](none.png)\n"
        '<img src="none.svg"> [f](https://example.com)\n'
    )
    assert broken(page) == ["none.md", "#two", "none.png", "none.svg"]

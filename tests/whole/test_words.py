"""The documentation stays short: pages say what to do, reports in results/ hold the rest."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/*.md"))
MOST_OF_A_PAGE = 2000
MOST_OF_ALL = 27_000

pytestmark = pytest.mark.once


def words(path):
    """Return the number of words of a page, those in tables included and their rules not."""
    found = path.read_text(encoding="utf-8").split()
    return sum(any(map(str.isalnum, word)) for word in found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_read_in_ten_minutes(path):
    assert words(path) <= MOST_OF_A_PAGE


def test_the_site_is_read_in_two_hours():
    assert len(PAGES) > 20
    assert sum(map(words, PAGES)) <= MOST_OF_ALL


def test_the_index_of_results_is_one_screen():
    assert words(ROOT / "results" / "README.md") <= 620


def test_rules_of_tables_are_no_words(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| one | two |\n|---|---|\n| 3 | four-five |\n", encoding="utf-8")
    assert words(page) == 4

"""A test is where its code is, so that whoever changes a file finds what is said about it.

tests/<room>/test_<file>.py is about tfp_ibnn/<room>/<file>.py; a second one has a word more, as in
test_<file>_<aspect>.py. test_all.py and test_all_<aspect>.py run over everything in a room, and
tests/whole/ holds what crosses rooms. tests/scripts/ mirrors scripts/ in the same way.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
APART = ("robustness", "stranger", "whole")  # campaigns, toys, and what crosses rooms

TESTED_ELSEWHERE = {}
"""Files of the package without a test of their own, and the tests that show what they do."""


def subjects(folder):
    """Return the names of the files and folders of Python code in a folder."""
    files = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    return files | {path.parent.name for path in folder.glob("*/*.py")}


def code_of(folder):
    """Return the folder with the code that a folder of tests is about."""
    parts = folder.relative_to(TESTS).parts
    return ROOT.joinpath(*parts) if parts[0] == "scripts" else ROOT.joinpath("tfp_ibnn", *parts)


def is_about(test, names):
    """Whether the name of a test begins with that of one of the subjects, or with `all`."""
    subject = test.stem.removeprefix("test_")
    return any(f"{subject}_".startswith(f"{name.strip('_')}_") for name in (*names, "all"))


def folders():
    found = {path.parent for path in TESTS.rglob("test_*.py")}
    return sorted(x for x in found if x.relative_to(TESTS).parts[0] not in APART)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(TESTS)))
def test_tests_are_where_their_code_is(folder):
    assert folder != TESTS
    names = subjects(code_of(folder))
    assert [
        test.name for test in sorted(folder.glob("test_*.py")) if not is_about(test, names)
    ] == []


def test_a_test_about_nothing_is_found():
    assert is_about(Path("test_planar_float32.py"), {"planar"})
    assert is_about(Path("test_all_contract.py"), {"planar"})
    assert not is_about(Path("test_planarity.py"), {"planar"})


def files_without_a_test():
    for path in sorted((ROOT / "tfp_ibnn").rglob("*.py")):
        parts = path.relative_to(ROOT / "tfp_ibnn").with_suffix("").parts
        if len(parts) == 1 or parts[-1] == "__init__":
            continue
        tests = TESTS.joinpath(parts[0]).rglob("test_*.py")
        if not any(is_about(test, {parts[-1]}) and "all" not in test.stem for test in tests):
            yield "/".join(parts)


def test_every_file_has_a_test_or_it_is_said_where():
    assert sorted(files_without_a_test()) == sorted(TESTED_ELSEWHERE)
    places = {place for text in TESTED_ELSEWHERE.values() for place in text.split(", ")}
    assert sorted(place for place in places if not (TESTS / place).exists()) == []

"""The one command for all studies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import study

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in study.STUDIES.glob("*/run.py"))


def test_all_studies_are_listed_with_their_purpose(capsys):
    assert study.main([]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    purposes = {line[0]: line[1] for line in listed if len(line) == 2 and line[0] in NAMES}
    assert sorted(purposes) == NAMES
    assert all(text.endswith((".", "?")) or len(text) > 40 for text in purposes.values())


def test_an_unknown_study_is_named(capsys):
    assert study.main(["nonsense", "--quick"]) == 2
    assert "there is no study 'nonsense'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["few", "calibrate", "vae"])
def test_help_needs_no_backend(name):
    """It answers at once: neither Keras nor a backend is imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(study.STUDIES.parent)!r}); import study\n"
        f"try:\n    study.main([{name!r}, '--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'keras', 'tensorflow', 'jax', 'tfp_ibnn'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert f"study.py {name}" in done.stdout
    assert "--pairs" in done.stdout


def test_pairs_may_be_named_by_their_group():
    from studies.calibrate import STUDY, run

    assert STUDY._pairs(None, run) == list(run.TUNED)
    assert STUDY._pairs(["unseen", "digits"], run) == [*run.UNSEEN, "digits"]


def test_the_page_lists_every_script():
    page = (ROOT / "scripts" / "README.md").read_text()
    scripts = [path.name for path in (ROOT / "scripts").glob("*.py")]
    assert sorted(name for name in scripts if f"| `{name}` |" not in page) == []

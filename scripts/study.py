"""Run one of the studies, each of which answers a question: `python scripts/study.py NAME`.

Options follow the name; `python scripts/study.py NAME --help` describes them. Without a name, all
studies are listed. What they found is in `results/`.

Examples:
    python scripts/study.py
    python scripts/study.py few --help
    python scripts/study.py few --quick --pairs few_lenet
"""

import ast
import importlib
import sys
from pathlib import Path

STUDIES = Path(__file__).parent / "studies"


def main(argv=None):
    arguments = sys.argv[1:] if argv is None else list(argv)
    known = studies()
    name = arguments[0] if arguments else "--help"
    if name in known:
        return importlib.import_module(f"studies.{name}").STUDY.main(arguments[1:])
    asks_for_help = name in ("-h", "--help")
    usage = f"usage: study.py NAME [options]\n\n{__doc__}"
    print(usage if asks_for_help else f"error: there is no study {name!r}. These are there:\n")
    width = max(map(len, known))
    for study in known:
        print(f"  {study:{width}}  {purpose(study)}")
    return 0 if asks_for_help else 2


def studies():
    """Return the names of all studies."""
    return sorted(path.parent.name for path in STUDIES.glob("*/run.py"))


def purpose(study):
    """Return what a study is for: the first line of its description, without running it."""
    text = (STUDIES / study / "__init__.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())

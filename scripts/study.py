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
    modules = studies()
    name = arguments[0] if arguments else "--help"
    if name in modules:
        module = importlib.import_module(modules[name])
        return getattr(module, "STUDY", module).main(arguments[1:])
    asks_for_help = name in ("-h", "--help")
    usage = f"usage: study.py NAME [options]\n\n{__doc__}"
    print(usage if asks_for_help else f"error: there is no study {name!r}. These are there:\n")
    width = max(map(len, modules))
    for study, module in modules.items():
        print(f"  {study:{width}}  {purpose(module)}")
    return 0 if asks_for_help else 2


def studies():
    """Return the modules with the command lines of all studies, by name: those described."""
    found = {}
    for folder in sorted(path for path in STUDIES.iterdir() if (path / "run.py").exists()):
        has_own = docstring(folder / "__init__.py") is not None
        found[folder.name] = f"studies.{folder.name}" + ("" if has_own else ".run")
    return found


def purpose(module):
    """Return what a study is for: the first line of its description."""
    path = STUDIES.parent.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return docstring(path).splitlines()[0]


def docstring(path):
    """Return the docstring of a file, without running it."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())

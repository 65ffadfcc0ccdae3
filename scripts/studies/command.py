"""The command line of studies whose runs are tasks of `lib.tasks`."""

import argparse
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

DATA_DIR = "cache of the data (default: TFP_IBNN_DATA, or the user's cache)"


def _parser(name):
    """Return a parser, described by the docstring of the study's package."""
    return argparse.ArgumentParser(
        prog=f"study.py {name}",
        description=importlib.import_module(f"studies.{name}").__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


class Command(NamedTuple):
    """The command line of a study that is one run: `execute` of `studies/<name>/run.py`."""

    name: str
    add_options: Callable[[Callable[..., Any]], None]
    """Adds its options, by a parser's `add_argument`."""

    least: dict[str, int] = {}
    """The smallest values of some options."""

    def parse(self, argv=None):
        """Return the options of a command line, or end with a message."""
        parser = _parser(self.name)
        self.add_options(parser.add_argument)
        options = parser.parse_args(argv)
        for name, least in self.least.items():
            value = getattr(options, name)
            if value is not None and value < least:
                parser.error(f"--{name.replace('_', '-')} must be at least {least}; got {value}")
        return options

    def main(self, argv=None):
        """Run the study as the command line says; return the status."""
        options = self.parse(argv)  # first: the imports below take seconds
        found = importlib.import_module(f"studies.{self.name}.run").execute(options)
        return found if isinstance(found, int) else 0


class Study(NamedTuple):
    """A study: the folder `studies/<name>` has its runs (`run.py`) and tables (`tables.py`).

    `run.PAIRS` names its data and networks, `run.run_all` runs what is not stored yet, and
    `tables.tables` makes Markdown of the records.
    """

    name: str
    """Of its folders in `studies` and `results`; its tables have this tag in its report."""

    seeds: int = 3
    """How many, from 0 on, are run if none are named."""

    options: dict[str, dict[str, Any]] = {}
    """Options of this study alone, as `add_argument` takes them; `run_all` gets their values."""

    groups: tuple[str, ...] = ()
    """Names of lists in `run`, which `--pairs` takes as well; the first is run by default."""

    @property
    def results(self):
        """The folder in which its records are stored."""
        return f"results/{self.name}"

    @property
    def report(self):
        """The page that shows its tables."""
        return f"{self.results}/README.md"

    def main(self, argv=None):
        """Run the study, or only write its tables, as the command line says; return the status."""
        parser = self._parser()
        options = parser.parse_args(argv)
        if options.jobs < 1:
            parser.error(f"--jobs must be at least 1; got {options.jobs}")
        _set_environment(options)

        run = importlib.import_module(f"studies.{self.name}.run")
        tables = importlib.import_module(f"studies.{self.name}.tables")
        tasks = importlib.import_module("lib.tasks")
        pairs = self._pairs(options.pairs, run)
        if unknown := set(pairs) - run.PAIRS.keys():
            parser.error(f"--pairs must be some of {', '.join(run.PAIRS)}; got {unknown.pop()}")
        output = options.output
        if output is None:
            output = f"outputs/quick/{self.name}" if options.quick else self.results
        failed = 0
        if not options.tables:
            names = ("quick", "jobs", "data_dir", *self.options)
            values = {name: getattr(options, name) for name in names}
            failed = run.run_all(pairs, options.seeds, output, **values)
        report = self.report if output == self.results else None
        tasks.write_tables(output, self.name, tables.tables(tasks.read(output)), report)
        print(f"Written to {output}; {failed} tasks failed.")
        return 1 if failed else 0

    def _parser(self):
        parser = _parser(self.name)
        add = parser.add_argument
        default = f"those of {self.groups[0].lower()}" if self.groups else "all"
        groups = "".join(f", or {name.lower()}" for name in self.groups)
        add("--pairs", nargs="+", help=f"data and networks{groups} (default: {default})")
        last = self.seeds - 1
        add("--seeds", type=int, nargs="+", default=range(self.seeds), help=f"default: 0 to {last}")
        add("--jobs", type=int, default=1, help="tasks at once (default 1); more pay on a GPU")
        backends = ("tensorflow", "jax")
        add("--backend", choices=backends, help="default: KERAS_BACKEND, or tensorflow")
        add("--data-dir", help=DATA_DIR)
        add("--output", help=f"default: {self.results}, or outputs/quick/{self.name}")
        add("--tables", action="store_true", help="run nothing, only write the tables")
        add("--quick", action="store_true", help="a smoke test, with numbers that mean nothing")
        for name, settings in self.options.items():
            add(f"--{name}", **settings)
        return parser

    def _pairs(self, named, run):
        """Return the pairs that a command line names, by themselves or by their group."""
        groups = {name.lower(): getattr(run, name) for name in self.groups}
        if not named:
            named = list(groups)[:1] or list(run.PAIRS)
        return [pair for name in named for pair in groups.get(name, (name,))]


def _set_environment(options):
    """Set what must be known before Keras is imported, here and in processes that this starts."""
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    if options.jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "outputs/compiled")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")

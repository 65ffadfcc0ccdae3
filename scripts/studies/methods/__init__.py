r"""Compare every method of the library on the same networks and data, none of them tuned.

Networks are trained and kept in models/ of --output; Laplace, SWAG, ensembles and posteriors of the
last layer begin with them; SG-MCMC, MC dropout and posteriors of z train their own. Every task has
a process of its own and becomes a line of runs.jsonl in --output; tasks that are there are skipped,
so the same command resumes. Then table.md is written from all of them.

Examples:
    python scripts/study.py methods --pairs digits --seeds 0 1 2
    python scripts/study.py methods --backend jax --jobs 14
    python scripts/study.py methods --tables
"""

import argparse
import importlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
RESULTS = "results/methods"
PAGES = (f"{RESULTS}/README.md", "docs/which_method.md")


def main(argv=None):
    return command(argv, __doc__, "method", RESULTS, PAGES)


def command(argv, text, name, results, pages, seeds=3, **more):
    """Run a study of `experiments`, or only write its tables, as the command line says.

    `more` are options of this study alone, by name, as `add_argument` takes them.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", nargs="+", metavar="PAIR", help="data and network (default: all)")
    add("--seeds", type=int, nargs="+", default=range(seeds), help=f"default: 0 to {seeds - 1}")
    add("--jobs", type=int, default=1, help="tasks at once (default 1); more pay on a GPU")
    add("--backend", choices=("tensorflow", "jax"), help="default: KERAS_BACKEND, or tensorflow")
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    add("--output", help=f"default: {results}, or outputs/quick/{name}")
    add("--tables", action="store_true", help="run nothing, only write the tables")
    add("--quick", action="store_true", help="a smoke test, with numbers that mean nothing")
    for key, about in more.items():
        add(f"--{key}", **about)
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {options.jobs}")
    # Before Keras is imported, here and in the processes that this one starts.
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    if options.jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "outputs/compiled")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")

    study = importlib.import_module(f"experiments.{name}_study")
    tables = importlib.import_module(f"experiments.{name}_tables")
    pairs = options.pairs or list(study.PAIRS)
    if unknown := set(pairs) - study.PAIRS.keys():
        parser.error(f"--pairs must be some of {', '.join(study.PAIRS)}; got {unknown.pop()}")
    output, failed = options.output, 0
    output = output or (f"outputs/quick/{name}" if options.quick else results)
    if not options.tables:
        more = {key: getattr(options, key) for key in ("quick", "jobs", "data_dir", *more)}
        failed = study.run_all(pairs, options.seeds, output, **more)
    tables.write_tables(output, *(pages if output == results else ()))
    print(f"Written to {output}; {failed} tasks failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

r"""Calibrate networks on several data sets by `ibnn.calibrate`, and test what comes out.

A network is trained as usual, then calibrated with the defaults; all candidates are scored on test
data. Every run has a process of its own and becomes a line of runs.jsonl in --output; runs that are
there are skipped, so the same command resumes. Then table.md is written from all of them.

Examples:
    python scripts/study.py calibrate --pairs digits cancer
    python scripts/study.py calibrate --unseen --seeds 0 1
    python scripts/study.py calibrate --pairs cifar_vgg16 --backend jax --jobs 5
    python scripts/study.py calibrate --tables
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
RESULTS = "results/calibrate"
PAGES = (f"{RESULTS}/README.md", "docs/calibrate.md")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", nargs="+", metavar="PAIR", help="data and network (default: those tuned on)")
    add("--unseen", action="store_true", help="instead those not used for tuning")
    add("--seeds", type=int, nargs="+", default=range(5), help="default: 0 to 4")
    add("--jobs", type=int, default=1, help="runs at once (default 1); more pay on a GPU")
    add("--backend", choices=("tensorflow", "jax"), help="default: KERAS_BACKEND, or tensorflow")
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    add("--output", help=f"default: {RESULTS}, or outputs/quick/calibrate")
    add("--tables", action="store_true", help="run nothing, only write the tables")
    add("--quick", action="store_true", help="a smoke test, with numbers that mean nothing")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {options.jobs}")
    # Before Keras is imported, here and in the processes that this one starts.
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    if options.jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    from lib import calibrate_study as study

    names = [name for name in study.PAIRS if (name in study.UNSEEN) == options.unseen]
    names = options.pairs or names
    if unknown := set(names) - study.PAIRS.keys():
        parser.error(f"--pairs must be some of {', '.join(study.PAIRS)}; got {unknown.pop()}")
    output, failed = options.output, 0
    output = output or ("outputs/quick/calibrate" if options.quick else RESULTS)
    if not options.tables:
        more = {key: getattr(options, key) for key in ("quick", "jobs", "data_dir")}
        failed = study.run_all(names, options.seeds, output, **more)
    study.write_tables(output, *(PAGES if output == RESULTS else ()))
    print(f"Written to {output}; {failed} runs failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

r"""Try hostile and broken input on all that the library reads, and print what came of it.

Damaged `.keras` files, checkpoints, exported folders, configs, posterior files and dataset files;
wrong arrays for models in memory; hostile requests among good ones for scripts/serve.py; full
disks and kill -9 while files are written. Every case runs in a child process, and is the same in
every run with a seed. The campaigns themselves are in tests/robustness.

The campaign "legal" is about input that is not hostile: random legal Keras models and uses of them,
each compared with an independent answer (lib/legal_models). A model is a function of its
seed; what fails is printed as a few lines of Python, to be run in the folder `scripts`.

It exits with 1 if there was a crash, a silent wrong answer, or a write outside the output folder.

Examples:
    python scripts/robustness.py
    python scripts/robustness.py --only "keras files" --seed 7
    python scripts/robustness.py --scale 0.05 --jobs 1
    python scripts/robustness.py --only legal --models 5000 --workers 14 --output legal.json
    python scripts/robustness.py --only legal --first 1234 --models 1
"""

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from tests.robustness import harness

LEGAL = "legal"
LEGAL_MODELS = 200  # at scale 1
MILLION = 1_000_000  # legal models that a `--seed` has


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    add("--scale", type=scale, default=1.0, help="size of the campaigns (default 1)")
    add("--jobs", type=jobs, default=2, help="campaigns at once (default 2)")
    add(
        "--only",
        action="append",
        choices=[*harness.CAMPAIGNS, LEGAL],
        help="run this campaign; may be given several times",
    )
    add("--models", type=int, help=f"legal models (default {LEGAL_MODELS} times the scale)")
    add("--first", type=int, default=0, help="of the legal models: where to begin (default 0)")
    add("--workers", type=jobs, help="processes for legal models (default: as many as jobs)")
    add("--output", type=Path, help="file for a summary of the legal models, in JSON")
    return parser.parse_args(argv)


def scale(text):
    value = float(text)
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not above 0, and at most 1000")
    return value


def jobs(text):
    value = int(text)
    if not 1 <= value <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not 1 to 64")
    return value


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

from lib.legal_models import run as legal_models


def main(argv=None):
    options = parse(argv)
    names = options.only or [*harness.CAMPAIGNS, LEGAL]
    failed = LEGAL in names and run_legal(options)
    hostile = [name for name in names if name != LEGAL]
    return 1 if (hostile and run_hostile(hostile, options)) or failed else 0


def run_legal(options):
    """Run the fuzzer of legal models; return whether anything failed."""
    models = options.models or max(1, round(LEGAL_MODELS * options.scale))
    workers = options.workers or options.jobs
    result = legal_models.campaign(MILLION * options.seed + options.first, models, workers)
    print("\n".join(legal_models.table(result)))
    print(f"{models:,} models, {len(result['faults'])} faults, {result['seconds']} s.", flush=True)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1))
    return bool(result["faults"])


def run_hostile(names, options):
    """Run the campaigns of hostile input; return whether anything failed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="robustness-") as folder:
        tallies = run(names, options, Path(folder))
    print()
    print("\n".join(harness.table(tallies)))
    print()
    for tally in tallies:
        for name, number in tally.extra.items():
            print(f"{tally.name}, {name}: {number:,}")
    print(
        f"Seed {options.seed}, scale {options.scale:g}, {options.jobs} processes, "
        f"{time.monotonic() - begin:.0f} s."
    )
    faults = [fault for tally in tallies for fault in tally.faults]
    for fault in faults:
        print(f"FAULT {fault}")
    return bool(faults)


def run(names, options, folder):
    """Return the tallies of campaigns, some of which run at once."""
    count = min(options.jobs, len(names))
    workers = [harness.Worker(folder / str(number)) for number in range(count)]
    free = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def say(line):
        print(line, flush=True)

    def work(name):
        worker = free.get()
        try:
            say(f"{name}: begins")
            tally = harness.run(worker, name, options.seed, options.scale, say)
        finally:
            free.put(worker)
        say(f"{name}: {tally.tried:,} inputs, {len(tally.faults)} faults, {tally.seconds:.0f} s")
        return tally

    try:
        with ThreadPoolExecutor(count) as pool:
            # The longest first, so that they do not come last.
            first = sorted(names, key=lambda name: name != "interrupted writing")
            found = dict(zip(first, pool.map(work, first), strict=True))
    finally:
        for worker in workers:
            worker.close()
    return [found[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())

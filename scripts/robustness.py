r"""Try hostile and broken input on all that the library reads, and print what came of it.

Damaged `.keras` files, checkpoints, exported folders, configs, posterior files and dataset files;
wrong arrays for models in memory; hostile requests among good ones for scripts/serve.py; full
disks and kill -9 while files are written. Every case runs in a child process, and is the same in
every run with a seed. The campaigns themselves are in tests/robustness.

It exits with 1 if there was a crash, a silent wrong answer, or a write outside the output folder.

Examples:
    python scripts/robustness.py
    python scripts/robustness.py --only "keras files" --seed 7
    python scripts/robustness.py --scale 0.05 --jobs 1
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.robustness import harness  # noqa: E402


def main(argv=None):
    options = parse(argv)
    names = options.only or list(harness.CAMPAIGNS)
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
    return 1 if faults else 0


def parse(argv):
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
        choices=list(harness.CAMPAIGNS),
        help="run this campaign; may be given several times",
    )
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

"""Tasks of a study: each runs in a process of its own, and its record is a line of `runs.jsonl`."""

import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from lib import files


def read(folder, name="runs.jsonl"):
    """Return the records of a folder; none if there is no such file."""
    path = Path(folder) / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    return [json.loads(line) for line in lines]


def append(folder, record, name="runs.jsonl"):
    """Add a record to a folder; NaN and infinity, which JSON lacks, are an error."""
    with (Path(folder) / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def task_of(record):
    """Return the task whose record this is: data, a seed and, if there are groups, its group."""
    return tuple(record[name] for name in ("pair", "seed", "group") if name in record)


def run_tasks(function, every, options, folder, jobs, shown, settings=None):
    """Run what is not stored, each task in a process, and store it; return how many failed.

    With `settings`, a record counts only if its "options" are these.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = [x for x in read(folder) if settings is None or x.get("options") == settings]
    done = set(map(task_of, stored))
    left = [task for task in every if task not in done]
    print(f"{len(left)} runs to do, {len(every) - len(left)} are there", flush=True)
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(apart, function, *task, *options): task for task in left}
        for future in as_completed(futures):
            pair, seed, *more = futures[future]
            name = ", ".join([pair, f"seed {seed}", *more])
            try:
                record = future.result()
            except Exception as error:  # of one run, which costs the others nothing
                failed += 1
                print(f"error: {name}: {type(error).__name__}: {error}", flush=True)
                continue
            append(folder, record)
            print(f"{name}: {shown(record)}", flush=True)
    return failed


def apart(function, *task):
    """Call a function in a process of its own: a crash costs one run, and memory is given back."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *task).result()


def write_tables(folder, name, tables, report=None):
    """Write tables, by title, to `table.md` of a folder, and fill those of a report from them."""
    sections = [f"## {title}\n\n{table}\n" for title, table in tables.items()]
    files.write_text(Path(folder) / "table.md", "\n".join(sections))
    if report is not None:
        files.fill_tables(report, name, tables)

"""A run of `scripts/score.py`: what is to do, how far it is, and what came of it."""

import threading
import time
from typing import Any, NamedTuple

from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from bulk import local, pipeline, runtimes, shards
from bulk.inputs import check_columns
from bulk.outputs import Folder
from bulk.pipeline import Plan

SECONDS = 5.0
"""Between two lines of progress."""


class Counts(NamedTuple):
    """Rows, by what became of them."""

    rows: int
    bad: int


class Job:
    """Scores tables, and goes on where an earlier run stopped."""

    def __init__(
        self,
        model: str,
        tables: list[str],
        output: str,
        *,
        columns: list[str] | None,
        keep: list[str] | None,
        to: str,
        batch: int,
        shard: int,
        beam_options: list[str],
        workers: int | None,
    ) -> None:
        """Look at the model, the tables and the folder.

        Args:
            model: path of an exported file.
            tables: paths or patterns of Parquet and CSV files.
            output: path of a folder, which is new or of an interrupted run.
            columns: those of the model's only input; None: one that is named as the input.
            keep: columns to write beside the scores; None: all that are no input.
            to: "parquet" or "csv".
            batch: how many rows the model takes at once.
            shard: how many rows are read and written at once.
            beam_options: Beam's.
            workers: processes on this machine; None: Beam's options name another runner.

        Raises:
            ValueError: If something does not fit; nothing is written then.
        """
        FileSystems.set_options(PipelineOptions(beam_options))
        opened = runtimes.open_model(model)
        paths = shards.find(tables)
        known = shards.columns(paths[0])
        wanted = check_columns(opened.facts["inputs"], known, columns, paths[0])
        taken = {column for names in wanted.values() for column in names}
        if keep is None:
            keep = [name for name in known if name not in taken]
        for path in paths:
            _check_file(path, taken, keep, opened.outputs)
        self.beam_options = beam_options
        self.workers = workers
        self.shards = shards.cut(paths, shard)
        folder = Folder(output, f".{to}")
        self.plan = Plan(model, opened.facts["inputs"], wanted, keep, batch, folder)
        settings = {
            "model": opened.digest,
            "columns": wanted,
            "keep": keep,
            "to": to,
            "shard": shard,
            "tables": {path: _state_of(path) for path in paths},
        }
        _begin(folder, settings)

    def run(self) -> Counts:
        """Score what is not done, and return the counts of all rows.

        Raises:
            RuntimeError: If the pipeline fails. What is done stays.
        """
        folder = self.plan.folder
        done = folder.done()
        if done:
            print(f"{len(done)} of {len(self.shards)} parts were done before.", flush=True)
        with _Progress(folder, self.shards, done):
            if self.workers is None:
                pipeline.run(self.plan, self._remaining(), self.beam_options)
            else:
                local.run(self.plan, self._remaining, self._local_options(), print)
        folder.tidy()
        counts = list(folder.counts({shard.number for shard in self.shards}))
        total = Counts(sum(x["rows"] for x in counts), sum(x["bad"] for x in counts))
        expected = sum(shard.rows for shard in self.shards)
        if sum(total) != expected:
            raise RuntimeError(f"{sum(total):,} rows were written, of {expected:,}.")
        return total

    def _remaining(self) -> list[shards.Shard]:
        done = self.plan.folder.done()
        return [shard for shard in self.shards if shard.number not in done]

    def _local_options(self) -> list[str]:
        mode = "multi_processing" if self.workers > 1 else "in_memory"
        return [
            *self.beam_options,
            "--runner=FnApiRunner",
            f"--direct_num_workers={self.workers}",
            f"--direct_running_mode={mode}",
        ]


class _Progress:
    """Prints how many rows are done, while others do them."""

    def __init__(self, folder: Folder, everything: list[shards.Shard], before: set[int]) -> None:
        self.folder, self.before = folder, before
        self.rows = {shard.number: shard.rows for shard in everything}
        self.begin = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()
        self._tell()

    def _watch(self) -> None:
        while not self.ended.wait(SECONDS):
            self._tell()

    def _tell(self) -> None:
        done = self.folder.done()
        rows = sum(self.rows[number] for number in done)
        new = sum(self.rows[number] for number in done - self.before)
        speed = new / (time.monotonic() - self.begin)
        print(f"{rows:,} of {sum(self.rows.values()):,} rows, {speed:,.0f} a second", flush=True)


def _check_file(path: str, taken: set[str], keep: list[str], outputs: list[str]) -> None:
    """Raise unless a file has the columns, and none that the output has already."""
    known = shards.columns(path)
    missing = [name for name in (*taken, *keep) if name not in known]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(known)}.")
    clashes = [name for name in keep if name in ("file", "row", *outputs)]
    if clashes:
        raise ValueError(
            f"The column {clashes[0]} would be there twice, as one of {path} and as one of the "
            "scores: name the columns to keep by --keep, without it."
        )


def _state_of(path: str) -> list[float]:
    """Return the size of a file and the time of its last change."""
    (found,) = FileSystems.match([path])[0].metadata_list
    return [found.size_in_bytes, found.last_updated_in_seconds]


def _begin(folder: Folder, settings: dict[str, Any]) -> None:
    """Write the settings, or raise if the folder is of another run."""
    earlier = folder.settings()
    if earlier is None:
        if not folder.is_empty():
            raise ValueError(f"{folder.path} is not empty: name another folder by --output.")
        folder.begin(settings)
        return
    different = [name for name, value in settings.items() if earlier.get(name) != value]
    if different:
        raise ValueError(
            f"{folder.path} holds scores of another run, which differs in {', '.join(different)}: "
            "name another folder by --output."
        )

"""Writes what came of a shard: its scores, its bad rows, and at last that it is done."""

import csv
import io
import json
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems

SETTINGS = "_score.json"


class Folder:
    """Where scores are written; tools that read the folder as one table pass by names with "_"."""

    def __init__(self, path: str, suffix: str) -> None:
        """Take a folder.

        Args:
            path: of the folder, on any file system that Beam knows.
            suffix: ".parquet" or ".csv".
        """
        self.path = path
        self.suffix = suffix

    def settings(self) -> dict[str, Any] | None:
        """Return the settings of an earlier run, if there was one."""
        path = self._place(SETTINGS)
        return json.loads(self._read(path)) if FileSystems.exists(path) else None

    def begin(self, settings: dict[str, Any]) -> None:
        """Write the settings."""
        self._write(json.dumps(settings, indent=2).encode(), SETTINGS)

    def is_empty(self) -> bool:
        """Whether nothing is there."""
        return not _paths(self._place("*"))

    def done(self) -> set[int]:
        """Return the numbers of the shards that are done."""
        paths = _paths(self._place("_done", "*.json"))
        return {int(path.rsplit("/", 1)[-1].removesuffix(".json")) for path in paths}

    def counts(self, numbers: set[int]) -> Iterator[dict[str, Any]]:
        """Yield what was counted in shards: dicts with "rows" and "bad"."""
        for number in sorted(numbers):
            yield json.loads(self._read(self._place("_done", f"{number:06}.json")))

    def tidy(self) -> None:
        """Remove what killed processes have left."""
        left = self._place("_unfinished")
        if FileSystems.exists(left):
            FileSystems.delete([left])

    def write(self, number: int, scored: pa.Table, bad: pa.Table) -> None:
        """Write the rows of a shard, completely or not at all.

        Args:
            number: of the shard.
            scored: rows with scores.
            bad: rows without, with the reasons.
        """
        name = f"part-{number:06}{self.suffix}"
        if bad.num_rows:
            self._write(self._encoded(bad), "_bad", name)
        if scored.num_rows:
            self._write(self._encoded(scored), name)
        counts = {"rows": scored.num_rows, "bad": bad.num_rows}
        self._write(json.dumps(counts).encode(), "_done", f"{number:06}.json")

    def _encoded(self, table: pa.Table) -> bytes:
        if self.suffix == ".csv":
            return _csv(table)
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        return buffer.getvalue()

    def _place(self, *names: str) -> str:
        return FileSystems.join(self.path, *names)

    def _read(self, path: str) -> bytes:
        with FileSystems.open(path) as file:
            return file.read()

    def _write(self, content: bytes, *names: str) -> None:
        """Write a file, which has its name when it is complete."""
        unfinished = self._place("_unfinished", uuid.uuid4().hex)
        with FileSystems.create(unfinished) as file:
            file.write(content)
        path = self._place(*names)
        if len(names) > 1 and not FileSystems.exists(self._place(names[0])):
            self._make(names[0])
        FileSystems.rename([unfinished], [path])

    def _make(self, name: str) -> None:
        """Make a folder, unless another process was quicker."""
        try:
            FileSystems.mkdirs(self._place(name))
        except OSError:
            if not FileSystems.exists(self._place(name)):
                raise


def table_of(kept: pa.Table, outputs: dict[str, np.ndarray]) -> pa.Table:
    """Return rows with the outputs of a model as further columns.

    Args:
        kept: the columns that are kept, N rows.
        outputs: arrays (N, ...) by name; what has more axes becomes lists.
    """
    table = kept
    for name, values in outputs.items():
        column = pa.array(np.ravel(values))
        for size in reversed(values.shape[1:]):
            column = pa.FixedSizeListArray.from_arrays(column, size)
        table = table.append_column(name, column)
    return table


def _csv(table: pa.Table) -> bytes:
    """Return a table as CSV; lists have a column for each entry, such as `mean_0`."""
    columns = {}
    for name in table.column_names:
        values = table[name].combine_chunks()
        sizes = []
        while pa.types.is_fixed_size_list(values.type):
            sizes.append(values.type.list_size)
            values = values.flatten()
        cells = values.to_pylist()
        if not sizes:
            columns[name] = cells
            continue
        width = int(np.prod(sizes))
        for place, index in enumerate(np.ndindex(*sizes)):
            columns["_".join([name, *map(str, index)])] = cells[place::width]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()


def _paths(pattern: str) -> list[str]:
    return [entry.path for entry in FileSystems.match([pattern])[0].metadata_list]

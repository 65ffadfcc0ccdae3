"""Cuts Parquet and CSV files into shards, each of which is read, scored and written by itself."""

import csv
import io
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems

KINDS = (".parquet", ".csv")


class Shard(NamedTuple):
    """Some consecutive rows of a file."""

    number: int
    """The place among all shards."""
    path: str
    first: int
    """The first row, counted from 0 within the file, without a header."""
    rows: int
    start: int = 0
    """For CSV, the byte where the rows begin."""
    end: int = 0
    header: tuple[str, ...] = ()


class Rows(NamedTuple):
    """The rows of a shard."""

    table: pa.Table
    broken: dict[int, str]
    """Reasons why rows cannot be read, by their places in the shard."""


def find(patterns: list[str]) -> list[str]:
    """Return the paths of all files that match patterns, each once and in order.

    Raises:
        ValueError: If a pattern matches nothing, or a file is of an unknown kind.
    """
    paths: dict[str, None] = {}
    for pattern in patterns:
        found = sorted(x.path for x in FileSystems.match([pattern])[0].metadata_list)
        if not found:
            raise ValueError(f"No file matches {pattern}.")
        paths |= dict.fromkeys(found)
    unknown = [path for path in paths if not path.endswith(KINDS)]
    if unknown:
        raise ValueError(f"{unknown[0]} ends neither in .parquet nor in .csv.")
    return list(paths)


def cut(paths: list[str], size: int) -> list[Shard]:
    """Return the shards of files.

    Args:
        paths: of Parquet and CSV files.
        size: the largest number of rows in a shard.
    """
    shards: list[Shard] = []
    for path in paths:
        of_file = _cut_parquet if path.endswith(".parquet") else _cut_csv
        for shard in of_file(path, size):
            shards.append(shard._replace(number=len(shards)))
    return shards


def read(shard: Shard) -> Rows:
    """Return the rows of a shard. Those of a CSV file are of strings."""
    with FileSystems.open(shard.path) as file:
        if shard.path.endswith(".parquet"):
            return Rows(_parquet_rows(pq.ParquetFile(file), shard), {})
        file.seek(shard.start)
        content = file.read(shard.end - shard.start)
    return _csv_rows(content, shard.header)


def columns(path: str) -> list[str]:
    """Return the names of a file's columns."""
    with FileSystems.open(path) as file:
        if path.endswith(".parquet"):
            return pq.ParquetFile(file).schema_arrow.names
        return list(_header(file)[0])


def _cut_parquet(path: str, size: int) -> Iterator[Shard]:
    with FileSystems.open(path) as file:
        count = pq.ParquetFile(file).metadata.num_rows
    for first in range(0, count, size):
        yield Shard(0, path, first, min(size, count - first))


def _parquet_rows(file: pq.ParquetFile, shard: Shard) -> pa.Table:
    """Return rows from the row groups that contain them."""
    begin = 0
    parts = []
    for group in range(file.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        first, last = max(begin, shard.first), min(end, shard.first + shard.rows)
        if first < last:
            parts.append(file.read_row_group(group).slice(first - begin, last - first))
        begin = end
    return pa.concat_tables(parts)


def _cut_csv(path: str, size: int) -> Iterator[Shard]:
    with FileSystems.open(path) as file:
        header, start = _header(file)
        first, rows, end = 0, 0, start
        for record in _records(file):
            rows += 1
            end += len(record)
            if rows == size:
                yield Shard(0, path, first, rows, start, end, header)
                first, rows, start = first + rows, 0, end
        if rows:
            yield Shard(0, path, first, rows, start, end, header)


def _header(file: io.IOBase) -> tuple[tuple[str, ...], int]:
    """Return the names of the columns, and the byte where the rows begin."""
    line = file.readline()
    names = next(csv.reader([line.decode("utf-8-sig")]), [])
    if not names or len(set(names)) < len(names):
        raise ValueError("The first line of a CSV file must name each column once.")
    return tuple(names), len(line)


def _records(file: io.IOBase) -> Iterator[bytes]:
    """Yield the bytes of each record, which is of several lines where a quoted text is.

    Empty lines belong to the record that follows them.
    """
    lines: list[bytes] = []
    quotes = 0
    for line in iter(file.readline, b""):
        lines.append(line)
        quotes += line.count(b'"')
        if line.strip() and quotes % 2 == 0:
            yield b"".join(lines)
            lines, quotes = [], 0
    if any(line.strip() for line in lines):  # a quotation that does not end
        yield b"".join(lines)


def _csv_rows(content: bytes, header: tuple[str, ...]) -> Rows:
    broken: dict[int, str] = {}
    records: list[list[str]] = []
    for record in _records(io.BytesIO(content)):
        text = record.decode(errors="replace")
        try:
            found = [fields for fields in csv.reader(io.StringIO(text, newline="")) if fields]
        except csv.Error as error:  # such as a field that is too long
            found = [[text.strip()]]
            broken[len(records)] = f"it cannot be read: {error}"
        fields = found[0]
        if len(found) > 1:
            broken[len(records)] = "its quotation marks do not match"
            fields = [text.strip()]
        elif len(fields) != len(header):
            reason = f"it has {len(fields)} fields, not {len(header)}"
            broken.setdefault(len(records), reason)
        padding = [""] * (len(header) - len(fields))
        records.append([*fields[: len(header)], *padding])
    values = zip(*records, strict=True) if records else [[] for _ in header]
    arrays = [pa.array(column, pa.string()) for column in values]
    return Rows(pa.Table.from_arrays(arrays, names=list(header)), broken)

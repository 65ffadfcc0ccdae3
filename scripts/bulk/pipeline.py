"""The pipeline: each shard is read, scored by `RunInference`, and written."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.internal.cloudpickle import cloudpickle
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

import bulk
from bulk import inputs, outputs, runtimes, shards

# Workers need not have this code: it goes to them with the pipeline.
for module in (bulk, inputs, outputs, runtimes, shards, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


class Plan(NamedTuple):
    """What to do with each shard."""

    model: str
    specs: dict[str, Any]
    """The model's inputs."""
    wanted: dict[str, list[str]]
    """The columns of each input."""
    keep: list[str]
    """Columns that are written beside the scores."""
    batch: int
    folder: outputs.Folder


class Work(NamedTuple):
    """A shard, read and perhaps scored.

    It goes from step to step as a plain tuple, since workers may lack this class.
    """

    shard: tuple[Any, ...]
    table: pa.Table
    groups: list[tuple[np.ndarray, dict[str, np.ndarray]]]
    """See `inputs.Inputs`."""
    bad: dict[int, str]
    outputs: dict[str, np.ndarray]
    """Arrays for the good rows, in their order."""


def run(plan: Plan, todo: list[shards.Shard], options: list[str]) -> None:
    """Score shards.

    Args:
        plan: what to do.
        todo: the shards.
        options: Beam's own, such as "--runner=FlinkRunner".
    """
    with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
        _ = (
            pipeline
            | "Shards" >> beam.Create([tuple(shard) for shard in todo])
            | "Share out" >> beam.Reshuffle()
            | "Read" >> beam.Map(_read, plan)
            | "Score" >> RunInference(Handler(plan))
            | "Write" >> beam.Map(_write, plan)
        )


class Handler(ModelHandler):
    """Opens the model once in each process, and scores shards."""

    def __init__(self, plan: Plan) -> None:
        """Take a plan."""
        super().__init__()
        self.plan = plan

    def load_model(self) -> runtimes.Model:
        """Open the file."""
        return runtimes.open_model(self.plan.model)

    def run_inference(
        self, batch: Sequence[tuple], model: runtimes.Model, inference_args: Any = None
    ) -> Iterator[tuple]:
        """Yield shards with scores."""
        for work in batch:
            yield tuple(_scored(Work(*work), model, self.plan.batch))

    def batch_elements_kwargs(self) -> dict[str, int]:
        """Take one shard at a time: it has the batches inside."""
        return {"min_batch_size": 1, "max_batch_size": 1}


def _read(shard: tuple[Any, ...], plan: Plan) -> tuple:
    rows = shards.read(shards.Shard(*shard))
    groups, bad = inputs.prepare(rows.table, rows.broken, plan.specs, plan.wanted)
    return shard, rows.table, groups, bad, {}


def _scored(work: Work, model: runtimes.Model, batch: int) -> Work:
    """Return a shard with its scores; rows that the model does not take become bad ones."""
    bad = dict(work.bad)
    places, parts = [], []
    for rows, arrays in work.groups:
        for start in range(0, len(rows), batch):
            some = slice(start, start + batch)
            examples = {name: values[some] for name, values in arrays.items()}
            for taken, scores in _batch(rows[some], examples, model, bad):
                places.append(taken)
                parts.append(scores)
    found = {}
    if places:
        order = np.argsort(np.concatenate(places))
        for name in model.outputs:
            found[name] = np.concatenate([part[name] for part in parts])[order]
    return work._replace(groups=[], bad=bad, outputs=found)


def _batch(
    rows: np.ndarray, arrays: dict[str, np.ndarray], model: runtimes.Model, bad: dict[int, str]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield scores, with the places of their rows; one by one where the batch fails."""
    try:
        scores = model.run(arrays)
    except Exception as error:
        if len(rows) == 1:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            bad[int(rows[0])] = f"the model fails: {lines[0]}"
            return
        for place in range(len(rows)):
            one = slice(place, place + 1)
            alone = {name: values[one] for name, values in arrays.items()}
            yield from _batch(rows[one], alone, model, bad)
        return
    finite = np.ones(len(rows), bool)
    for values in scores.values():
        if values.dtype.kind == "f":
            finite &= ~np.isnan(values.reshape(len(rows), -1)).any(axis=1)
    for row in rows[~finite]:
        bad[int(row)] = "the model's answer is not a number"
    yield rows[finite], {name: values[finite] for name, values in scores.items()}


def _write(work: tuple, plan: Plan) -> None:
    """Write a shard."""
    shard, table, _, bad, scores = work
    shard = shards.Shard(*shard)
    numbered = _with_places(table, shard)
    good = [row for row in range(table.num_rows) if row not in bad]
    wrong = sorted(bad)
    kept = numbered.select(["file", "row", *plan.keep]).take(pa.array(good, pa.int64()))
    refused = numbered.take(pa.array(wrong, pa.int64()))
    reasons = pa.array([bad[row] for row in wrong], pa.string())
    plan.folder.write(
        shard.number, outputs.table_of(kept, scores), refused.append_column("reason", reasons)
    )


def _with_places(table: pa.Table, shard: shards.Shard) -> pa.Table:
    """Return rows with the columns "file" and "row"."""
    numbers = pa.array(range(shard.first, shard.first + table.num_rows), pa.int64())
    files = pa.array([shard.path] * table.num_rows, pa.string())
    others = [name for name in table.column_names if name not in ("file", "row")]
    table = table.select(others)
    return table.add_column(0, "row", numbers).add_column(0, "file", files)

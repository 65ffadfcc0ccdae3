r"""Score tables of any size with an exported file, on an Apache Beam runner.

The model is an .onnx or .tflite file, or the folder of a SavedModel, written by `python -m tfp_ibnn
export`. The tables are Parquet or CSV files. All outputs of the model become columns: mean,
entropy, epistemic and so on, in Parquet as lists where they have several entries. Rows that cannot
be scored go to OUTPUT/_bad with the reason. What is interrupted goes on where it stopped when the
command is given again.

It needs `make beam`, an environment of its own, and runs on this machine unless `--runner` names
another one, such as FlinkRunner, SparkRunner or DataflowRunner; options that are not listed below
then go to Beam.

Examples:
    .venv-beam/bin/python scripts/score.py model.onnx input.parquet --output scored
    .venv-beam/bin/python scripts/score.py model.onnx 'days/*.csv' --output scored --columns x1 x2
    .venv-beam/bin/python scripts/score.py gs://bucket/model.onnx 'gs://bucket/days/*.parquet' \
        --output gs://bucket/scored --runner DataflowRunner --project P --region R
"""

import argparse
import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(argv=None):
    options, beam_options = parse(argv)
    try:
        import bulk.job  # noqa: F401
    except ImportError as error:
        print(f"error: {error}. `make beam` makes the environment .venv-beam.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return score(options, beam_options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
    print("What is done is kept: the same command goes on from there.", file=sys.stderr)
    return 1


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="an .onnx or .tflite file, or the folder of a SavedModel")
    add("tables", nargs="+", help=".parquet or .csv files, or patterns such as 'days/*.parquet'")
    add("--output", required=True, help="folder, new or of an interrupted run")
    add(
        "--columns",
        nargs="+",
        help="the columns of the model's input, in order (default: a column of the input's name)",
    )
    add("--keep", nargs="*", help="columns to write beside the scores (default: all others)")
    add("--to", choices=("parquet", "csv"), default="parquet", help="the format of the output")
    add("--batch", type=above_0, default=256, help="rows that the model takes at once")
    add("--shard", type=above_0, default=16_384, help="rows that are read and written at once")
    add("--runner", help="of Beam (default: processes on this machine)")
    add(
        "--workers",
        type=above_0,
        default=os.cpu_count(),
        help="processes on this machine (default: one for each core)",
    )
    options, others = parser.parse_known_args(argv)
    if others and options.runner is None:
        parser.error(f"unrecognized arguments: {' '.join(others)} (Beam's need --runner)")
    return options, others


def above_0(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or above")
    return value


def score(options, beam_options):
    from bulk.job import Job

    if options.runner is not None:
        beam_options = [f"--runner={options.runner}", *beam_options]
    job = Job(
        options.model,
        options.tables,
        options.output,
        columns=options.columns,
        keep=options.keep,
        to=options.to,
        batch=options.batch,
        shard=options.shard,
        beam_options=beam_options,
        workers=options.workers if options.runner is None else None,
    )
    counts = job.run()
    rows = "row" if counts.rows == 1 else "rows"
    print(f"{counts.rows:,} {rows} scored, {counts.bad:,} bad, in {options.output}")
    if counts.bad:
        print(f"The bad rows are in {os.path.join(options.output, '_bad')}, with the reasons.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

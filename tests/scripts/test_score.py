"""Scoring of tables on Apache Beam; skipped without its environment, which `make beam` makes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import averaged, set_weights
from tfp_ibnn.export.reading import open_exported

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-beam" / "bin" / "python"
COLUMNS = ["a", "b", "c", "d"]
TABLE = pd.DataFrame(np.random.default_rng(0).normal(size=(3000, 4)), columns=COLUMNS)
TABLE.insert(0, "id", [f"row {number}" for number in range(len(TABLE))])

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make beam` makes the environment of Beam"),
]


def command(model, tables, output, *options):
    tables = [tables] if isinstance(tables, (str, Path)) else tables
    words = [PYTHON, ROOT / "scripts" / "score.py", model, *tables, "--output", output, *options]
    return [str(word) for word in words]


def score(model, tables, output, *options, workers=1):
    words = command(model, tables, output, *options, "--workers", str(workers))
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def scored(folder, suffix="parquet"):
    """Return the rows of all parts in order."""
    reader = {"parquet": pd.read_parquet, "csv": pd.read_csv}[suffix]
    parts = [reader(path) for path in sorted(Path(folder).glob(f"part-*.{suffix}"))]
    return pd.concat(parts, ignore_index=True)


def matrix(column):
    return np.stack([np.asarray(cell.tolist(), float) for cell in column])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("score")


def network(seed):
    inputs = keras.Input((4,), name="x")
    outputs = layers.Dense(3, "softmax")(layers.Dense(8, "relu")(inputs))
    det = set_weights(keras.Model(inputs, outputs, name="network"), seed)
    return averaged(ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=10), 8, seed=0)


@pytest.fixture(scope="module")
def mc():
    return network(0)


@pytest.fixture(scope="module")
def onnx(mc, folder):
    return ibnn.export(mc, folder / "model.onnx", format="onnx", draws=8)


@pytest.fixture(scope="module")
def parquet(folder):
    path = folder / "rows.parquet"
    TABLE.to_parquet(path, row_group_size=700)
    return path


@pytest.fixture(scope="module")
def expected(mc):
    return mc.predict(TABLE[COLUMNS].to_numpy("float32"), verbose=0)


@pytest.mark.parametrize("format", ["onnx", "litert", "saved_model"])
def test_scores_are_predictions(format, mc, folder, parquet, expected, tmp_path):
    name = {"onnx": "m.onnx", "litert": "m.tflite", "saved_model": "m"}[format]
    model = ibnn.export(mc, tmp_path / name, format=format, draws=8)
    options = ["--columns", *COLUMNS, "--shard", "1000", "--keep", "id"]
    done = score(model, parquet, tmp_path / "scored", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"3,000 rows scored, 0 bad, in {tmp_path / 'scored'}"
    rows = scored(tmp_path / "scored")
    assert list(rows["row"]) == list(range(3000))
    assert list(rows["id"]) == list(TABLE["id"])
    assert set(rows.columns) == {"file", "row", "id", *expected}
    for key, values in expected.items():
        found = matrix(rows[key]) if values.ndim > 1 else rows[key]
        np.testing.assert_allclose(found, values, atol=1e-5)


def test_csv_files_in_and_out(onnx, expected, tmp_path):
    for part, name in ((TABLE[:1100], "1.csv"), (TABLE[1100:], "2.csv")):
        part.assign(note='two\nlines, and "words"').to_csv(tmp_path / name, index=False)
    done = score(
        onnx, tmp_path / "*.csv", tmp_path / "scored", "--columns", *COLUMNS, "--to", "csv",
        "--shard", "400", workers=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = scored(tmp_path / "scored", "csv")
    assert list(rows["id"]) == list(TABLE["id"])
    assert list(rows["row"]) == [*range(1100), *range(1900)]
    assert set(rows["note"]) == {'two\nlines, and "words"'}
    means = rows[["mean_0", "mean_1", "mean_2"]]
    np.testing.assert_allclose(means, expected["mean"], atol=1e-5)
    np.testing.assert_allclose(rows["epistemic"], expected["epistemic"], atol=1e-5)


def test_several_inputs_of_lists_with_open_sizes(tmp_path):
    steps = keras.Input((None, 2), name="steps")
    age = keras.Input((1,), name="age")
    pooled = layers.GlobalAveragePooling1D()(layers.Conv1D(3, 2, padding="same")(steps))
    det = keras.Model([steps, age], layers.Dense(2)(layers.Concatenate()([pooled, age])))
    set_weights(det)
    sto = ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=10)
    mc = averaged(sto, 4, seed=0, head="point")
    model = ibnn.export(mc, tmp_path / "model.onnx", format="onnx", draws=4)
    random = np.random.default_rng(0)
    sequences = [random.normal(size=(3 + number % 3, 2)) for number in range(20)]
    ages = random.normal(size=20)
    pd.DataFrame({"steps": [x.tolist() for x in sequences], "age": ages}).to_parquet(
        tmp_path / "rows.parquet"
    )
    done = score(model, tmp_path / "rows.parquet", tmp_path / "scored")
    assert done.returncode == 0, done.stderr
    rows = scored(tmp_path / "scored")
    for place in (0, 1, 2, 19):
        one = [sequences[place][None].astype("float32"), ages[place : place + 1, None]]
        answer = mc.predict(one, verbose=0)
        np.testing.assert_allclose(rows["mean"][place], answer["mean"][0], atol=1e-5)


BAD = {
    3: ("a", "", "a is missing"),
    7: ("b", "seven", "b is not a number: 'seven'"),
    450: ("c", "inf", "c is not finite"),
    999: ("d", "1e300", "d does not fit float32: 1e300"),
}


def test_bad_rows_are_put_aside_with_the_reason(onnx, expected, tmp_path):
    table = TABLE[:1000].astype({name: str for name in COLUMNS})
    for row, (column, value, _) in BAD.items():
        table.loc[row, column] = value
    lines = table.to_csv(index=False).splitlines()
    lines[501] = "row 500,1,2"
    (tmp_path / "rows.csv").write_text("\n".join([*lines, "", ""]))
    done = score(
        onnx, tmp_path / "rows.csv", tmp_path / "scored", "--columns", *COLUMNS, "--shard", "300"
    )
    assert done.returncode == 0, done.stderr
    assert "995 rows scored, 5 bad" in done.stdout
    bad = scored(tmp_path / "scored" / "_bad")
    reasons = dict(zip(bad["row"], bad["reason"], strict=True))
    assert reasons == {row: reason for row, (*_, reason) in BAD.items()} | {
        500: "it has 3 fields, not 5"
    }
    assert list(bad["id"]) == [f"row {row}" for row in sorted(reasons)]
    good = scored(tmp_path / "scored")
    assert list(good["row"]) == [row for row in range(1000) if row not in reasons]
    np.testing.assert_allclose(matrix(good["mean"]), expected["mean"][good["row"]], atol=1e-5)


def test_rows_that_the_model_refuses_are_put_aside(tmp_path):
    inputs = keras.Input((), dtype="int32", name="word")
    det = set_weights(keras.Model(inputs, layers.Dense(2)(layers.Embedding(5, 3)(inputs))))
    mc = averaged(ibnn.to_stochastic(det, ibnn.NormalAffine(), train_size=10), 4, head="point")
    model = ibnn.export(mc, tmp_path / "model.onnx", format="onnx", draws=4)
    pd.DataFrame({"word": [0, 1, 99, 2.5, 4]}).to_parquet(tmp_path / "rows.parquet")
    done = score(model, tmp_path / "rows.parquet", tmp_path / "scored")
    assert done.returncode == 0, done.stderr
    bad = scored(tmp_path / "scored" / "_bad")
    assert list(bad["row"]) == [2, 3]
    assert bad["reason"][0].startswith("the model fails: ")
    assert bad["reason"][1] == "word does not fit int32: 2.5"
    assert list(scored(tmp_path / "scored")["row"]) == [0, 1, 4]


def begun(words, output, parts):
    """Start a command, and wait until some parts are done."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 240
    while len(list(Path(output).glob("_done/*.json"))) < parts:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


def workers_of(process):
    """Return the Python processes of Beam's workers below a process."""
    found = subprocess.run(
        ["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in found.stdout.splitlines()]
    below, grown = {process.pid}, True
    while grown:
        children = {int(pid) for pid, parent, _ in rows if int(parent) in below}
        grown, below = not children <= below, below | children
    return [
        int(pid)
        for pid, _, args in rows
        if int(pid) in below and "sdk_worker_main" in args and not args.startswith("/bin/sh")
    ]


def wait_for_end(processes):
    """Wait until processes have ended; those that nobody has asked for their exit code have."""
    end = time.monotonic() + 60
    shown = ["ps", "-o", "state=", "-p", ",".join(map(str, processes))]
    while set(subprocess.run(shown, capture_output=True, text=True).stdout.split()) - {"Z"}:
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def long(folder):
    path = folder / "long.parquet"
    pd.concat([TABLE] * 60, ignore_index=True).to_parquet(path)
    return path


def test_no_row_is_lost_or_doubled_when_a_worker_is_killed(onnx, long, expected, tmp_path):
    options = ["--columns", *COLUMNS, "--shard", "500", "--workers", "2"]
    process = begun(command(onnx, long, tmp_path / "scored", *options), tmp_path / "scored", 5)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "A worker was lost: going on with the " in stdout
    rows = scored(tmp_path / "scored")
    assert list(rows["row"]) == list(range(180_000))
    np.testing.assert_allclose(matrix(rows["mean"][-3000:]), expected["mean"], atol=1e-5)
    assert not (tmp_path / "scored" / "_unfinished").exists()


def test_what_is_interrupted_goes_on(onnx, long, tmp_path):
    options = ["--columns", *COLUMNS, "--shard", "500", "--workers", "2"]
    process = begun(command(onnx, long, tmp_path / "scored", *options), tmp_path / "scored", 3)
    workers = workers_of(process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.splitlines() == [
        "Interrupted.",
        "What is done is kept: the same command goes on from there.",
    ]
    wait_for_end(workers)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "scored").glob("part-*")}
    done = score(onnx, long, tmp_path / "scored", *options[:-2], workers=2)
    assert done.returncode == 0, done.stderr
    assert "of 360 parts were done before." in done.stdout
    finished = {int(path.stem) for path in (tmp_path / "scored" / "_done").iterdir()}
    assert finished == set(range(360))
    assert len(before) >= 3
    kept = [path.stat().st_mtime_ns == written for path, written in before.items()]
    assert sum(kept) >= len(kept) - 2  # a part may have been written without the note of it
    assert list(scored(tmp_path / "scored")["row"]) == list(range(180_000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "rows.parquet has no column x; it has id, a, b, c, d. Name those of the model's"),
        (["--columns", "a", "b", "c", "z"], "has no column z"),
        (["--columns", *COLUMNS, "--keep", "date"], "rows.parquet has no column date"),
        (["--columns", *COLUMNS, "--colour", "red"], "unrecognized arguments: --colour red"),
        (["--columns", *COLUMNS, "--batch", "0"], "0 is not 1 or above"),
        (["--columns", *COLUMNS[:3]], "holds 4 numbers, and --columns names 3"),
    ],
)
def test_wrong_options_are_answered_and_nothing_is_written(
    options, message, onnx, parquet, tmp_path
):
    done = score(onnx, parquet, tmp_path / "scored", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "scored").exists()


def test_wrong_files_are_answered(onnx, parquet, folder, tmp_path):
    (tmp_path / "damaged.onnx").write_bytes(Path(onnx).read_bytes()[:500])
    (tmp_path / "rows.txt").write_text("a,b")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    options = ["--columns", *COLUMNS]
    for model, table, output, message in (
        (tmp_path / "damaged.onnx", parquet, "new", "damaged.onnx cannot be opened: "),
        (tmp_path / "none.onnx", parquet, "new", "No model found at "),
        (onnx, tmp_path / "none.parquet", "new", "No file matches "),
        (onnx, tmp_path / "rows.txt", "new", "ends neither in .parquet nor in .csv"),
        (onnx, parquet, "full", "is not empty: name another folder"),
    ):
        done = score(model, table, tmp_path / output, *options)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_a_folder_of_another_run_is_left_alone(onnx, parquet, tmp_path):
    options = ["--columns", *COLUMNS, "--keep"]
    assert score(onnx, parquet, tmp_path / "scored", *options).returncode == 0
    done = score(onnx, parquet, tmp_path / "scored", *options, "id")
    assert done.returncode == 2
    assert "holds scores of another run, which differs in keep" in done.stderr
    retrained = ibnn.export(network(1), tmp_path / "model.onnx", format="onnx", draws=8)
    assert open_exported(retrained).facts == open_exported(onnx).facts
    done = score(retrained, parquet, tmp_path / "scored", *options)
    assert (done.returncode, "which differs in model" in done.stderr) == (2, True)
    again = score(onnx, parquet, tmp_path / "scored", *options)
    assert again.returncode == 0
    assert "1 of 1 parts were done before." in again.stdout
    TABLE[::-1].to_parquet(parquet, row_group_size=700)
    done = score(onnx, parquet, tmp_path / "scored", *options)
    assert (done.returncode, "which differs in tables" in done.stderr) == (2, True)

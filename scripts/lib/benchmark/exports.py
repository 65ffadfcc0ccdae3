"""What exported files save: LeNet with 32 draws, in the runtimes of ONNX and LiteRT."""

import os
import tempfile
import time
from pathlib import Path

import keras

import tfp_ibnn as ibnn
from lib.benchmark import networks as nets
from lib.benchmark import timing
from lib.benchmark.record import row
from tfp_ibnn.export.reading import open_exported

DRAWS = 32
BATCHES = (1, 64)
RUNTIMES = {"onnx": ("ONNX", "onnx"), "litert": ("LiteRT", "tflite")}
LONG = 0.05  # seconds that an action takes at least, by as many calls as that needs


def export_rows(settings):
    """Time predictions of exported files, in a process of its own that has one core."""
    yield from nets.in_process(one_core, settings.rounds, settings.seed)


def one_core(rounds, seed):
    """Return the rows, all of them measured on one core: runtimes differ in how many they take."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    keras.utils.set_random_seed(seed)
    plain = nets.prepare(nets.plain())
    network = nets.stochastic("lenet", "gaussian")
    average = ibnn.MonteCarlo(network, DRAWS, from_logits=True, seed=seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, (_, suffix) in RUNTIMES.items():
            of_draws, of_one = (Path(folder) / f"{part}.{suffix}" for part in ("draws", "plain"))
            files[name] = ibnn.export(average, of_draws, format=name, draws=DRAWS)
            files[f"{name}.plain"] = ibnn.export(plain, of_one, format=name)
        exported = {name: open_exported(path) for name, path in files.items()}
        for batch in BATCHES:
            rows += rows_of_batch(average, exported, batch, rounds, seed)
    return rows


def rows_of_batch(average, exported, batch, rounds, seed):
    """Return the rows of a batch size: to `MonteCarlo.predict`, and to one plain network."""
    x, _ = nets.images(batch, seed)
    calls = {
        "predict": lambda: average.predict(x, batch_size=batch, verbose=0),
        **{name: lambda file=file: file.predict(x, batch) for name, file in exported.items()},
    }
    times = timing.interleave({name: repeated(call) for name, call in calls.items()}, rounds)
    rows = []
    for name, (title, _) in RUNTIMES.items():
        references = {
            "predict": "MonteCarlo.predict",
            f"{name}.plain": f"the plain network in {title}",
        }
        for other, words in references.items():
            rows.append(
                row(
                    f"export.{name}.{batch}.{other.rpartition('.')[2]}",
                    f"LeNet, {DRAWS} draws in {title}, batch of {batch}, to {words}",
                    timing.ratio(times[name], times[other]),
                    seconds={"exported": min(times[name]), other: min(times[other])},
                )
            )
    return rows


def repeated(call):
    """Return an action that calls often enough to be timed, and returns the seconds of a call."""
    call()  # compiles
    call()
    began = time.perf_counter()
    call()
    calls = max(1, round(LONG / (time.perf_counter() - began)))

    def action():
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls

    return action

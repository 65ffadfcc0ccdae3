import argparse
import ast
import contextlib
import importlib.util
import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import benchmark
from lib.benchmark import (
    children,
    comparison,
    figures,
    gpu,
    networks,
    record,
    timing,
    weights,
)
from studies.laplace_torch import cases as laplace_cases

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "benchmark"
PAGE = RESULTS / "README.md"
LAPLACE = RESULTS / "laplace" / "README.md"
SCRIPT = ROOT / "scripts" / "benchmark.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    spec = importlib.util.spec_from_file_location("benchmark_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_row(ratio=1.2, noise=0.0, name="training.all.gaussian", **more):
    measured = {"ratio": ratio, "median": ratio, "noise": noise}
    return record.row(name, "LeNet step", measured, 1.4, seconds={"step": 0.01}, **more)


def test_actions_take_turns():
    order = []
    actions = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    times = timing.interleave(actions, rounds=2, warmup=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [4, 5], "b": [3, 6]}


def test_slow_moments_do_not_change_the_ratio():
    quiet = timing.ratio([1.2] * 8, [1.0] * 8)
    busy = timing.ratio([1.2, 1.2, 1.2, 1.2, 9.0, 3.0, 1.2, 2.0], [1.0, 1.0, 1.0, 1.0, 1, 1, 4, 1])
    assert quiet == {
        "ratio": pytest.approx(1.2),
        "median": pytest.approx(1.2),
        "noise": pytest.approx(0),
    }
    assert busy["ratio"] == pytest.approx(1.2)
    assert busy["noise"] == pytest.approx(0)


def test_noise_is_that_of_the_parts():
    found = timing.ratio([1.0, 1.1, 1.2, 1.3] * 3, [1.0] * 12)
    assert found["noise"] == pytest.approx(0.129, abs=1e-3)
    assert timing.ratio([1.0], [1.0])["noise"] == 0


def test_slope_finds_the_exponent():
    sizes = [8, 32, 128]
    found = timing.slope(sizes, [[size**1.5, 2 * size**1.5] for size in sizes])
    assert found["ratio"] == pytest.approx(1.5)
    assert found["median"] == pytest.approx(1.5)
    assert found["noise"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("old", "new", "noise", "factor", "count"),
    [
        (1.2, 1.19, 0.0, None, 0),
        (1.2, 1.25, 0.0, None, 0),  # within the floor
        (1.2, 1.27, 0.0, None, 1),
        (1.2, 1.27, 0.03, None, 0),  # within the noise
        (1.2, 1.60, 0.03, None, 1),
        (1.2, 1.60, 0.0, 2.0, 0),
        (1.2, 1.60, 0.9, None, 1),  # too much, however noisy
        (1.2, 2.50, 0.9, 2.0, 0),  # below twice the target
        (1.2, 2.90, 0.9, 2.0, 1),
    ],
)
def test_worse_is_beyond_noise_and_floor(old, new, noise, factor, count):
    worse = record.compare([made_row(new, noise)], [made_row(old, noise)], factor)
    assert len(worse) == count
    if worse:
        assert "LeNet step" in worse[0]
        assert f"{new:.3f}" in worse[0]
        assert f"{old:.3f}" in worse[0]


def test_rows_of_one_run_only_are_not_compared():
    assert record.compare([made_row(9.0)], [made_row(1.0, name="training.other")]) == []


def test_a_line_has_target_and_measured_number():
    found = record.line(made_row(1.234, 0.02)).split()
    assert found[-6:] == ["<=", "1.4", "1.234", "±", "0.020", "met"]
    assert record.line(made_row(1.5)).endswith("missed")
    for ratio in (1.35, 1.4, 1.45):
        assert record.line(made_row(ratio, 0.06)).endswith("unresolved")


def test_records_come_back_as_they_were(tmp_path):
    rows = [made_row(), made_row(1.7, 0.1, "vgg16.all.flow", best_batch=64)]
    record.write(tmp_path / "new" / "cpu.json", rows, {"seed": 3})
    found = record.read(tmp_path / "new" / "cpu.json")
    assert found["rows"] == rows
    assert found["options"] == {"seed": 3}
    assert {"command", "versions", "hardware", "cores", "date", "backend"} <= found.keys()
    assert record.other_machine(found) is None
    assert "64 CPU" in record.other_machine({**found, "hardware": "64 CPU cores"})


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"rows": [{"id": "a"}]}', '{"rows": 3}']
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "cpu.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"cpu\.json"):
        record.read(path)


@pytest.mark.once
def test_the_page_shows_the_stored_runs():
    text = PAGE.read_text()
    assert (RESULTS / "cpu.json").is_file()
    assert record.fill(text, RESULTS) == text
    place = text.index("| met |")
    assert record.fill(text[:place] + "| missed |" + text[place + 7 :], RESULTS) == text


@pytest.fixture
def laplace_run():
    """Return rows as `study.py laplace_torch` measures them."""
    rows = [
        made_row(0.8, name="fit.all kron fit", peer="laplace-torch 0.3"),
        made_row(0.7, name="predict.all kron nn mc 10000"),
    ]
    for axis in laplace_cases.AXES:
        for label, factor in (("fit", 1.0), ("predict", 1.01)):
            about = {"axis": axis, "sizes": [1, 10], "seconds": [factor, 4 * factor]}
            measured = {"ratio": 0.6, "median": 0.6, "noise": 0.0}
            name = f"growth.{axis} {label}"
            rows.append(record.row(name, label, measured, unit="exponent", growth=about))
    return rows


@pytest.mark.once
def test_the_page_of_laplace_shows_a_run(laplace_run, tmp_path):
    text = LAPLACE.read_text()
    assert record.fill(text, RESULTS) == text
    record.write(tmp_path / "laplace.json", laplace_run, {})
    filled = record.fill(text, tmp_path)
    assert "Not measured yet." not in filled
    for group in ("fit", "predict"):
        table = filled.split(f"<!-- benchmark: laplace {group} -->")[1].split("<!-- end -->")[0]
        assert table.count("| met |") == 1
        assert ("0.800" in table) == (group == "fit")
    assert record.fill(filled, tmp_path) == filled


@pytest.mark.once
def test_exponents_beside_curves_do_not_overlap(laplace_run):
    drawn = laplace_cases.figure(laplace_run)
    for ax in drawn.axes:
        first, second = (text.get_window_extent(drawn.canvas.get_renderer()) for text in ax.texts)
        assert not first.overlaps(second)
    figures.plt.close(drawn)
    assert laplace_cases.apart([2.0, 0.0, 5.0], 1.0) == pytest.approx([2, 0, 5])
    moved = laplace_cases.apart([1.0, 1.2, 0.0], 1.0)  # all of them, by as little as can be
    assert moved == pytest.approx([11 / 15, 26 / 15, -4 / 15])


class InProcess:
    """A peer that takes a tenth of a second for everything."""

    versions, asked = "laplace-torch 0.3", []

    def seconds(self, line):
        self.asked.append(line)
        return 0.1


@pytest.mark.once
def test_cases_of_laplace_are_timed_in_turns(eagerly, monkeypatch):
    monkeypatch.setattr(InProcess, "asked", [])
    monkeypatch.setattr(laplace_cases, "NAMES", {"last_layer kron": "last layer, Kronecker"})
    monkeypatch.setattr(laplace_cases, "WAYS", {"nn mc": "draws of weights"})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.random.default_rng(0).normal(size=(9, 2)).astype("float32"), np.arange(9) % 3
    options = argparse.Namespace(prior_precision=1.0, batch_size=9, samples=2, rounds=2)
    arguments = model, x, y, x, InProcess(), options
    fit, predict = laplace_cases.beside_peer(*arguments)
    assert fit["id"] == "fit.last_layer kron fit"
    assert predict["id"] == "predict.last_layer kron nn mc 9"
    assert InProcess.asked == 2 * ["last_layer kron fit"] + 2 * ["last_layer kron nn mc 9"]
    assert predict["seconds"]["laplace-torch"] == 0.1
    assert predict["ratio"] == pytest.approx(predict["seconds"]["ours"] / 0.1, rel=0.9)
    assert list(laplace_cases.beside_peer(*arguments, known={fit["id"], predict["id"]})) == []


@pytest.mark.once
def test_rows_of_laplace_are_kept_one_by_one(laplace_run, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    command = importlib.import_module("studies.laplace_torch").STUDY
    script = importlib.import_module("studies.laplace_torch.run")
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "results" / "benchmark" / "laplace" / "README.md"
    page.parent.mkdir(parents=True)
    page.write_text(LAPLACE.read_text())

    def rows(known):
        yield from (row for row in laplace_run if row["id"] not in known)
        raise KeyboardInterrupt

    for times, name in ((1, "laplace"), (2, "laplace_growth")):
        for _ in range(times):  # the second time there is nothing to measure
            with pytest.raises(KeyboardInterrupt):
                script.keep(command.parse(["--resume", "--output", "here"]), name, rows)
        assert record.read(f"here/{name}.json")["rows"] == laplace_run
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(laplace_run)
    command.main(["--store", "--output", "here"])
    assert record.read("results/benchmark/laplace.json")["rows"] == laplace_run
    assert "(laplace_growth.png)" in page.read_text()
    assert "Not measured yet." not in page.read_text()
    assert page.with_name("laplace_growth.png").stat().st_size > 5_000
    with pytest.raises(SystemExit):
        command.parse(["--threads", "0"])
    assert "--threads must be at least 1; got 0" in capsys.readouterr().err


def test_rounds_take_turns_until_they_take_too_long():
    order = []

    def side(name, seconds):
        return lambda: order.append(name) or seconds

    found = laplace_cases.take_turns({"a": side("a", 1), "b": side("b", 2)}, rounds=2)
    assert found == {"a": [1, 1], "b": [2, 2]}
    assert order == ["a", "b", "b", "a"]
    long = laplace_cases.take_turns({"a": side("a", 99)}, rounds=9)
    assert len(long["a"]) == laplace_cases.ENOUGH


@pytest.mark.once
def test_tables_show_milliseconds(tmp_path):
    rows = [
        made_row(),
        record.row("training.other", "other", {"ratio": 1, "median": 1, "noise": 0}),
    ]
    rows[0]["seconds"]["deterministic"] = 0.008
    record.write(tmp_path / "cpu.json", rows, {})
    text = "<!-- benchmark: cpu training -->\n<!-- end -->"
    _, head, _, first, second, _ = record.fill(text, tmp_path).splitlines()
    place = head.split(" | ").index("ms / reference")
    assert first.split(" | ")[place] == "10 / 8"
    assert second.split(" | ")[place] == ""
    record.write(tmp_path / "cpu.json", rows[1:], {})
    assert "ms" not in record.fill(text, tmp_path).splitlines()[1]


@pytest.mark.once
def test_every_target_has_a_stored_row():
    rows = record.read(RESULTS / "cpu.json")["rows"]
    assert len({row["id"] for row in rows}) == len(rows)
    alone = [record.read(RESULTS / f"{name}.json")["rows"] for name in ("peers", "export")]
    groups = {row["group"] for row in sum(alone, rows)}
    assert groups == {*benchmark.GROUPS, "sampling"}
    targets = [row for row in rows if row["target"] is not None and row["group"] != "growth"]
    assert len(targets) == 26


@pytest.mark.once
@pytest.mark.slow
def test_figures_are_drawn_from_stored_runs(tmp_path):
    rows = record.read(RESULTS / "cpu.json")["rows"]
    for draw in (figures.ratios, figures.growths):
        figures.save(draw(rows), tmp_path / f"{draw.__name__}.png")
        assert (tmp_path / f"{draw.__name__}.png").stat().st_size > 10_000
        assert draw([row for row in rows if row["group"] == "imports"]) is None


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "1"], "--rounds must be 2 to"),
        (["--seed", "-1"], "--seed must be 0 to"),
        (["--only", "trainings"], "'trainings'"),
        (["--only", "gpu", "training"], "--only gpu runs by itself"),
        (["--only", "gpu", "--short"], "--short is of the groups of a CPU"),
        (["--store", "--short"], "--store keeps whole runs"),
        (["--store", "--only", "training"], "--store keeps whole runs"),
    ],
)
def test_bad_options_are_named(script, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        script.parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.once
def test_groups_are_those_of_the_package(script):
    assert set(script.CPU) == {*benchmark.GROUPS, "sampling"}
    assert script.parse([]).only == list(script.CPU)
    assert script.parse(["--only", "gpu"]).only == script.parse([], on_jax=True).only == ["gpu"]
    assert set(script.parse(["--short"]).only) == set(script.SHORT)


@pytest.mark.once
@pytest.mark.parametrize(("stored", "code"), [(1.2, 0), (1.0, 1)])
def test_exit_status_says_whether_it_is_worse(script, monkeypatch, tmp_path, capsys, stored, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(benchmark.GROUPS, "training", lambda settings: iter([made_row(1.2)]))
    record.write("stored.json", [made_row(stored)], {})
    arguments = ["--only", "training", "--compare", "stored.json", "--output", "here"]
    assert script.main(arguments) == code
    printed = capsys.readouterr().out
    assert ("WORSE" in printed) == bool(code)
    assert record.read("here/cpu.json")["rows"] == [made_row(1.2)]
    assert script.main([*arguments[:-2], "--compare", "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.once
def test_short_form_runs(tmp_path):
    """It is worse only at twice the stored ratios, so that a busy machine does not matter."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--short", "--compare", RESULTS / "cpu.json", "--output", "here"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "here" / "cpu.json").read_text())["rows"]
    assert [row["id"] for row in rows] == [
        "training.all.gaussian",
        "training.all.flow",
        "prediction.shared.gaussian",
        "prediction.shared.flow",
        "parameters.gaussian",
        "parameters.flow",
    ]
    assert all(record.line(row) in done.stdout for row in rows)


def test_a_step_is_timed_by_plain_fit():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)])
    action = networks.stepper(model, batch=4, steps=3, seed=0)
    before = model.get_weights()[0]
    assert 0 < action() < 60
    assert int(model.optimizer.iterations) == 3 * networks.EPOCHS
    assert (model.get_weights()[0] != before).any()


@pytest.mark.once
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TFP's layers are for it")
def test_tfp_layers_draw_in_one_loop_at_the_batch_that_suits_them(monkeypatch):
    ran = []

    def noisy(batch):  # all that is asked of a network
        ran.append(len(batch))
        return batch + keras.random.normal(batch.shape, seed=generator)

    generator = keras.random.SeedGenerator(0)
    inputs = keras.Input((10,))
    plain = keras.Model(inputs, keras.layers.Dense(10)(inputs))
    monkeypatch.setattr(comparison, "BATCHES", (8, 16))
    monkeypatch.setattr(networks, "images", lambda count, seed: (np.ones((count, 10), "f"), None))
    described = {"prediction.tfp_noisy": ("noisy", None)}
    noisy = {"prediction.tfp_noisy": noisy}
    (row,), times = comparison.prediction_rows({}, described, plain, 2, 0, noisy)
    assert row["own_batch"] in (8, 16)
    assert row["best_batch"] in (8, 16)
    ratio = min(times["prediction.tfp_noisy"]) / min(times[None])
    assert row["ratio"] == pytest.approx(ratio, rel=1e-3)
    assert ran.count(8) == ran.count(16) == 1  # traced once, whatever the number of draws
    mean = networks.looped(*noisy.values(), np.zeros((4, 10), "f"), 3)
    assert 0 < mean() < 60


@pytest.mark.once
def test_other_libraries_are_compared_with_their_own_network(monkeypatch):
    asked = []

    def answer(command, text):
        _, script, *words = map(str, command)
        assert Path(script).is_file()
        asked.append(words)
        if words[2:] == ["memory"]:
            return json.dumps({"deterministic": 2**21, "flipout": 2**22}.get(words[0], 2**23))
        times = {
            "deterministic": [0.2, 0.1],
            "reparameterization": [0.2, 0.3],
            "flipout": [0.4] * 2,
        }
        return f"a warning\n{json.dumps(times)}\n"

    monkeypatch.setattr(weights.subprocess, "check_output", answer)
    first, second = weights._torch_rows(2, 7)
    assert (first["id"], second["id"]) == (
        "weights.torch_reparameterization",
        "weights.torch_flipout",
    )
    assert (first["ratio"], second["ratio"]) == (pytest.approx(2), pytest.approx(4))
    assert second["seconds"] == {"step": 0.4, "deterministic": 0.1}
    assert (second["memory_ratio"], second["mebibytes"]) == (2, [4, 2])
    assert asked[0] == ["2", "7"]
    assert len(asked) == 4


@pytest.mark.once
def test_other_libraries_train_the_same_way():
    """What their script says of the training, which it cannot import."""
    for part in ast.parse(weights._SCRIPT.read_text()).body:
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Tuple):
            found = ast.literal_eval(part.value)
            assert [name.id for name in part.targets[0].elts][:2] == ["BATCH", "STEPS"]
    known = (
        comparison.BATCH,
        comparison.STEPS,
        networks.EPOCHS,
        networks.TRAIN_SIZE,
        networks.CLASSES,
    )
    assert found == known


@pytest.mark.once
@pytest.mark.parametrize("kind", weights.OURS)
def test_weights_are_random_as_their_name_says(kind):
    layers = {layer.name: layer for layer in ibnn.stochastic_layers(weights._ours(kind))}
    assert len(layers) == 5
    found = {name: layer.posterior.estimator for name, layer in layers.items()}
    assert found["fc2"] == kind
    assert found["conv2"] == ("flipout" if kind == "local" else kind)


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(gpu, "BATCHES", (4,))
    monkeypatch.setattr(gpu, "PRECISIONS", {"float32": "float32"})
    monkeypatch.setattr(gpu, "TARGETS", {"gaussian": 1.1})


class Inline:
    """A process that is none: it has a kind of network, and a time for its steps."""

    steps = []  # of all of them, in order

    def submit(self, function, *arguments):
        future = Future()
        if function is gpu._begin:
            assert (arguments[0], *arguments[2:]) == ("lenet", "float32", 4, 2, 0)
            self.kind = arguments[1]
            future.set_result(None)
        else:
            self.steps.append(self.kind)
            future.set_result({"none": 0.5, "gaussian": 0.6}[self.kind])
        return future


def test_steps_take_turns_and_are_compared(few_cases, monkeypatch):
    monkeypatch.setattr(Inline, "steps", [])
    monkeypatch.setattr(gpu, "process", lambda: contextlib.nullcontext(Inline()))
    (row,) = gpu.gpu_steps(benchmark.Settings(rounds=2), "lenet", steps=2)
    assert row["id"] == "gpu.float32.4.gaussian"
    assert row["seconds"] == {"step": 0.6, "deterministic": 0.5}
    assert (row["ratio"], row["target"]) == (pytest.approx(1.2), 1.1)
    assert Inline.steps == 2 * ["none", "gaussian", "gaussian", "none"]


@pytest.mark.once
@pytest.mark.slow  # two processes; the tests before and after this one have none and one
def test_steps_are_timed_in_processes_that_take_turns(few_cases):
    (row,) = gpu.gpu_steps(benchmark.Settings(rounds=2), "lenet", steps=2)
    assert row["id"] == "gpu.float32.4.gaussian"
    times = row["seconds"]
    assert row["ratio"] == pytest.approx(times["step"] / times["deterministic"], rel=1e-3)


def test_images_are_those_of_the_network(monkeypatch, policy):
    def small(network, kind, noise="channel"):
        parts = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input(networks.SHAPES[network]), *parts])

    for module in (gpu, networks):
        monkeypatch.setattr(module, "stochastic", small)
    assert gpu.stepping("vgg16", "none", "float32", 4, 2, 0)() > 0
    if sys.platform == "linux":
        found = children.memory("none", "channel", 0)
        assert found["peak"] > 0.99 * found["before"] > 0  # the two are read at different times
        assert found["rest"] > 0
        assert found["step"] >= 0


@pytest.mark.once
@pytest.mark.slow
def test_a_process_that_fails_says_why(few_cases, monkeypatch):
    monkeypatch.setattr(gpu, "TARGETS", {})
    with pytest.raises(RuntimeError, match="no_network none float32 4 .* failed: .*no_network"):
        list(gpu.gpu_steps(benchmark.Settings(rounds=2), "no_network", steps=2))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="the loop is JAX's")
def test_loop_on_the_device_trains(policy):
    policy("float32")
    action = gpu.stepping("lenet", "gaussian", "bfloat16", batch=4, steps=2, seed=0)
    assert keras.config.dtype_policy().name == "mixed_bfloat16"
    assert 0 < action() < 60
    assert "tensorflow" not in sys.modules

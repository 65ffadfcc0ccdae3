"""The campaigns of tests/robustness, small, and a test of each fault that they have found."""

import importlib
import io
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib.data import DataError, _sources
from lib.folder import RunError, read_record
from lib.posterior_files import read_posteriors
from lib.scoring import read_model
from tests.monte_carlo_tools import JAX, classifier, data
from tests.robustness import harness, itself, mutate
from tests.robustness.checkpoints import network, same, state
from tests.robustness.dataset_files import huge_picture
from tests.scripts.lib.data.test_loading import Made, tar_of
from tfp_ibnn._core import checks, files
from tfp_ibnn.training.checkpoint import CheckpointError

if JAX:
    pytest.skip("the campaigns run on TensorFlow", allow_module_level=True)
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.once


# ----------------------------------------------------------------------------------- the campaigns


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = harness.Worker(tmp_path_factory.mktemp("robustness"))
    yield worker
    worker.close()


# Other tests kill runs, attack the server and damage files.
@pytest.mark.slow
@pytest.mark.parametrize("name", harness.CAMPAIGNS)
def test_campaign(worker, name):
    tally = harness.run(worker, name, seed=1, scale=1e-9)
    assert tally.faults == []
    assert tally.tried == tally.refused + tally.right >= harness.CAMPAIGNS[name].least
    assert min(tally.refused, tally.right) > 0
    if name == "interrupted writing":
        assert tally.extra["kills"] > 0
        assert tally.extra["full disks"] > 0
    if name == "HTTP server":
        assert tally.extra["good requests"] == tally.right >= 250


@pytest.mark.slow
def test_the_harness_sees_what_goes_wrong(tmp_path, monkeypatch):
    size = harness.Size("itself", 14, 14, itself.SECONDS)
    monkeypatch.setitem(harness.CAMPAIGNS, "itself", size)
    monkeypatch.setattr(harness, "GDB", None)  # which takes seconds
    worker = harness.Worker(tmp_path / "sandbox")
    said = []
    try:
        tally = harness.run(worker, "itself", say=said.append)
    finally:
        worker.close()
    crashes = [fault.split(":")[0].split()[1] for fault in tally.crashes]
    assert crashes == ["0", "1", "2", "4", "5", "6", "7", "10"]
    ends = "ended with 0", f"ended with {-signal.SIGSEGV}", "hung, in itself.py"
    for words, crash in zip(ends, tally.crashes, strict=False):
        assert words in crash
    assert "hung, in itself.py" in tally.crashes[-1]
    stacks = [text for text in said if "most recent call first" in text]
    assert len(stacks) == 2
    drawn = random.Random("0 itself 3").random()  # of the seed, the campaign and the case alone
    assert tally.wrong == [f"itself 3 number {drawn}: another answer"]
    assert [fault.split()[1] for fault in tally.outside[:2]] == ["8", "9"]
    assert any("outside/escaped was written" in fault for fault in tally.outside)
    assert (tally.refused, tally.right, tally.tried) == (1, 4, 14)
    assert all(any(fault in line for line in said) for fault in tally.faults)
    assert "| itself | 14 | 1 | 4 | 8 | 1 | 4 |" in harness.table([tally])


def test_the_command_line(monkeypatch, capsys):
    monkeypatch.syspath_prepend(harness.ROOT / "scripts")
    script = importlib.import_module("robustness")
    for option in ("--scale=0", "--scale=nan", "--jobs=0", "--only=nothing"):
        with pytest.raises(SystemExit) as caught:
            script.parse([option])
        assert caught.value.code == 2
        assert option.split("=")[0] in capsys.readouterr().err.splitlines()[-1]

    def campaign(worker, name, seed, scale, say):
        wrong = ["x is wrong"] if name == "configs" and seed == 3 else []
        return harness.Tally(name, tried=2, right=2 - len(wrong), wrong=wrong)

    monkeypatch.setattr(harness, "run", campaign)
    only = ["--only", "configs", "--only", "HTTP server"]
    assert script.main([*only, "--seed", "2"]) == 0
    assert "| all | 4 | 0 | 4 | 0 | 0 | 0 |" in capsys.readouterr().out
    assert script.main([*only, "--seed", "3"]) == 1
    assert "FAULT x is wrong" in capsys.readouterr().out


# -------------------------------------------------------------------------------- what they found


def test_a_model_with_broken_weights_is_a_run_error(tmp_path):
    path = tmp_path / "model.keras"
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.save(path)
    files = mutate.members(path.read_bytes())
    broken = [(n, re.sub(b"HEAP.", b"HEAP\x09", c) if n.endswith("h5") else c) for n, c in files]
    path.write_bytes(mutate.repacked(broken))
    with pytest.raises(Exception, match="heap") as caught:
        keras.saving.load_model(path)
    assert not isinstance(caught.value, OSError | ValueError | TypeError | KeyError)
    with pytest.raises(RunError, match="cannot be read") as caught:
        read_model(path, "digits")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, "uint32"),
        np.uint32(1),
        np.array([0.5, 1.0]),
        np.array([np.nan, 1.0]),
        np.array([2**63, 1], "uint64"),
    ],
)
def test_a_random_state_that_does_not_fit_is_refused(value):
    layer = ibnn.NormalAffine()
    layer.build((None, 3))
    store = {}
    layer.save_own_variables(store)
    with pytest.raises(ValueError, match="random state .* the file is damaged"):
        layer.load_own_variables({**store, "random_state_0": value})
    with pytest.raises(ValueError, match="2 random states .* damaged"):
        layer.load_own_variables({**store, "random_state_x": store["random_state_0"]})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint's files, and another network of the same form."""
    path = tmp_path_factory.mktemp("checkpoint") / "run.npz"
    model, callback = network(1), ibnn.Checkpoint(path)
    callback.set_model(model)
    callback.on_epoch_end(0, {"loss": 1.0})
    return mutate.members(path.read_bytes()), state(model), network(2)


def saved(value):
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


def rewritten(files, **changed):
    """An archive whose record has other entries."""
    record = json.loads(str(np.load(io.BytesIO(dict(files)["record.npy"]))))
    record = {key: x for key, x in {**record, **changed}.items() if x is not None}
    content = saved(np.array(json.dumps(record)))
    return mutate.repacked([(n, content if n == "record.npy" else c) for n, c in files])


def with_member(files, name, content):
    return mutate.repacked([(n, content if n == name else c) for n, c in files])


def test_a_checkpoint_is_restored_exactly_or_not_at_all(checkpoint, tmp_path):
    files, right, model = checkpoint
    before, path = state(model), tmp_path / "run.npz"
    contents = dict(files)
    values = {n: np.load(io.BytesIO(c)) for n, c in files if n != "record.npy"}
    twins = [n for n, x in values.items() if x.shape == (3, 3)][:2]
    swapped = {**contents, twins[0]: contents[twins[1]], twins[1]: contents[twins[0]]}
    last = list(values)[-1]
    for content, words in (
        (mutate.repacked(swapped.items()), "SHA-256"),
        (rewritten(files, logs=[{"loss": 2.0}]), "SHA-256"),
        (rewritten(files, epochs=7), "SHA-256"),
        (rewritten(files, epochs=-1, sha256=None), "epochs"),
        (with_member(files, last, b""), "is not an array"),
    ):
        path.write_bytes(content)
        callback = ibnn.Checkpoint(path)
        with pytest.raises(CheckpointError, match=words):
            callback.restore(model)
        assert same(state(model), before)
        assert callback.logs == []
    # The last array, so that all others would have been assigned already.
    plain = mutate.members(rewritten(files, sha256=None))
    for wrong in (values[last].astype("U4"), np.full(values[last].shape, np.datetime64("2020"))):
        path.write_bytes(with_member(plain, last, saved(wrong)))
        with pytest.raises(CheckpointError, match="belongs to another run"):
            ibnn.Checkpoint(path).restore(model)
        assert same(state(model), before)
    path.write_bytes(mutate.repacked(plain))  # as earlier versions wrote it
    assert ibnn.Checkpoint(path).restore(model) == 1
    assert same(state(model), right)


def test_what_a_model_cannot_compute_is_refused():
    mc = ibnn.MonteCarlo(classifier(), samples=2, seed=0)
    mc.compile(run_eagerly=True)
    x, y = data(4, 4), np.array([0, 1, 2, 0])
    beyond = x.astype("float64")
    beyond[2, 1] = 1e300
    for ask in (mc.predict, mc.predict_on_batch, lambda x: mc.evaluate(x, y), mc.test_on_batch):
        for wrong, words in (
            (beyond, "beyond float32, in 1 of 4 examples; the first is number 2"),
            (x + 1j, "`x` holds complex numbers"),
            (None, "`x` is missing"),
            ([[None] * 4], "`x` is missing"),
            (np.array(1.0), "single number"),
        ):
            with pytest.raises(ValueError, match=words):
                ask(wrong)
    with pytest.raises(ValueError, match="`y` holds complex numbers"):
        mc.evaluate(x, y + 1j)
    with pytest.raises(ValueError, match="`y` holds complex numbers"):
        mc.test_on_batch(x, y=y + 1j)
    assert np.isfinite(mc.predict(x.astype("float64"), verbose=0)["mean"]).all()


def test_a_layer_without_an_input_says_so():
    layer = ibnn.StochasticDense(2, train_size=10)
    layer.build((None, 3))
    with pytest.raises(ValueError, match="must be called with a tensor; got None"):
        layer(None)
    for shape in ((), (3,)):
        with pytest.raises(ValueError, match="needs an input of shape"):
            layer(np.ones(shape, "float32"))


def test_numbers_that_float32_cannot_hold_are_refused():
    for value in (1e300, -1e39, 10**40):
        with pytest.raises(ValueError, match="finite number"):
            checks.finite("x", value)
    with pytest.raises(ValueError, match="above 0; got 1e-320"):
        ibnn.NormalAffine(prior_scale=1e-320)
    assert checks.finite("x", -3e38) == -3e38
    assert checks.positive("x", 1e-37) == 1e-37


def test_scales_whose_squares_float32_cannot_hold_are_refused():
    for name in ("prior_scale", "initial_scale", "prior_loc"):
        with pytest.raises(ValueError, match=f"`{name}` must be 0, or of a size between"):
            ibnn.NormalAffine(**{name: 1e19})
    for name in ("mean_spread", "scale_spread", "initial_scale"):
        with pytest.raises(ValueError, match=f"`{name}` must be 0, or of a size between"):
            ibnn.MixturePosterior(**{name: 1e-12})
    wide = ibnn.MixturePosterior(initial_scale=1000.0)  # whose exponential float32 cannot hold
    wide.build((None, 3))
    z, kl = wide.sample_and_kl((2,))
    assert np.isfinite(np.asarray(z)).all()
    assert np.isfinite(np.asarray(kl)).all()
    scale = np.logaddexp(0, np.asarray(wide.raw_scale, "float64"))
    np.testing.assert_allclose(scale, 1000, rtol=1e-3)


def test_a_broken_dtype_is_named():
    with pytest.raises(ValueError, match="`dtype` must be a type or a policy"):
        checks.full_precision({"class_name": "x", "config": {}})


@pytest.mark.parametrize(
    "make",
    [
        lambda n: ibnn.NormalPlanar1d(depth=n),
        lambda n: ibnn.NormalGlowStep(n),
        lambda n: ibnn.NormalInvConv(planar=n),
    ],
)
def test_a_posterior_of_a_billion_flows_is_refused_at_once(make):
    with pytest.raises(ValueError, match="at most 1000; got 1000000000"):
        make(10**9)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: ibnn.NormalGlowStep(hidden=n),
        lambda n: ibnn.NormalIAF(hidden=n),
        lambda n: ibnn.NormalSylvester(units=n),
        lambda n: ibnn.MixturePosterior(n),
        lambda n: ibnn.FlowPosterior(components=n),
        lambda n: ibnn.ExpectedCalibrationError(bins=n),
        lambda n: ibnn.data.RandomShift(n),
    ],
)
def test_a_size_that_would_take_all_memory_is_refused_at_once(make):
    with pytest.raises(ValueError, match="at most 1048576; got 1000000000"):
        make(10**9)
    make(2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"a{99999999999}": {"posterior": "NormalAffine"}}', "not a regular expression"),
        ('{".*": {"posterior": "NormalAffine"}, ".*": {}}', r"'\.\*' twice"),
        ('{".*": {"posterior": "NormalAffine", "beta": 1, "beta": 2}}', "'beta' twice"),
    ],
)
def test_a_posterior_file_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "posteriors.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_posteriors(path)
    assert "\n" not in str(caught.value)


def test_a_pattern_with_too_many_repetitions_is_named():
    det = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="not a regular expression"):
        ibnn.to_stochastic(det, {"a{99999999999}": ibnn.NormalAffine()}, train_size=10)


def test_a_record_that_is_too_deep_is_a_run_error(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text("[" * 100_000)
    with pytest.raises(RunError, match="cannot be read"):
        read_record(path)


def test_broken_archives_and_pictures_are_data_errors(tmp_path):
    made = Made("cifar10")
    content = bytearray(tar_of(made.package, "w:xz"))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(lzma.LZMAError):
        lzma.decompress(content)
    path = tmp_path / "it.tgz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"it\.tgz cannot be read"):
        _sources._members(path, ["missing"], made.dataset)

    class Largest:
        def choice(self, values):
            return values[-1]

    with pytest.raises(DataError, match="cannot be read"):
        _sources._png_rows(huge_picture(Largest()), "x.png", made.dataset)


REPLACE = """
import importlib.util, os, signal, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("_files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
seen = 0

def hook(event, arguments):
    global seen
    if event == "os.rename":
        if seen == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

with files.replacing_folder(sys.argv[2]) as temporary:
    temporary.mkdir()
    (temporary / "new").touch()
    sys.addaudithook(hook)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is a moment without a folder")
@pytest.mark.parametrize("number", range(3))
def test_a_folder_is_there_after_a_kill_at_any_renaming(tmp_path, number):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    done = subprocess.run([sys.executable, "-c", REPLACE, files.__file__, path, str(number)])
    assert done.returncode in (0, -signal.SIGKILL)
    assert os.listdir(path) in (["old"], ["new"])


def test_without_an_exchange_a_folder_is_replaced_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    path = tmp_path / "folder"
    for name in ("first", "second"):
        with files.replacing_folder(path) as temporary:
            temporary.mkdir()
            (temporary / name).touch()
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(path) == ["second"]


def test_a_manifest_that_is_a_device_or_names_nonsense_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(harness.ROOT / "scripts")
    serve = importlib.import_module("serve")
    manifest = tmp_path / serve.MANIFEST
    manifest.parent.mkdir()
    sums = {"saved_model.pb": "0", "\ud800": "0"}
    manifest.write_text(json.dumps({"format": 1, "sha256": dict(reversed(sums.items()))}))
    with pytest.raises(ValueError, match="Invalid JSON"):
        serve.verify(tmp_path)
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is a link"):
        serve.verify(tmp_path)


# ------------------------------------------------------------------- what Keras refuses by itself


def test_code_in_a_model_file_is_refused_by_safe_mode(tmp_path):
    inputs = keras.Input((8, 8, 1))
    flat = keras.layers.Flatten()(inputs)
    outputs = keras.layers.Lambda(lambda x: x[:, :10])(flat)
    keras.Model(inputs, outputs).save(tmp_path / "model.keras")
    with pytest.raises(RunError, match="cannot be read.*[Ll]ambda"):
        read_model(tmp_path / "model.keras", "digits")


def test_weights_of_another_file_are_not_read(tmp_path):
    """HDF5 can lead to other files on the disk; what is there must not come into a model."""
    path = tmp_path / "model.keras"
    keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]).save(
        path
    )
    with h5py.File(tmp_path / "secret.h5", "w") as secret:
        secret["kernel"] = np.zeros((64, 10), "float32")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO(files["model.weights.h5"])
    with h5py.File(buffer, "a") as file:
        del file["layers/dense/vars/0"]
        file["layers/dense/vars/0"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/kernel")
    files["model.weights.h5"] = buffer.getvalue()
    path.write_bytes(mutate.repacked(files.items()))
    with pytest.raises(RunError, match="cannot be read"):
        read_model(path, "digits")

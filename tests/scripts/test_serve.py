"""scripts/serve.py: under load, under attack, full, and at its end."""

import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, data, dense, set_weights

if JAX:
    pytest.skip("TensorFlow serves SavedModels", allow_module_level=True)
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import tensorflow as tf

from tests.hostile_requests import hostile
from tests.http_load import Bank, Report, Running, finish, load

SCRIPTS = Path(__file__).parents[2] / "scripts"
TIMEOUT = 4.0
ROOM = 18
LIMITS = ("--threads", "2", "--max-waiting", ROOM - 2, "--timeout", TIMEOUT, "--max-body-mb", "1")

# The server must do with TensorFlow, which looks for Keras but works without it.
ALONE = """
import importlib.machinery, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tfp_ibnn", "tensorflow_probability", "keras", "tf_keras"):
            return importlib.machinery.ModuleSpec(name, self, origin="nowhere", is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise ImportError(f"{module.__name__} is not to be imported")

sys.meta_path.insert(0, Refuse())
"""

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def serve():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("serve")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network of one input."""
    inputs = keras.Input((4,), name="features")
    hidden = dense(8, "tanh")(inputs)
    model = set_weights(keras.Model(inputs, dense(3, "softmax")(hidden)))
    path = tmp_path_factory.mktemp("served") / "7"
    return ibnn.export(ibnn.MonteCarlo(model, samples=8, seed=0), path)


@pytest.fixture(scope="module")
def bank(folder):
    return Bank(folder, data(64, 4))


@pytest.fixture(scope="module")
def running(folder):
    server = Running(folder, *LIMITS, before=ALONE)
    yield server
    server.close()


def still_right(running, bank):
    client, rng = running.client(), random.Random(1)
    for _ in range(10):
        body, right = bank.question(rng)
        assert bank.fault(running.ask(client, body), right) is None
    client.close()


def exported(inputs, features, path):
    """Return the folder of a network whose inputs are turned into features first."""
    model = set_weights(keras.Model(inputs, dense(2, "softmax")(features)))
    return ibnn.export(ibnn.MonteCarlo(model, samples=2, seed=0), path)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("string", ["a", "c"], [True, False]), ("bool", [True, False], ["true", "false"])],
)
def test_texts_and_booleans_are_told_apart(serve, tmp_path, name, good, bad):
    inputs = keras.Input((1,), dtype=name, name="word")
    if name == "string":
        lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="multi_hot")
        features = lookup(inputs)
    else:
        features = keras.ops.cast(inputs, "float32")
    service = serve.Service(exported(inputs, features, tmp_path / "1"), 8)
    answer = json.loads(service.answer(json.dumps({"instances": [[x] for x in good]})).body)
    signature = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
    mean = signature(word=tf.constant([[x] for x in good]))["mean"].numpy()
    np.testing.assert_allclose([x["mean"] for x in answer["predictions"]], mean, rtol=1e-5)
    assert abs(mean[0] - mean[1]).max() > 1e-3
    with pytest.raises(ValueError, match="Input should be a valid"):
        service.answer(json.dumps({"instances": [[x] for x in bad]}))


def test_an_input_that_json_cannot_hold_is_named(serve):
    with pytest.raises(ValueError, match="an input of complex64, for which JSON has no type"):
        serve.json_type(tf.TensorSpec((None, 2), tf.complex64), 8)


# --------------------------------------------------------------------------------------- requests


def test_every_answer_is_right_under_load_and_attack(running, bank):
    report = load(running, bank, 400, hostile(bank))
    assert report.faults == []
    assert report.right == 400
    assert report.hostile > 20


def test_every_attack_is_refused_in_words(running, bank):
    faults = {name: attack(running) for name, attack in hostile(bank).items()}
    assert {name: fault for name, fault in faults.items() if fault} == {}
    still_right(running, bank)
    assert "Traceback" not in running.errors()


def test_status_and_metadata(running):
    client = running.client()
    status, content = running.ask(client, None, "", "GET")
    (version,) = content["model_version_status"]
    assert (status, version["version"], version["state"]) == (200, "7", "AVAILABLE")
    assert running.ask(client, None, "/versions/7", "GET") == (200, content)
    assert running.ask(client, None, "/versions/8", "GET")[0] == 404
    assert running.ask(client, b"{}", "")[0] == 405
    status, content = running.ask(client, None, "/metadata", "GET")
    assert status == 200
    assert content["model_spec"] == {"name": "model", "signature_name": "", "version": "7"}
    signatures = content["metadata"]["signature_def"]["signature_def"]
    assert signatures.keys() >= {"serving_default", "serve", "sample", "deterministic"}
    features = signatures["serve"]["inputs"]["features"]
    assert features["dtype"] == "DT_FLOAT"
    assert [axis["size"] for axis in features["tensor_shape"]["dim"]] == ["-1", "4"]
    assert signatures["sample"]["inputs"].keys() == {"features", "seed"}
    client.close()


def test_a_message_tells_what_was_expected(running):
    client = running.client()
    for body, words in (
        ({"instances": [[1, 2, 3]]}, "features.0': List should have at least 4 items"),
        ({"instances": [[1, 2, 3, 4], [1, 2, 3, 4, 5]]}, "features.1': List should have at most 4"),
        ({"instances": [[1, 2, 3, "4"]]}, "features.0.3': Input should be a valid number"),
        ({"instances": [[0.0] * 4] * 1025}, "at most 1024 items"),
        ({"inputs": {"features": [[0] * 4], "x": 0}}, "x': Extra inputs are not permitted"),
        ({"instances": {"features": []}}, "instances': Input should be a valid array"),
        ({"signature_name": "sample", "instances": [[0] * 4]}, "'sample(features, seed)'"),
        ({"signature_name": "sample", "inputs": {"features": [[0] * 4]}}, "seed': Field required"),
        ({"signature_name": "simple", "inputs": []}, "should be 'serve', 'sample', 'determ"),
        ({"signature_name": "serve"}, "either 'instances' or 'inputs'"),
    ):
        status, content = running.ask(client, body)
        assert status == 400
        assert words in content["error"]
    client.close()


def admitted(running, message):
    """Return a connection whose request has a place; its body has begun to come."""
    head = running.head(f"Expect: 100-continue\r\nContent-Length: {len(message)}")
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:  # a request of an earlier test may still have a place
        connection = running.socket()
        connection.sendall(head)
        if connection.recv(1000).startswith(b"HTTP/1.1 100 "):
            connection.sendall(message[:10])
            return connection
        connection.close()
    raise TimeoutError("The server has no place for a request.")


def test_a_full_server_says_so_and_loses_nothing(running, bank):
    body, right = bank.question(random.Random(0))
    message = json.dumps(body).encode()
    held = [admitted(running, message) for _ in range(ROOM)]
    client = running.client()
    status, content = running.ask(client, message)
    assert status == 503
    assert "later" in content["error"]
    assert running.ask(running.client(), None, "", "GET")[0] == 200
    for connection in held:
        connection.sendall(message[10:])
    for connection in held:
        assert bank.fault(finish(connection), right) is None
        connection.close()
    # On the connection that was refused.
    assert bank.fault(running.ask(client, message), right) is None
    client.close()


@pytest.mark.slow
def test_slow_clients_are_left(running, bank):
    begin = time.monotonic()
    slow_head, slow_body, silent = (running.socket() for _ in range(3))
    slow_head.sendall(running.head("Content-Length: 10")[:30])
    slow_body.sendall(running.head("Content-Length: 10") + b"{")
    status, content = finish(slow_body)
    assert status == 408
    assert "4 s" in content["error"]
    for connection in (slow_head, slow_body, silent):
        assert connection.recv(100) == b""
        connection.close()
    assert TIMEOUT <= time.monotonic() - begin < 5 * TIMEOUT
    still_right(running, bank)


def test_a_client_that_waits_to_be_asked_for_its_body(running, bank):
    body, right = bank.question(random.Random(3))
    message = json.dumps(body).encode()
    with running.socket() as connection:
        size = f"Content-Length: {len(message)}\r\nExpect: 100-continue"
        connection.sendall(running.head(size))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(message)
        assert bank.fault(finish(connection), right) is None


@pytest.mark.slow
def test_its_end_under_load(folder, bank):
    """After SIGTERM all that were connected get an answer, and the process ends well."""
    body, right = bank.question(random.Random(2))
    message = json.dumps(body).encode()
    with closing(Running(folder, *LIMITS, "--timeout", "60", before=ALONE)) as running:
        held = running.socket()
        held.sendall(running.head(f"Content-Length: {len(message)}") + message[:10])
        report = Report()
        work = threading.Thread(target=load, args=(running, bank, 10**6), kwargs={"report": report})
        work.start()
        while report.right < 100 and work.is_alive():
            time.sleep(0.02)
        running.process.send_signal(signal.SIGTERM)
        work.join(timeout=60)
        assert not work.is_alive()
        assert report.faults == []
        with pytest.raises(ConnectionRefusedError):
            running.socket()
        held.sendall(message[10:])
        assert bank.fault(finish(held), right) is None
        held.close()
        assert running.process.wait(timeout=30) == 0
        assert "Traceback" not in running.errors()


# -------------------------------------------------------------------------------- without a server


@pytest.fixture(scope="module")
def two(tmp_path_factory, serve):
    """A service of a network of two inputs, one of them whole numbers."""
    features, kind = (
        keras.Input((2, 3), name="features"),
        keras.Input((), dtype="int32", name="kind"),
    )
    flat = keras.layers.Flatten()(features)
    hidden = keras.layers.Concatenate()([flat, keras.layers.Embedding(5, 2)(kind)])
    model = set_weights(keras.Model([features, kind], dense(2)(hidden)))
    mc = ibnn.MonteCarlo(model, samples=2, seed=0, head="point")
    path = ibnn.export(mc, tmp_path_factory.mktemp("two") / "model")
    return mc, serve.Service(path, max_batch=10)


def test_rows_and_columns_of_several_inputs(two):
    mc, service = two
    x, kind = data(3, 2, 3), np.array([0, 4, 2], "int32")
    expected = mc.predict([x, kind], verbose=0)["mean"]
    rows = [{"features": a.tolist(), "kind": int(b)} for a, b in zip(x, kind, strict=True)]
    answer = json.loads(service.answer(json.dumps({"instances": rows})).body)
    np.testing.assert_allclose([row["mean"] for row in answer["predictions"]], expected, rtol=1e-5)
    columns = {"features": x.tolist(), "kind": kind.tolist()}
    answer = json.loads(service.answer(json.dumps({"inputs": columns})).body)
    np.testing.assert_allclose(answer["outputs"]["mean"], expected, rtol=1e-5)
    assert service.version == "1"


EXAMPLE = [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"inputs": {"features": [EXAMPLE], "kind": [1.0]}},
            "kind.0': Input should be a valid",
        ),
        ({"inputs": {"features": [EXAMPLE], "kind": [True]}}, "kind.0': Input should be a valid"),
        ({"inputs": {"features": [EXAMPLE], "kind": [2**31]}}, "less than or equal to 2147483647"),
        ({"inputs": {"features": [EXAMPLE], "kind": [-(2**80)]}}, "or equal to -2147483648"),
        ({"inputs": {"features": [EXAMPLE], "kind": [0, 1]}}, "one batch size"),
        ({"inputs": {"features": [EXAMPLE], "kind": [99]}}, "99 is not in [0, 5)"),
        ({"inputs": {"features": [EXAMPLE[:1]], "kind": [0]}}, "features.0': List should have at"),
        (
            {"inputs": {"features": [[[1, 2, 3], [4, 5]]], "kind": [0]}},
            "features.0.1': List",
        ),
        ({"inputs": {"features": [[[1, 2, 3], 4]], "kind": [0]}}, "should be a valid list"),
        ({"inputs": {"features": [EXAMPLE]}}, "kind': Field required"),
        ({"inputs": [EXAMPLE]}, "(features, kind)': Input should be a valid dictionary"),
        ({"instances": [EXAMPLE]}, "(features, kind)': Input should be a valid dictionary"),
        ({"instances": [{"features": EXAMPLE, "kind": 0}, EXAMPLE]}, "same names"),
        ({"instances": [{"features": EXAMPLE}]}, "kind': Field required"),
        ({"instances": [{"features": EXAMPLE, "kind": 0}] * 11}, "at most 10 items"),
    ],
)
def test_inputs_are_checked(two, serve, content, words):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        two[1].answer(json.dumps(content))
    assert words in serve.reason(caught.value)


def test_axes_of_open_size_must_not_be_ragged(tmp_path, serve):
    inputs = keras.Input((None, 2), name="steps")
    model = set_weights(keras.Model(inputs, dense(2)(keras.layers.GlobalMaxPooling1D()(inputs))))
    mc = ibnn.MonteCarlo(model, samples=2, seed=0, head="point")
    service = serve.Service(ibnn.export(mc, tmp_path / "model"), max_batch=4)
    for steps in (2, 3):
        body = {"inputs": [[[1.0, 2.0]] * steps] * 2}
        assert len(json.loads(service.answer(json.dumps(body)).body)["outputs"]["mean"]) == 2
    with pytest.raises(ValueError, match="non-rectangular"):
        service.answer(json.dumps({"inputs": [[[1, 2]], [[1, 2], [3, 4]]]}))


def test_what_is_not_finite_is_never_sent(two, serve):
    big = {"inputs": {"features": [[[3e38] * 3] * 2], "kind": [0]}}
    with pytest.raises(serve.HTTPException, match="not finite") as caught:
        two[1].answer(json.dumps(big))
    assert caught.value.status_code == 500


# -------------------------------------------------------------------------------------- the folder


def manifest(folder):
    return folder / "assets.extra" / "tfp_ibnn.json"


def rewrite(change):
    def spoil(folder):
        content = json.loads(manifest(folder).read_text())
        change(content)
        manifest(folder).write_text(json.dumps(content))

    return spoil


def add(name):
    return rewrite(lambda content: content["sha256"].update({name: "0" * 64}))


def link(folder):
    target = folder.parent / f"{folder.name}.pb"
    (folder / "saved_model.pb").rename(target)
    (folder / "saved_model.pb").symlink_to(target)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: manifest(f).unlink(), "No such file"),
        (lambda f: manifest(f).write_text('{"sha'), "Invalid JSON"),
        (lambda f: manifest(f).write_text("[" * 10**5), "Invalid JSON"),
        (lambda f: manifest(f).write_bytes(b"\xff"), "Invalid JSON"),
        (
            lambda f: (f / "assets.extra" / "tfp_ibnn.json").write_text("[]"),
            "tfp_ibnn.json': Input should",
        ),
        (
            rewrite(lambda content: content.update(format=2)),
            "format': Input should be 1",
        ),
        (rewrite(lambda content: content["sha256"].pop("saved_model.pb")), "'saved_model.pb'"),
        (
            lambda f: (f / "variables" / "variables.index").unlink(),
            "variables.index' is missing",
        ),
        (
            lambda f: (f / "saved_model.pb").write_bytes(b"x"),
            "saved_model.pb' is missing, changed",
        ),
        (lambda f: (f / "more.txt").write_text("x"), "'more.txt'"),
        (add("../secret"), "'../secret' is missing"),
        (add("variables/../../secret"), "secret' is missing"),
        (add("/etc/hostname"), "'/etc/hostname' is missing"),
        (add("variables\\..\\secret"), "secret' is missing"),
        (add("./saved_model.pb"), "'./saved_model.pb' is missing"),
        (add(""), "'' is missing"),
        (link, "saved_model.pb' is a link"),
    ],
)
def test_a_folder_that_has_changed_is_refused(folder, serve, tmp_path, spoil, words):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    serve.verify(copy)
    spoil(copy)
    with pytest.raises((ValueError, OSError)) as caught:
        serve.Service(copy, max_batch=1)
    assert words in serve.reason(caught.value)


def test_command_line(folder, serve, tmp_path):
    taken = socket.create_server(("127.0.0.1", 0))
    for arguments, words in (
        ([tmp_path / "none"], "error: .*No such file.*none/assets.extra"),
        ([folder, "--port=70000"], "error: .*Options.port': .*less than or equal to 65535"),
        ([folder, f"--port={taken.getsockname()[1]}"], "Address already in use"),
        ([folder, "--threads=0"], "Options.threads'"),
        ([folder, "--max-body-mb=nan"], "Options.max_body_mb'"),
        ([folder, "--name=a/b"], "Options.name'"),
        ([folder, "--timeout=0"], "Options.timeout'"),
    ):
        with pytest.raises(SystemExit, match=words):
            serve.main([str(argument) for argument in arguments])
    taken.close()


def test_a_missing_package_is_named_with_the_line_that_installs_it():
    # A stand-in for TensorFlow, which takes long to import.
    block = "import sys; sys.modules.update(tensorflow=sys, uvicorn=None); import serve"
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('Run: pip install "tfp_ibnn[serve]"')


@pytest.mark.slow
def test_sets_and_scores_of_decisions(eagerly, tmp_path, serve):
    x, y = data(60, 4), np.arange(60) % 3
    inputs = keras.Input((4,), name="features")
    model = set_weights(keras.Model(inputs, dense(3, "softmax")(inputs)))
    sets = ibnn.Conformal(model, coverage=0.5).fit(x, y)
    detector = ibnn.OODDetector(model, "knn", k=3).fit(x)
    body = json.dumps({"instances": x[:5].tolist()})
    for name, made, known in (
        ("set", sets, sets.predict(x[:5])),
        ("score", detector, detector.score(x[:5])),
    ):
        service = serve.Service(ibnn.export(made, tmp_path / name), max_batch=10)
        rows = json.loads(service.answer(body).body)["predictions"]
        np.testing.assert_allclose([row[name] for row in rows], known, rtol=1e-6)
        assert rows[0].keys() >= {"mean", "epistemic"}
    assert not sets.predict(x[:5]).all()

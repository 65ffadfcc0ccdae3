"""scripts/serve.py: under load, under attack, full, and at its end."""

import http.client
import importlib
import json
import random
import shutil
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, data, dense, set_weights

if JAX:
    pytest.skip("TensorFlow serves SavedModels", allow_module_level=True)
pytest.importorskip("aiohttp")

import tensorflow as tf

SCRIPTS = Path(__file__).parents[1] / "scripts"
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
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("serve"), importlib.import_module("serve_load")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def serve(scripts):
    return scripts[0]


@pytest.fixture(scope="module")
def tools(scripts):
    return scripts[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network of one input."""
    inputs = keras.Input((4,), name="features")
    hidden = dense(8, "tanh")(inputs)
    model = set_weights(keras.Model(inputs, dense(3, "softmax")(hidden)))
    path = tmp_path_factory.mktemp("served") / "7"
    return ibnn.export(ibnn.MonteCarlo(model, samples=8, seed=0), path)


@pytest.fixture(scope="module")
def bank(folder, tools):
    signatures = tf.saved_model.load(str(folder)).signatures
    x = data(64, 4)

    def ask(name, **more):
        outputs = signatures[name](features=tf.constant(x), **more)
        return {key: value.numpy() for key, value in outputs.items()}

    answers = {("serve", None): ask("serve"), ("deterministic", None): ask("deterministic")}
    for seed in (0, 5, 10**9):
        answers["sample", seed] = ask("sample", seed=tf.constant(seed))
    return tools.Bank({"features": x}, answers)


@pytest.fixture(scope="module")
def running(folder, tools):
    with tools.Running(folder, *LIMITS, before=ALONE) as server:
        yield server


def still_right(running, bank):
    client, rng = running.client(), random.Random(1)
    for _ in range(10):
        body, right = bank.question(rng)
        status, content = client.predict(body)
        assert (status, bank.fault(content, right)) == (200, None)
    client.close()


# --------------------------------------------------------------------------------------- requests


def test_every_answer_is_right_under_load_and_attack(running, bank, tools):
    attacks = tools.hostile(bank)
    report = tools.load(running, bank, 1000, threads=8, attacks=attacks, attack_share=0.1)
    assert (report.wrong, report.lost) == ([], [])
    assert report.right == report.sent == 1000
    assert sum(report.hostile.values()) > 50


def test_every_attack_is_refused_in_words(running, bank, tools):
    attacks = tools.hostile(bank)
    faults = {name: attack(running) for name, attack in attacks.items()}
    assert {name: fault for name, fault in faults.items() if fault} == {}
    still_right(running, bank)
    assert "Traceback" not in running.errors()


def test_status_and_metadata(running):
    client = running.client()
    status, content = client.request("GET", "")
    (version,) = content["model_version_status"]
    assert (status, version["version"], version["state"]) == (200, "7", "AVAILABLE")
    assert client.request("GET", "/versions/7") == (200, content)
    assert client.request("GET", "/versions/8")[0] == 404
    assert client.request("POST", "", b"{}")[0] == 405
    status, content = client.request("GET", "/metadata")
    assert status == 200
    assert content["model_spec"] == {"name": "model", "signature_name": "", "version": "7"}
    signatures = content["metadata"]["signature_def"]["signature_def"]
    assert signatures.keys() == {"serving_default", "serve", "sample", "deterministic"}
    features = signatures["serve"]["inputs"]["features"]
    assert features["dtype"] == "DT_FLOAT"
    assert [axis["size"] for axis in features["tensor_shape"]["dim"]] == ["-1", "4"]
    assert signatures["sample"]["inputs"].keys() == {"features", "seed"}
    client.close()


def test_a_message_tells_what_was_expected(running):
    client = running.client()
    for body, words in (
        ({"instances": [[1, 2, 3]]}, "'features' must have shape (any, 4); got (1, 3)"),
        ({"instances": [[1, 2, 3, 4], [1, 2, 3]]}, "'features' is ragged"),
        ({"instances": [[1, 2, 3, "4"]]}, "'features' must hold numbers; got '4'"),
        ({"instances": [[0.0] * 4] * 1025}, "1025 examples are more than 1024"),
        (
            {"inputs": {"features": [[0] * 4], "x": 0}},
            "must have 'features'; got ['features', 'x']",
        ),
        ({"signature_name": "sample", "instances": []}, 'write {"inputs": {"features": [...]'),
        ({"signature_name": "sample", "inputs": [[0] * 4]}, '"seed": 0'),
    ):
        status, content = client.predict(body)
        assert status == 400
        assert words in content["error"]
    client.close()


def finish(connection):
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response, json.loads(response.read())


def test_a_full_server_says_so_and_loses_nothing(running, bank):
    body, right = bank.question(random.Random(0))
    message = json.dumps(body).encode()
    held = [running.socket() for _ in range(ROOM)]
    for connection in held:
        connection.sendall(running.head(len(message)) + message[:10])
    until = time.monotonic() + TIMEOUT
    status = 200
    while status == 200 and time.monotonic() < until:  # until all of them have come in
        client = running.client()
        status, content = client.predict(message)
    assert status == 503
    assert "later" in content["error"]
    for connection in held:
        connection.sendall(message[10:])
    for connection in held:
        response, content = finish(connection)
        assert (response.status, bank.fault(content, right)) == (200, None), content
        connection.close()
    status, content = client.predict(message)  # on the connection that was refused
    assert (status, bank.fault(content, right)) == (200, None)
    client.close()


def test_slow_clients_are_left(running, bank):
    begin = time.monotonic()
    slow_head, slow_body, silent = (running.socket() for _ in range(3))
    slow_head.sendall(running.head(10)[:30])
    slow_body.sendall(running.head(10) + b"{")
    response, content = finish(slow_body)
    assert response.status == 408
    assert "4 s" in content["error"]
    for connection in (slow_head, silent):
        assert connection.recv(100) == b""
        connection.close()
    slow_body.close()
    assert TIMEOUT <= time.monotonic() - begin < 5 * TIMEOUT
    still_right(running, bank)


def test_a_client_that_waits_to_be_asked_for_its_body(running, bank):
    body, right = bank.question(random.Random(3))
    message = json.dumps(body).encode()
    with running.socket() as connection:
        expect = b"Host: x\r\nExpect: 100-continue"
        connection.sendall(running.head(len(message)).replace(b"Host: x", expect))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(message)
        response, content = finish(connection)
    assert (response.status, bank.fault(content, right)) == (200, None)


def test_its_end_under_load(folder, bank, tools):
    """After SIGTERM all that were connected get an answer, and the process ends well."""
    body, right = bank.question(random.Random(2))
    message = json.dumps(body).encode()
    with tools.Running(folder, *LIMITS, "--timeout", "60", before=ALONE) as running:
        held = running.socket()
        held.sendall(running.head(len(message)) + message[:10])
        report = tools.Report()
        options = {"requests": 10**6, "report": report}
        work = threading.Thread(target=tools.load, args=(running, bank), kwargs=options)
        work.start()
        while report.right < 100 and work.is_alive():
            time.sleep(0.02)
        running.terminate()
        work.join(timeout=60)
        assert not work.is_alive()
        assert (report.wrong, report.lost) == ([], [])
        assert report.right == report.sent
        with pytest.raises(ConnectionRefusedError):
            running.socket()
        held.sendall(message[10:])
        response, content = finish(held)
        assert (response.status, bank.fault(content, right)) == (200, None)
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
    answer = json.loads(service.answer(json.dumps({"instances": rows}).encode()))
    np.testing.assert_allclose([row["mean"] for row in answer["predictions"]], expected, rtol=1e-5)
    columns = {"features": x.tolist(), "kind": kind.tolist()}
    answer = json.loads(service.answer(json.dumps({"inputs": columns}).encode()))
    np.testing.assert_allclose(answer["outputs"]["mean"], expected, rtol=1e-5)
    assert service.version == "1"


EXAMPLE = [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"inputs": {"features": [EXAMPLE], "kind": [1.0]}}, "'kind' must hold whole numbers"),
        ({"inputs": {"features": [EXAMPLE], "kind": [True]}}, "'kind' must hold whole numbers"),
        ({"inputs": {"features": [EXAMPLE], "kind": [2**31]}}, "beyond the range of int32"),
        ({"inputs": {"features": [EXAMPLE], "kind": [-(2**80)]}}, "beyond the range of int32"),
        ({"inputs": {"features": [EXAMPLE], "kind": [0, 1]}}, "one batch size"),
        ({"inputs": {"features": [EXAMPLE], "kind": [99]}}, "TensorFlow refuses"),
        ({"inputs": {"features": [EXAMPLE[:1]], "kind": [0]}}, "(any, 2, 3); got (1, 1, 3)"),
        ({"inputs": {"features": [[[1, 2, 3], [4, 5]]], "kind": [0]}}, "ragged"),
        ({"inputs": {"features": [[[1, 2, 3], 4]], "kind": [0]}}, "must have shape"),
        ({"inputs": {"features": [EXAMPLE]}}, "must have 'features', 'kind'"),
        ({"inputs": [EXAMPLE]}, "must be an object"),
        ({"instances": [EXAMPLE]}, "must be an object with 'features', 'kind'"),
        ({"instances": [{"features": EXAMPLE, "kind": 0}, EXAMPLE]}, "must be an object"),
        ({"instances": [{"features": EXAMPLE}]}, "must be an object"),
        ({"instances": {"features": [EXAMPLE]}}, "must be a list"),
        ({"instances": [{"features": EXAMPLE, "kind": 0}] * 11}, "11 examples are more than 10"),
    ],
)
def test_inputs_are_checked(two, serve, content, words):
    with pytest.raises(serve.Refusal) as caught:
        two[1].answer(json.dumps(content).encode())
    assert caught.value.status == 400
    assert words in str(caught.value)


def test_what_is_not_finite_is_never_sent(two, serve):
    big = {"inputs": {"features": [[[3e38] * 3] * 2], "kind": [0]}}
    with pytest.raises(serve.Refusal, match="not finite") as caught:
        two[1].answer(json.dumps(big).encode())
    assert caught.value.status == 500


# -------------------------------------------------------------------------------------- the folder


def rewrite(change):
    def spoil(folder):
        path = folder / "assets.extra" / "tfp_ibnn.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

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
        (lambda f: (f / "assets.extra" / "tfp_ibnn.json").unlink(), "is missing"),
        (lambda f: (f / "assets.extra" / "tfp_ibnn.json").write_text('{"sha'), "is damaged"),
        (lambda f: (f / "assets.extra" / "tfp_ibnn.json").write_text("[" * 10**5), "is damaged"),
        (lambda f: (f / "assets.extra" / "tfp_ibnn.json").write_bytes(b"\xff"), "is damaged"),
        (lambda f: (f / "assets.extra" / "tfp_ibnn.json").write_text("[]"), "no manifest"),
        (rewrite(lambda content: content.update(format=2)), "no manifest of format 1"),
        (rewrite(lambda content: content["sha256"].pop("saved_model.pb")), "no manifest"),
        (lambda f: (f / "variables" / "variables.index").unlink(), "variables.index is missing"),
        (lambda f: (f / "saved_model.pb").write_bytes(b"x"), "saved_model.pb has changed"),
        (lambda f: (f / "more.txt").write_text("x"), "more.txt is not in the manifest"),
        (add("../secret"), "'../secret', which is not inside"),
        (add("variables/../../secret"), "not inside"),
        (add("/etc/hostname"), "'/etc/hostname', which is not inside"),
        (add("variables\\..\\secret"), "not inside"),
        (add("./saved_model.pb"), "not inside"),
        (add(""), "not inside"),
        (link, "link out of the folder"),
    ],
)
def test_a_folder_that_has_changed_is_refused(folder, serve, tmp_path, spoil, words):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    serve.verify(copy)
    spoil(copy)
    with pytest.raises(serve.FolderError) as caught:
        serve.Service(copy, max_batch=1)
    assert words in str(caught.value)


def test_command_line(folder, serve, running, tmp_path, capsys):
    assert serve.main([str(tmp_path / "none")]) == 1
    assert serve.main([str(folder), "--port", str(running.port)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in errors if "error" in line] == ["error", "error"]
    for option in ("--port=70000", "--threads=0", "--max-body-mb=nan", "--name=a/b", "--timeout=0"):
        with pytest.raises(SystemExit) as caught:
            serve.main([str(folder), option])
        assert caught.value.code == 2
        assert option.split("=")[0] in capsys.readouterr().err.splitlines()[-1]

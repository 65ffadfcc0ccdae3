"""Start scripts/serve.py, put it under load and check every answer; for tests and measurements.

It takes no TensorFlow: who uses it brings the right answers along, as a `Bank`.
"""

import contextlib
import dataclasses
import http.client
import json
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

__all__ = ["Bank", "Client", "Report", "Running", "hostile", "load"]

SCRIPT = Path(__file__).with_name("serve.py")
RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Running:
    """A server in a process of its own, as a context: it is ended at the end.

    Args:
        folder: an exported model.
        *arguments: of scripts/serve.py.
        before: Python code for its process to begin with.
        seconds: how long it may take to be ready.
    """

    def __init__(self, folder, *arguments, before="", seconds=120.0):
        self.log = tempfile.TemporaryFile("a+b")
        code = f"{before}\n{RUN}"
        command = [sys.executable, "-c", code, SCRIPT, folder, "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        self.line = self.process.stdout.readline() if ready else ""
        if not self.line.startswith("Serving "):
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"The server is not ready: {self.errors()}")
        address = self.line.split("http://127.0.0.1:")[1]
        self.port = int(address.split("/")[0])
        self.name = address.strip().rsplit("/", 1)[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def terminate(self):
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def errors(self):
        """Return what it has logged so far."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def client(self, seconds=60.0):
        """Return a client of it."""
        return Client(self.port, self.name, seconds)

    def socket(self, seconds=60.0):
        """Return a plain connection to it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def head(self, length=None, chunked=False):
        """Return the head of a predict request, as bytes."""
        size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}"
        return f"POST /v1/models/{self.name}:predict HTTP/1.1\r\nHost: x\r\n{size}\r\n\r\n".encode()


class Client:
    """A keep-alive connection.

    Args:
        port: of the server on this machine.
        name: of the model.
        seconds: how long an answer may take.
    """

    def __init__(self, port, name="model", seconds=60.0):
        self._path = f"/v1/models/{name}"
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
        self.is_last = False
        """Whether the server has said that it closes the connection."""

    def predict(self, body):
        """Return status and content of the answer to a body, bytes or what becomes JSON."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", ":predict", body)

    def request(self, method, suffix, body=None):
        """Return status and content of an answer."""
        self._connection.request(method, self._path + suffix, body)
        response = self._connection.getresponse()
        self.is_last = response.will_close
        return response.status, json.loads(response.read())

    def close(self):
        """Close the connection."""
        self._connection.close()


class Bank:
    """Examples with their right answers, from which requests are made at random.

    Args:
        inputs: arrays by name.
        answers: for each signature and seed (None where there is none), the outputs by name.
        most: examples in one request.
    """

    def __init__(self, inputs, answers, most=16):
        self.inputs, self.answers, self.most = inputs, answers, most
        self._kinds = list(answers)

    def question(self, rng):
        """Return the body of a request, and the outputs that are right, by name.

        Args:
            rng: a `random.Random`.
        """
        signature, seed = kind = rng.choice(self._kinds)
        total = len(next(iter(self.inputs.values())))
        rows = [rng.randrange(total) for _ in range(rng.randint(1, self.most))]
        columns = {name: array[rows].tolist() for name, array in self.inputs.items()}
        right = {name: array[rows] for name, array in self.answers[kind].items()}
        body = {"signature_name": signature}
        if signature == "serve" and rng.random() < 0.5:
            del body["signature_name"]
        if seed is not None:
            body["inputs"] = {**columns, "seed": seed}
        elif rng.random() < 0.5:
            body["inputs"] = columns
        elif len(columns) == 1 and rng.random() < 0.5:
            (body["instances"],) = columns.values()
        else:
            names = list(columns)
            body["instances"] = [
                dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
        return body, right

    @staticmethod
    def fault(content, right, tolerance=1e-5):
        """Return what is wrong with an answer, or None."""
        outputs = content.get("outputs")
        if outputs is None and "predictions" in content:
            rows = content["predictions"]
            outputs = {name: [row[name] for row in rows] for name in rows[0]}
        if outputs is None or outputs.keys() != right.keys():
            return f"outputs {sorted(outputs or content)}"
        for name, expected in right.items():
            found = np.asarray(outputs[name])
            if found.shape != expected.shape:
                return f"{name} of shape {found.shape}, not {expected.shape}"
            if not np.allclose(found, expected, rtol=tolerance, atol=tolerance):
                return f"{name} wrong by {np.abs(found - expected).max():.2g}"
        return None


@dataclasses.dataclass
class Report:
    """What came of a load.

    Attributes:
        sent: requests.
        right: those with status 200 and the right content.
        wrong: what was wrong with others that have an answer.
        lost: what befell those without one.
        hostile: statuses of the hostile requests in between.
        seconds: all of it took.
    """

    sent: int = 0
    right: int = 0
    wrong: list = dataclasses.field(default_factory=list)
    lost: list = dataclasses.field(default_factory=list)
    hostile: Counter = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0


def load(running, bank, requests, threads=8, attacks=None, attack_share=0.0, seed=0, report=None):
    """Send requests from several threads, each with one connection, and check every answer.

    A thread ends early where the server says that it closes the connection.

    Args:
        running: the server.
        bank: of questions.
        requests: in all, hostile ones not counted.
        threads: clients at once.
        attacks: hostile requests, those of `hostile`, to send in between.
        attack_share: how many of them there are for each request.
        seed: of the questions.
        report: a `Report` to fill in, for those who want to look at it meanwhile.
    """
    report, lock = report or Report(), threading.Lock()
    attacks = list((attacks or {}).items())

    def work(number):
        rng = random.Random(f"{seed}-{number}")
        client = running.client()
        for _ in range(requests // threads + (number < requests % threads)):
            if attacks and rng.random() < attack_share:
                name, attack = rng.choice(attacks)
                fault = attack(running)
                with lock:
                    report.hostile[name] += 1
                    if fault:
                        report.wrong.append(f"{name}: {fault}")
            body, right = bank.question(rng)
            with lock:
                report.sent += 1
            try:
                status, content = client.predict(body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                with lock:
                    report.lost.append(repr(error))
                break
            fault = bank.fault(content, right) if status == 200 else f"status {status}: {content}"
            with lock:
                report.right += fault is None
                if fault:
                    report.wrong.append(fault)
            if client.is_last:
                break
        client.close()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    begin = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    report.seconds = time.monotonic() - begin
    return report


def hostile(bank, max_body=2**20):
    """Return hostile requests by name: each, sent to a server, returns a fault or None.

    Args:
        bank: of right questions.
        max_body: the server's limit, in bytes.
    """
    columns = {name: array[:1].tolist() for name, array in bank.inputs.items()}
    name, rows = next(iter(columns.items()))

    def body(**changed):
        return json.dumps({"inputs": {**columns, **changed}}).encode()

    right = body()
    text = json.dumps(rows)
    bodies = {
        "nan": right.replace(text.encode(), b"[[NaN]]"),
        "infinity": right.replace(text.encode(), b"[[-Infinity]]"),
        "overflow": body(**{name: fill(rows, 0)}).replace(b"0", b"1e999"),
        "float32 overflow": body(**{name: fill(rows, 0)}).replace(b"0", b"1e39"),
        "huge integer": body(**{name: fill(rows, 0)}).replace(b"0", b"9" * 400),
        "too many digits": body(**{name: fill(rows, 0)}).replace(b"0", b"9" * 5000),
        "string": body(**{name: fill(rows, "1")}),
        "bool": body(**{name: fill(rows, True)}),
        "null": body(**{name: fill(rows, None)}),
        "ragged": body(**{name: [*rows, []]}),
        "too deep by one": body(**{name: [rows]}),
        "scalar": body(**{name: 1.0}),
        "empty batch": body(**{name: []}),
        "empty rows": b'{"instances": []}',
        "unknown input": body(other=[[1.0]]),
        "unknown key": b'{"instances": [[1]], "x": 1}',
        "unknown signature": b'{"signature_name": "no", "instances": [[1]]}',
        "signature of a wrong type": b'{"signature_name": [], "instances": [[1]]}',
        "seed in rows": b'{"signature_name": "sample", "instances": [[1]]}',
        "both formats": b'{"instances": [], "inputs": []}',
        "twice": b'{"inputs": [], "inputs": []}',
        "no object": b"[]",
        "nothing": b"",
        "half": right[: len(right) // 2],
        "deep": b'{"inputs": ' + b"[" * 100_000,
        "deep objects": b'{"inputs":' * 50_000,
        "just not too deep": b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}",
        "not UTF-8": b'{"inputs": "\xff\xfe"}',
        "UTF-16": right.decode().encode("utf-16"),
        "lone surrogate": b'{"signature_name": "\\ud800\\n", "instances": [[1]]}',
    }
    attacks = {key: refused(content, 400) for key, content in bodies.items()}
    attacks["too long"] = refused(b" " * (max_body + 1), 413)
    attacks["too long, chunked"] = raw(
        lambda running: (
            running.head(chunked=True)
            + (b"10000\r\n" + b" " * 65536 + b"\r\n") * (max_body // 65536 + 1)
        ),
        413,
    )
    attacks["bad length"] = raw(lambda running: running.head("12a") + b"{}", 400)
    attacks["negative length"] = raw(lambda running: running.head(-1) + b"{}", 400)
    attacks["bad chunk"] = raw(lambda running: running.head(chunked=True) + b"zz\r\n{}", 400)
    attacks["not HTTP"] = raw(lambda running: b"\x16\x03\x01\x02\x00\r\n\r\n", 400)
    attacks["compressed"] = raw(
        lambda running: (
            running.head(2).replace(b"Host: x", b"Host: x\r\nContent-Encoding: gzip") + b"{}"
        ),
        415,
    )
    attacks["long line"] = raw(lambda running: b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 400)
    attacks["other model"] = raw(
        lambda running: b"GET /v1/models/no HTTP/1.1\r\nHost: x\r\n\r\n", 404
    )
    attacks["path trick"] = raw(
        lambda running: b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404
    )
    attacks["method"] = raw(lambda running: running.head(0).replace(b"POST", b"DELETE"), 405)
    attacks["gone in the middle"] = left(lambda running: running.head(10**5) + b'{"inputs": ')
    attacks["gone before the answer"] = left(lambda running: running.head(len(right)) + right)
    return attacks


def fill(nested, value):
    """Return nested lists with every entry replaced."""
    return [fill(part, value) for part in nested] if isinstance(nested, list) else value


def refused(body, status):
    """Return a request whose body must be refused, in words, without harm to the connection."""

    def attack(running):
        with contextlib.closing(running.client()) as client:
            try:
                return judged(*client.predict(body), status)
            except (ConnectionResetError, BrokenPipeError):
                # The server need not take all of a body that is too long.
                return None if status == 413 else "connection reset"

    return attack


def raw(message, status):
    """Return bytes to send on a connection of their own, which must be refused, in words."""

    def attack(running):
        with running.socket() as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(message(running))
            response = http.client.HTTPResponse(connection)
            try:
                response.begin()
                return judged(response.status, json.loads(response.read()), status)
            except (ConnectionResetError, http.client.BadStatusLine):
                return None if status == 413 else "no answer"

    return attack


def left(message):
    """Return bytes after which the client goes away."""

    def attack(running):
        with running.socket() as connection:
            connection.sendall(message(running))
        return None

    return attack


def judged(status, content, expected):
    """Return what is wrong with the answer to a hostile request, or None."""
    if status != expected:
        return f"status {status}, not {expected}: {content}"
    if content.keys() != {"error"} or not content["error"]:
        return f"no error in words: {content}"
    return None

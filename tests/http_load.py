"""Start scripts/serve.py, put it under load, and check every answer."""

import dataclasses
import http.client
import json
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parents[1] / "scripts" / "serve.py"
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


class Running:
    """A server in its own process. `before` is Python code that runs first."""

    def __init__(self, folder, *arguments, before=""):
        self.log = tempfile.TemporaryFile("a+b")
        command = [sys.executable, "-c", f"{before}\n{RUN}", SCRIPT, folder, "--port=0", *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen([str(part) for part in command], **options)
        ready, _, _ = select.select([self.process.stdout], [], [], 120)
        line = self.process.stdout.readline() if ready else ""
        if not line.startswith("Serving "):
            self.process.kill()
            raise RuntimeError(f"The server is not ready: {self.errors()}")
        address, self.path = line.strip().split("http://")[1].split("/", 1)
        self.port = int(address.rsplit(":", 1)[1])

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def errors(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def client(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def socket(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def head(self, size):
        """Return the head of a predict request, as bytes; `size` is a header."""
        return f"POST /{self.path}:predict HTTP/1.1\r\nHost: x\r\n{size}\r\n\r\n".encode()

    def ask(self, client, body, suffix=":predict", method="POST"):
        """Return status and content of the answer to a body, bytes or what becomes JSON."""
        body = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        client.request(method, f"/{self.path}{suffix}", body)
        return content(client.getresponse())


def finish(connection):
    """Return status and content of the answer that comes on a plain connection."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return content(response)


def content(response):
    text, kind = response.read().decode(), response.headers["Content-Type"]
    return response.status, json.loads(text) if kind == "application/json" else text


class Bank:
    """Examples for the input `features` of an exported folder, with their right answers."""

    def __init__(self, folder, features):
        import tensorflow as tf

        self.features, self._answers = features, {}
        signatures = tf.saved_model.load(str(folder)).signatures
        for name, seed in (("serve", {}), ("deterministic", {}), ("sample", {"seed": 10**9})):
            given = {key: tf.constant(value) for key, value in seed.items()}
            outputs = signatures[name](features=tf.constant(features), **given)
            self._answers[name] = seed, {key: value.numpy() for key, value in outputs.items()}

    def question(self, rng):
        """Return the body of a request, and the outputs that are right."""
        name, (seed, outputs) = rng.choice(list(self._answers.items()))
        rows = [rng.randrange(len(self.features)) for _ in range(rng.randint(1, 16))]
        given = self.features[rows].tolist()
        forms = [{"inputs": {"features": given, **seed}}]
        if not seed:
            objects = [{"features": row} for row in given]
            forms += [{"inputs": given}, {"instances": given}, {"instances": objects}]
        right = {key: array[rows] for key, array in outputs.items()}
        return {"signature_name": name, **rng.choice(forms)}, right

    @staticmethod
    def fault(answer, right):
        """Return what is wrong with an answer, or None."""
        status, found = answer
        if status != 200:
            return f"status {status}: {found}"
        rows = found.get("predictions")
        found = {x: [row[x] for row in rows] for x in rows[0]} if rows else found["outputs"]
        for name in found.keys() | right.keys():
            a, b = np.asarray(found.get(name, [])), right.get(name, np.empty(0))
            if a.shape != b.shape or not np.allclose(a, b, 1e-5, 1e-5):
                return f"{name} is {a}, not {b}"


@dataclasses.dataclass
class Report:
    """What came of a load: right answers, hostile requests, and all faults."""

    right: int = 0
    hostile: int = 0
    faults: list = dataclasses.field(default_factory=list)


def load(running, bank, requests, attacks=None, seed=0, report=None):
    """Send requests by eight clients and check every answer; a tenth as many attacks in between."""
    report, lock = report or Report(), threading.Lock()

    def work(number):
        rng, client = random.Random(f"{seed}-{number}"), running.client()
        for _ in range(requests // 8):
            name = rng.choice(list(attacks)) if attacks and rng.random() < 0.1 else None
            faults = [(name, attacks[name](running))] if name else []
            body, right = bank.question(rng)
            try:
                fault = bank.fault(running.ask(client, body), right)
            except (OSError, http.client.HTTPException) as error:
                fault = f"lost: {error!r}"
                client.close()
            with lock:
                report.right += fault is None
                report.hostile += name is not None
                report.faults += [x for x in (*faults, ("good", fault)) if x[1]]
            if client.sock is None:  # lost, or the server has said that it closes it
                break
        client.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    return report

"""Requests that scripts/serve.py must refuse with an error in words, or survive."""

import contextlib
import gzip
import http.client
import json

from tests.http_load import finish

ENTRIES = ("NaN", "-Infinity", "1e999", "1e39", "9" * 400, "8" * 5000, '"1"', "true", "null", "{}")
BODIES = {
    "empty rows": b'{"instances": []}',
    "unknown key": b'{"instances": [[1]], "x": 1}',
    "unknown signature": b'{"signature_name": "no", "instances": [[1]]}',
    "signature of a wrong type": b'{"signature_name": [], "instances": [[1]]}',
    "seed in rows": b'{"signature_name": "sample", "instances": [[1]]}',
    "both formats": b'{"instances": [], "inputs": []}',
    "no object": b"[]",
    "nothing": b"",
    "half": b'{"inputs": [[1, 2',
    "deep": b'{"inputs": ' + b"[" * 100_000,
    "deep objects": b'{"inputs":' * 50_000,
    "not too deep for Python": b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}",
    "long name": b'{"' + b"x" * 10**5 + b'": 1}',
    "not UTF-8": b'{"inputs": "\xff\xfe"}',
    "UTF-16": '{"inputs": []}'.encode("utf-16"),
    "lone surrogate": b'{"signature_name": "\\ud800\\n", "instances": [[1]]}',
    "compressed": gzip.compress(b'{"inputs": []}'),
}


def hostile(bank, max_body=2**20):
    """Return attacks by name: each is a function of a `Running` that returns a fault or None."""
    rows = bank.features[:1].tolist()
    values = {entry[:9]: json.dumps(fill(rows, 0)).replace("0", entry) for entry in ENTRIES}
    values |= {"ragged": [*rows, []], "too deep by one": [rows], "scalar": 1.0, "empty batch": []}
    bodies = BODIES | {key: f'{{"inputs": {x}}}'.encode() for key, x in values.items()}
    bodies["unknown input"] = json.dumps({"inputs": {"features": rows, "other": 1}}).encode()
    whole = json.dumps({"inputs": rows}).encode()
    chunks = (b"10000\r\n" + b" " * 65536 + b"\r\n") * (max_body // 65536 + 1)
    empty, chunked = "Content-Length: 0", "Transfer-Encoding: chunked"
    return {
        **{key: refused(content, 400) for key, content in bodies.items()},
        "too long": refused(b" " * (max_body + 1), 413),
        "too long, chunked": raw(lambda x: x.head(chunked) + chunks, 413),
        "bad length": raw(lambda x: x.head("Content-Length: 12a") + b"{}", 400),
        "negative length": raw(lambda x: x.head("Content-Length: -1") + b"{}", 400),
        "bad chunk": raw(lambda x: x.head(chunked) + b"zz\r\n{}", 400),
        "not HTTP": raw(lambda x: b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        "long line": raw(lambda x: b"GET /" + b"x" * 10**5 + b" HTTP/1.1\r\n\r\n", 400),
        "other model": raw(lambda x: x.head(empty).replace(b"models/", b"models/x"), 404),
        "path trick": raw(lambda x: x.head(empty).replace(b"models", b"../.."), 404),
        "method": raw(lambda x: x.head(empty).replace(b"POST", b"DELETE"), 405),
        "gone in the middle": left(lambda x: x.head("Content-Length: 99999") + b'{"inputs": '),
        "gone at once": left(lambda x: x.head(f"Content-Length: {len(whole)}") + whole),
    }


def fill(nested, value):
    """Return nested lists with every entry replaced."""
    return [fill(part, value) for part in nested] if isinstance(nested, list) else value


def refused(body, status):
    """Return a request whose body must be refused, in words, without harm to the connection."""

    def attack(running):
        with contextlib.closing(running.client()) as client:
            try:
                return judged(running.ask(client, body), status)
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
            try:
                return judged(finish(connection), status)
            except (ConnectionResetError, http.client.BadStatusLine):
                return None if status == 413 else "no answer"

    return attack


def left(message):
    """Return bytes after which the client goes away."""

    def attack(running):
        with running.socket() as connection:
            connection.sendall(message(running))

    return attack


def judged(answer, expected):
    """Return what is wrong with the answer to a hostile request, or None."""
    status, content = answer
    if status != expected:
        return f"status {status}, not {expected}: {content}"
    # uvicorn itself answers what is not HTTP, and in plain text.
    error = content if isinstance(content, str) else content.get("error")
    return None if error and len(error) < 500 else f"no short error in words: {content}"

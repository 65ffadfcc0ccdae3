r"""Serve an exported model over HTTP, in the shape of TensorFlow Serving's REST API.

The folder is one that `ibnn.export` or scripts/export.py wrote. Its files must be those that its
manifest names, by their SHA-256: that finds damage, not a forger, who would change the manifest as
well. It takes TensorFlow and aiohttp; neither this library nor Keras need be installed.

    GET  /v1/models/NAME             whether the model is there
    GET  /v1/models/NAME/metadata    its signatures
    POST /v1/models/NAME:predict     {"instances": [...]} gives {"predictions": [...]}, by rows;
                                     {"inputs": ...} gives {"outputs": ...}, by columns

A body may name a signature as "signature_name": serve (the default), sample or deterministic. What
is wrong with a request is answered as {"error": "..."}, and nothing that is not finite goes in or
out. After SIGTERM or Ctrl-C the requests that have come in are still answered. There is no
encryption, and nobody is asked who they are: let other machines in only through a proxy that does
both.

Examples:
    python scripts/serve.py saved_model/1
    python scripts/serve.py saved_model/1 --port 0 --name digits --threads 4 --max-batch 256
    curl -d '{"instances": [[0.1, 0.2, 0.3]]}' http://127.0.0.1:8501/v1/models/model:predict
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import reprlib
import signal
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
from aiohttp import web

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

MANIFEST = "assets.extra/tfp_ibnn.json"
DEFAULT = "serving_default"
INTERNAL = "Internal error; the server's log tells more."
DRAIN_SECONDS = 1.0
"""How long, at the end, clients that stay connected may send one more request."""
FINISH_SECONDS = 60.0
"""How long, at the end, requests may take that have come in."""


def main(argv=None):
    options = parse(argv)
    try:
        service = Service(Path(options.folder), options.max_batch)
    except (FolderError, OSError) as error:
        return fail(error, code=1)
    try:
        asyncio.run(serve(service, options))
    except OSError as error:  # the port is taken, or the host is not this one
        return fail(error, code=1)
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", help="an exported model")
    add("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    add("--port", type=between(0, 65535), default=8501, help="0 takes a free one (default 8501)")
    add("--name", type=model_name, default="model", help="of the model in the URL (default model)")
    add("--max-body-mb", type=positive, default=16.0, help="size of a request (default 16)")
    add("--max-batch", type=between(1), default=1024, help="examples in one (default 1024)")
    add(
        "--max-waiting",
        type=between(0),
        default=64,
        help="requests that wait for a thread; more are answered with 503 (default 64)",
    )
    add("--threads", type=between(1), default=2, help="requests computed at once (default 2)")
    add(
        "--timeout",
        type=positive,
        default=30.0,
        help="seconds in which a request must come in or an answer be taken (default 30)",
    )
    return parser.parse_args(argv)


def between(least, most=None):
    def number(text):
        value = int(text)
        if value < least or (most is not None and value > most):
            limit = f"{least} or above" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{value} is not {limit}")
        return value

    return number


def positive(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def model_name(text):
    if not re.fullmatch(r"[\w.-]+", text, flags=re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not made of letters, digits, _, . and -")
    return text


def fail(error, code):
    print(f"error: {error}", file=sys.stderr)
    return code


# ------------------------------------------------------------------------------------- the folder


class FolderError(Exception):
    """A folder that is not what `ibnn.export` wrote."""


def verify(folder):
    """Raise if a folder does not hold exactly the files of its manifest."""
    manifest = folder / inside(folder, MANIFEST)
    if not manifest.is_file():
        raise FolderError(f"{manifest} is missing: this is no folder of ibnn.export.")
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{manifest} is damaged: {one_line(error)}") from None
    sums = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(sums, dict) or "saved_model.pb" not in sums or content.get("format") != 1:
        raise FolderError(f"{manifest} is no manifest of format 1 with the SHA-256 of each file.")
    for name, expected in sums.items():
        path = folder / inside(folder, name)
        if not path.is_file():
            raise FolderError(f"{path} is missing: export the model again.")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise FolderError(f"{path} has changed since the export: export the model again.")
    found = {x.relative_to(folder).as_posix() for x in folder.rglob("*") if not x.is_dir()}
    if extra := sorted(found - sums.keys() - {MANIFEST}):
        raise FolderError(f"{folder / extra[0]} is not in the manifest: remove it.")


def inside(folder, name):
    """Return a path of the manifest, or raise if it leads out of the folder."""
    path = PurePosixPath(name)
    plain = name == path.as_posix() and "\\" not in name and name.isprintable()
    if not plain or path.is_absolute() or ".." in path.parts or path.parts == ():
        raise FolderError(f"The manifest of {folder} names {shown(name)}, which is not inside it.")
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise FolderError(f"{folder / path} is a link out of the folder.")
    return path


# ------------------------------------------------------------------------------------ the requests


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status, message, headers=None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}


SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxdict, SHORT.maxlist, SHORT.maxstring, SHORT.maxother = 3, 4, 4, 60, 60


def shown(value):
    """Return what somebody sent as it may stand in a message: on one line, and not too long."""
    return SHORT.repr(value)


def one_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def reason(error):
    """Return what TensorFlow says, without where in its graph that was."""
    lines = [line.strip() for line in str(error).splitlines()]
    around = ("Graph execution error", "Detected at", "File ", "[[", "<", "Traceback", "node ")
    return next((x for x in lines if x and not x.startswith(around)), "no reason given")[:300]


def parsed(body):
    """Return the object that a body holds, or refuse it."""
    try:
        content = json.loads(
            body.decode("utf-8"), parse_constant=no_constant, object_pairs_hook=once_each
        )
    except UnicodeDecodeError as error:
        raise Refusal(400, f"The body is not UTF-8: {error.reason} at {error.start}.") from None
    except RecursionError:
        raise Refusal(400, "The body is nested too deep.") from None
    except ValueError as error:
        raise Refusal(400, f"The body is not JSON: {one_line(error)}.") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"The body must be an object, such as {EXAMPLE}; got {shown(content)}.")
    return content


EXAMPLE = '{"instances": [...]}'


def no_constant(name):
    raise Refusal(400, f"The body holds {name}, which is not JSON: all numbers must be finite.")


def once_each(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Refusal(400, f"The body gives {shown(twice)} twice in one object.")
    return found


class Input:
    """An input of a signature.

    Args:
        name: of the input.
        spec: its `tf.TensorSpec`.
    """

    def __init__(self, name, spec):
        self.name = name
        self.shape = tuple(spec.shape.as_list())
        self.dtype = np.dtype(spec.dtype.as_numpy_dtype)
        if self.dtype.kind not in "fiub":
            raise FolderError(
                f"Input {name!r} is of type {spec.dtype.name}: only numbers and booleans are taken."
            )
        self._types, self._entries = {
            "f": ({int, float}, "numbers"),
            "b": ({bool}, "booleans"),
        }.get(self.dtype.kind, ({int}, "whole numbers"))

    def array(self, value):
        """Return what a client sent as an array, or refuse it."""
        sizes = list(self.shape)
        if not sizes:
            self._check_types([value])
        else:
            self._measure(value, value, 0, sizes)
        if self.dtype.kind == "b":
            return np.asarray(value, self.dtype)
        try:
            exact = np.asarray(value, "float64" if self.dtype.kind == "f" else None)
        except OverflowError:
            exact = None
        if exact is None or not self._fits(exact):
            raise Refusal(
                400, f"Input {self.name!r} holds a number beyond the range of {self.dtype.name}."
            )
        return exact.astype(self.dtype)

    def _fits(self, exact):
        if self.dtype.kind == "f":
            with np.errstate(over="ignore"):
                return bool(np.isfinite(exact.astype(self.dtype)).all())
        limits = np.iinfo(self.dtype)
        return exact.dtype.kind in "iu" and limits.min <= exact.min() and exact.max() <= limits.max

    def _measure(self, part, whole, axis, sizes):
        """Check the lengths of nested lists, and set those sizes that are open."""
        if type(part) is not list:
            raise self._misshapen(whole)
        if not part:
            raise Refusal(400, f"Input {self.name!r} holds an empty list.")
        if sizes[axis] is None:
            sizes[axis] = len(part)
        if len(part) != sizes[axis]:
            if self.shape[axis] is None:
                raise Refusal(
                    400,
                    f"Input {self.name!r} is ragged: its lists on axis {axis} have {sizes[axis]} "
                    f"and {len(part)} entries.",
                )
            raise self._misshapen(whole, axis, len(part))
        if axis + 1 < len(sizes):
            for inner in part:
                self._measure(inner, whole, axis + 1, sizes)
        elif type(part[0]) is list:
            raise self._misshapen(whole)
        else:
            self._check_types(part)

    def _check_types(self, entries):
        if not set(map(type, entries)) <= self._types:
            wrong = next(entry for entry in entries if type(entry) not in self._types)
            raise Refusal(
                400, f"Input {self.name!r} must hold {self._entries}; got {shown(wrong)}."
            )

    def _misshapen(self, whole, axis=None, length=None):
        got = shape_of(whole)
        expected = f"({', '.join('any' if size is None else str(size) for size in self.shape)})"
        if axis is not None and len(got) > axis and got[axis] != length:
            # The first list of this axis is right, another one is not.
            return Refusal(
                400,
                f"Input {self.name!r} is ragged: on axis {axis} there is a list of {length} "
                f"entries; expected shape {expected}.",
            )
        return Refusal(400, f"Input {self.name!r} must have shape {expected}; got {got}.")


def shape_of(value):
    """Return the lengths of nested lists, judged by the first of each, to 16 axes at most."""
    sizes = []
    while type(value) is list and len(sizes) < 16:
        sizes.append(len(value))
        value = value[0] if value else None
    return tuple(sizes)


class Signature:
    """A signature of the model.

    Args:
        name: of the signature.
        function: the loaded function.
    """

    def __init__(self, name, function):
        self.name, self._function = name, function
        specs = function.structured_input_signature[1]
        self.inputs = {key: Input(key, specs[key]) for key in sorted(specs)}
        self._scalars = [key for key, given in self.inputs.items() if not given.shape]
        self._batched = [key for key, given in self.inputs.items() if given.shape]

    def from_rows(self, rows):
        """Return the inputs by columns of a list of examples."""
        if self._scalars:
            raise Refusal(
                400,
                f"Signature {self.name!r} takes {self._scalars[0]!r}, one value for the whole "
                f"batch, which 'instances' cannot give: write {self._columns()}.",
            )
        if type(rows) is not list:
            raise Refusal(400, f"'instances' must be a list of examples; got {shown(rows)}.")
        if not any(type(row) is dict for row in rows):
            if len(self._batched) > 1:
                raise Refusal(400, f"Each instance must be an object with {self._names()}.")
            return {self._batched[0]: rows}
        for row in rows:
            if type(row) is not dict or row.keys() != self.inputs.keys():
                raise Refusal(
                    400, f"Each instance must be an object with {self._names()}; got {shown(row)}."
                )
        return {key: [row[key] for row in rows] for key in self._batched}

    def from_columns(self, columns):
        """Return the inputs by columns of what the body calls inputs."""
        if type(columns) is not dict:
            if len(self.inputs) > 1:
                raise Refusal(400, f"'inputs' must be an object: write {self._columns()}.")
            return {self._batched[0]: columns}
        if columns.keys() != self.inputs.keys():
            raise Refusal(
                400,
                f"'inputs' of signature {self.name!r} must have {self._names()}; got "
                f"{shown(sorted(columns))}.",
            )
        return columns

    def run(self, columns, max_batch):
        """Return the outputs by name, as arrays."""
        for key in self._batched:
            batch = columns[key]
            if type(batch) is list and len(batch) > max_batch:
                raise Refusal(
                    400, f"{len(batch)} examples are more than {max_batch}: send several batches."
                )
        arrays = {key: self.inputs[key].array(value) for key, value in columns.items()}
        sizes = {key: len(arrays[key]) for key in self._batched}
        if len(set(sizes.values())) > 1:
            raise Refusal(400, f"The inputs must have one batch size; got {sizes}.")
        return self.compute(arrays)

    def compute(self, arrays):
        """Return the outputs of arrays that are right."""
        import tensorflow as tf

        tensors = {key: tf.constant(value) for key, value in arrays.items()}
        try:
            outputs = self._function(**tensors)
        except tf.errors.InvalidArgumentError as error:  # such as a word beyond the vocabulary
            raise Refusal(400, f"TensorFlow refuses the input: {reason(error)}") from None
        return {key: outputs[key].numpy() for key in sorted(outputs)}

    def try_out(self):
        """Run once, so that the first client need not wait, and a broken model is never ready."""
        shapes = {key: (1, *given.shape[1:]) for key, given in self.inputs.items() if given.shape}
        if any(None in shape for shape in shapes.values()):
            return
        zeros = {
            key: np.zeros(shapes.get(key, ()), given.dtype) for key, given in self.inputs.items()
        }
        self.compute(zeros)

    def _names(self):
        return ", ".join(map(repr, self.inputs))

    def _columns(self):
        values = ", ".join(
            f'"{key}": {"[...]" if given.shape else 0}' for key, given in self.inputs.items()
        )
        return f'{{"inputs": {{{values}}}}}'


class Service:
    """A loaded model that answers bodies.

    Args:
        folder: of the export.
        max_batch: most examples in one request.
    """

    def __init__(self, folder, max_batch):
        verify(folder)
        import tensorflow as tf

        self.folder, self._max_batch = folder, max_batch
        self.version = folder.resolve().name if folder.resolve().name.isdecimal() else "1"
        try:
            self._model = tf.saved_model.load(str(folder))
            self.signatures = {
                name: Signature(name, self._model.signatures[name])
                for name in self._model.signatures
            }
            for signature in self.signatures.values():
                signature.try_out()
        except FolderError:
            raise
        except Exception as error:
            raise FolderError(f"{folder} cannot be loaded: {one_line(error)}") from error
        if DEFAULT not in self.signatures:
            raise FolderError(f"{folder} has no signature {DEFAULT!r}: export the model again.")
        self.signature_def = signature_def(folder)

    def answer(self, body):
        """Return the answer to the body of a request, as bytes, or raise a `Refusal`."""
        request = parsed(body)
        if unknown := sorted(request.keys() - {"signature_name", "instances", "inputs"}):
            raise Refusal(
                400,
                f"The body has {shown(unknown[0])}, which is unknown: it takes 'signature_name' "
                "and 'instances' or 'inputs'.",
            )
        if ("instances" in request) == ("inputs" in request):
            raise Refusal(400, "The body must have either 'instances' or 'inputs'.")
        name = request.get("signature_name", DEFAULT)
        if type(name) is not str or name not in self.signatures:
            known = ", ".join(map(repr, sorted(self.signatures)))
            raise Refusal(400, f"There is no signature {shown(name)}; there are {known}.")
        signature = self.signatures[name]
        by_rows = "instances" in request
        take, given = (
            (signature.from_rows, request["instances"])
            if by_rows
            else (signature.from_columns, request["inputs"])
        )
        outputs = signature.run(take(given), self._max_batch)
        bad = [key for key, value in outputs.items() if not np.isfinite(value).all()]
        if bad:
            raise Refusal(500, f"The model's {', '.join(bad)} is not finite for this input.")
        columns = {key: value.tolist() for key, value in outputs.items()}
        if by_rows:
            rows = zip(*columns.values(), strict=True)
            content = {"predictions": [dict(zip(columns, row, strict=True)) for row in rows]}
        else:
            content = {"outputs": columns}
        return encoded(content)


def signature_def(folder):
    """Return the signatures as TensorFlow Serving describes them."""
    from google.protobuf import json_format
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    options = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
    described = json_format.MessageToDict(saved.meta_graphs[0], **options)["signature_def"]
    return {name: value for name, value in described.items() if not name.startswith("__")}


def encoded(content):
    return json.dumps(content, allow_nan=False).encode()


# -------------------------------------------------------------------------------------- the server


class Connection(web.RequestHandler):
    """A connection whose own errors, such as a request that is not HTTP, are JSON too."""

    __slots__ = ()

    def handle_error(self, request, status=500, exc=None, message=None):
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise ConnectionError("The client is gone, or has a part of an answer already.")
        error = one_line(message or "Bad request").rstrip(":") if status < 500 else INTERNAL
        log(f"{status} {request.remote}: {error}")
        if status >= 500 and exc is not None:
            log("".join(traceback.format_exception(exc)))
        response = web.json_response({"error": error}, status=status)
        response.force_close()
        return response


class Server(web.Server):
    """A server of such connections."""

    def __call__(self):
        return Connection(self, loop=self._loop, **self._kwargs)


class Front:
    """What stands between HTTP and the model.

    Args:
        service: the model.
        options: the command line's.
    """

    def __init__(self, service, options):
        self.stopping, self.open = False, 0
        self._service, self._name = service, options.name
        self._max_body = int(options.max_body_mb * 2**20)
        self._most = options.threads + options.max_waiting
        self._timeout = options.timeout
        self._pool = ThreadPoolExecutor(options.threads, thread_name_prefix="model")
        self._busy = 0

    async def handle(self, request):
        """Answer a request."""
        self.open += 1
        try:
            return await self._handle(request)
        finally:
            self.open -= 1

    async def _handle(self, request):
        headers = {}
        try:
            status, body = 200, await self._answer(request)
        except Refusal as refusal:
            status, headers = refusal.status, refusal.headers
            body = encoded({"error": str(refusal)})
            log(f"{status} {request.remote} {request.method} {shown(request.path)}: {refusal}")
        except ConnectionError:
            raise  # the client is gone
        except Exception:
            status, body = 500, encoded({"error": INTERNAL})
            log(f"500 {request.remote} {request.method} {shown(request.path)}")
            log(traceback.format_exc())
        response = web.Response(
            body=body, status=status, content_type="application/json", headers=headers
        )
        if self.stopping or status in (408, 413):
            response.force_close()
        await self._send(request, response)
        return response

    async def _send(self, request, response):
        transport = request.transport
        try:
            async with asyncio.timeout(self._timeout):
                await response.prepare(request)
                await response.write_eof()
                await request.writer.drain()
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError("The client does not take its answer.") from None

    async def _answer(self, request):
        found = re.fullmatch(
            r"/v1/models/([^/:]+)(?:/versions/([0-9]+))?(:predict|/metadata|)", request.path
        )
        if not found:
            raise Refusal(404, f"Nothing is at {shown(request.path)}.")
        name, version, what = found.groups()
        if name != self._name or version not in (None, self._service.version):
            raise Refusal(
                404,
                f"There is no such model: this is {self._name!r}, version {self._service.version}.",
            )
        method = "POST" if what == ":predict" else "GET"
        if request.method != method:
            raise Refusal(405, f"Use {method}.", {"Allow": method})
        if what == ":predict":
            return await self._predict(request)
        return encoded(self._metadata() if what else self._status())

    async def _predict(self, request):
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refusal(415, "The body must not be compressed.")
        if (request.content_length or 0) > self._max_body:
            raise self._too_long()
        if self._busy >= self._most:
            raise Refusal(503, "Too many requests wait: try again later.", {"Retry-After": "1"})
        # From here on, so that there are never more bodies in memory.
        self._busy += 1
        try:
            body = await self._read(request)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._service.answer, body)
        finally:
            self._busy -= 1

    async def _read(self, request):
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself is still to come
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > self._max_body:
                        raise self._too_long()
        except TimeoutError:
            raise Refusal(408, f"The body has not come within {self._timeout:g} s.") from None
        except web.RequestPayloadError as error:
            raise Refusal(400, f"The body is broken: {one_line(error)}") from None
        return bytes(body)

    def _too_long(self):
        return Refusal(413, f"The body has more than {self._max_body} bytes: send less at once.")

    def _status(self):
        status = {"error_code": "OK", "error_message": ""}
        version = {"version": self._service.version, "state": "AVAILABLE", "status": status}
        return {"model_version_status": [version]}

    def _metadata(self):
        spec = {"name": self._name, "signature_name": "", "version": self._service.version}
        signatures = {"signature_def": {"signature_def": self._service.signature_def}}
        return {"model_spec": spec, "metadata": signatures}


async def serve(service, options):
    """Serve until SIGTERM or SIGINT."""
    front = Front(service, options)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # on Windows
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = Server(
        front.handle,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=options.timeout,
        lingering_time=min(options.timeout, 5.0),
    )
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port)
    await site.start()
    port = runner.addresses[0][1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"Serving {service.folder} at http://{host}:{port}/v1/models/{options.name}", flush=True)
    await stop.wait()
    front.stopping = True
    await site.stop()
    # Clients that are connected learn by their next answer that it is the last.
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < FINISH_SECONDS:
        if not front.open and (waited > DRAIN_SECONDS or not server.connections):
            break
        await asyncio.sleep(0.02)
    await runner.cleanup()


def log(text):
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text.rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

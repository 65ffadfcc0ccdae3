"""Serve an exported model over HTTP, in the shape of TensorFlow Serving's REST API.

TensorFlow, FastAPI and uvicorn suffice. It has no encryption and no users: see docs/serving.md.
"""

import argparse
import asyncio
import contextlib
import hashlib
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Literal


@contextlib.contextmanager
def installed():
    """End with the line to run, if an import inside finds no package."""
    try:
        yield
    except ImportError as error:
        sys.exit(f'{error.name} is missing. Run: pip install "tfp_ibnn[serve]"')


with installed():
    import uvicorn
    from anyio import CapacityLimiter, to_thread
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from google.protobuf.json_format import MessageToDict
    from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model, with_config
    from pydantic.types import FailFast
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from typing_extensions import TypedDict
    from uvicorn.protocols.http.h11_impl import H11Protocol


class Options(BaseModel):
    """Options of the command line."""

    folder: Path = Field(description="what `ibnn.export` or scripts/export.py wrote")
    host: str = Field("127.0.0.1", description="address to listen at")
    port: int = Field(8501, ge=0, le=65535, description="0 takes a free one")
    name: str = Field("model", pattern=r"^[A-Za-z0-9_.-]+$", description="of the model in the URL")
    max_body_mb: float = Field(16.0, gt=0, lt=1e6, description="size of a request")
    max_batch: int = Field(1024, ge=1, description="examples in one request")
    max_waiting: int = Field(64, ge=0, description="requests that wait; more are answered with 503")
    threads: int = Field(2, ge=1, description="requests computed at once")
    timeout: float = Field(30.0, gt=0, lt=1e6, description="seconds for a request to come in")


def parse(argv=None):
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    for name, field in Options.model_fields.items():
        flag = name if field.is_required() else f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=field.default, help=field.description)
    return vars(parser.parse_args(argv))


if __name__ == "__main__":
    parse()  # --help need not wait for TensorFlow

with installed():
    import tensorflow as tf
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

MANIFEST = "assets.extra/tfp_ibnn.json"
CONTENT = TypeAdapter(TypedDict(MANIFEST, {"format": Literal[1], "sha256": dict[str, str]}))
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


def verify(folder):
    """Raise if a folder does not hold exactly the files of its manifest, by their SHA-256."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if odd := [path for path in paths if path.is_symlink() or not path.is_file()]:
        raise ValueError(f"{str(odd[0])!r} is a link or a device.")
    expected = CONTENT.validate_json((folder / MANIFEST).read_bytes())["sha256"]
    found = {x.relative_to(folder).as_posix(): hashlib.sha256(x.read_bytes()) for x in paths}
    digests = {name: value.hexdigest() for name, value in found.items() if name != MANIFEST}
    if wrong := sorted(digests.items() ^ expected.items()):
        raise ValueError(f"{folder}: {wrong[0][0]!r} is missing, changed or not in the manifest.")


def reason(error):
    """Return what is wrong, in one short line."""
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join([error.title, *map(str, fault['loc'])])[:100]!r}: {fault['msg'][:200]}"
    lines = str(getattr(error, "detail", error)).splitlines()  # TensorFlow's end with "[[node]]"
    return next((x.strip() for x in lines[::-1] if x.strip() and "[[" not in x), "unknown")[:300]


def scalar_type(dtype):
    """Return the type of one value in JSON: a number that the dtype can hold, a boolean, a text."""
    if dtype.is_floating:
        return Annotated[float, Field(ge=float(dtype.min), le=float(dtype.max))]
    if dtype.is_integer:
        return Annotated[int, Field(ge=int(dtype.min), le=int(dtype.max))]
    if dtype.is_bool:
        return bool
    if dtype == tf.string:
        return str
    raise ValueError(f"The model has an input of {dtype.name}, for which JSON has no type.")


def json_type(spec, max_batch):
    """Return the type of an input in JSON: nested lists of what its dtype can hold."""
    found = scalar_type(spec.dtype)
    for axis, size in reversed([*enumerate(spec.shape)]):
        length = Field(min_length=size or 1, max_length=size or (None if axis else max_batch))
        found = Annotated[list[found], length, FailFast()]
    return found


class Service:
    """A loaded model. `answer` takes the body of a request, or raises what is wrong with it."""

    def __init__(self, folder, max_batch):
        verify(folder)
        self.version = folder.resolve().name if folder.resolve().name.isdecimal() else "1"
        self._model, self._signatures = tf.saved_model.load(str(folder)), {}
        for name, function in self._model.signatures.items():
            specs = dict(sorted(function.structured_input_signature[1].items()))
            title = f"{name}({', '.join(specs)})"
            types = TypedDict(title, {key: json_type(x, max_batch) for key, x in specs.items()})
            self._signatures[name] = function, specs, TypeAdapter(with_config(STRICT)(types))
        graph = SavedModel.FromString((folder / "saved_model.pb").read_bytes()).meta_graphs[0]
        described = MessageToDict(graph, True, True)["signature_def"]
        self.metadata = {"signature_def": {"signature_def": described}}
        fields = {"signature_name": (Literal[tuple(self._signatures)], "serving_default")}
        fields |= {"instances": (list | None, None), "inputs": (Any, None)}
        self._body = create_model("Body", __config__=STRICT, **fields)

    def answer(self, body):
        request = self._body.model_validate_json(body)
        function, specs, types = self._signatures[request.signature_name]
        rows, given = request.instances, request.inputs
        if (rows is None) == (given is None):
            raise ValueError("The body must have either 'instances' or 'inputs'.")
        if rows and type(rows[0]) is dict:
            if any(type(row) is not dict or row.keys() != rows[0].keys() for row in rows):
                raise ValueError("All of 'instances' must be objects with the same names.")
            given = {key: [row[key] for row in rows] for key in rows[0]}
        elif len(specs) == 1 and type(given) is not dict:
            given = dict.fromkeys(specs, given if rows is None else rows)
        given = types.validate_python(given)
        tensors = {key: tf.constant(value, specs[key].dtype) for key, value in given.items()}
        if len({len(x) for x in tensors.values() if x.shape.rank}) > 1:
            raise ValueError("The inputs must have one batch size.")
        outputs = dict(sorted(function(**tensors).items()))
        numbers = {key: x for key, x in outputs.items() if x.dtype != tf.bool}  # not the sets
        if bad := [key for key, x in numbers.items() if not tf.reduce_all(tf.math.is_finite(x))]:
            raise HTTPException(500, f"The model's {', '.join(bad)} is not finite for this input.")
        outputs = {key: value.numpy().tolist() for key, value in outputs.items()}
        if rows is not None:
            rows = [dict(zip(outputs, x, strict=True)) for x in zip(*outputs.values(), strict=True)]
        return JSONResponse({"outputs": outputs} if rows is None else {"predictions": rows})


def application(service, options):
    room = asyncio.Semaphore(options.threads + options.max_waiting)
    threads = CapacityLimiter(options.threads)

    async def predict(request: Request):
        if room.locked():
            raise HTTPException(503, "Too many requests wait: try later.", {"Retry-After": "1"})
        async with room:
            body = bytearray()
            try:
                async with asyncio.timeout(options.timeout):
                    async for part in request.stream():
                        body += part
                        if len(body) > options.max_body_mb * 2**20:
                            raise HTTPException(413, f"Send at most {options.max_body_mb:g} MB.")
            except (TimeoutError, ClientDisconnect):
                message = f"The body has not come within {options.timeout:g} s."
                raise HTTPException(408, message, {"Connection": "close"}) from None
            return await to_thread.run_sync(service.answer, body, limiter=threads)

    async def refuse(request, error):
        status, content = getattr(error, "status_code", 400), {"error": reason(error)}
        uvicorn.server.logger.warning("%s %r %s", status, request.url.path, content)
        return JSONResponse(content, status, getattr(error, "headers", None))

    refused = (HTTPException, ValueError, tf.errors.InvalidArgumentError)
    app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(refused, refuse))
    ready = {"version": service.version, "state": "AVAILABLE", "status": {"error_code": "OK"}}
    spec = {"name": options.name, "signature_name": "", "version": service.version}
    for version in ("", f"/versions/{service.version}"):
        path = f"/v1/models/{options.name}{version}"
        app.get(path)(lambda: {"model_version_status": [ready]})
        app.get(f"{path}/metadata")(lambda: {"model_spec": spec, "metadata": service.metadata})
        app.post(f"{path}:predict")(predict)
    return app


class Connection(H11Protocol):
    """A connection that ends if its first request is late, and that says so before it is closed."""

    def connection_made(self, transport):
        super().connection_made(transport)
        self.loop.call_later(self.timeout_keep_alive, lambda: self.cycle or transport.abort())

    def shutdown(self):
        self.server_state.default_headers = [(b"connection", b"close")]
        self.loop.call_later(1, super().shutdown)


def main(argv=None):
    given = parse(argv)
    try:
        options = Options(**given)
        app = application(Service(options.folder, options.max_batch), options)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family)
    except Exception as error:
        sys.exit(f"error: {reason(error)}")
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else answers wait 40 ms
    limits = {"timeout_keep_alive": options.timeout, "timeout_graceful_shutdown": 60}
    config = uvicorn.Config(app, http=Connection, log_level="warning", **limits)
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{listener.getsockname()[1]}/v1/models/{options.name}"
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises it again when it has ended
        signal.signal(number, lambda *_: sys.exit(0))
    print(f"Serving {options.folder} at {address}", flush=True)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()

"""Writing that is cut short: by a full disk, and by kill -9 in the middle."""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from tests.robustness.exported import served, small_export
from tests.robustness.harness import Wrong, refusal

__all__ = ["Campaign", "WRITERS", "zygote"]

# ------------------------------------------------------------------------------------- the writers


class Checkpoints:
    """A checkpoint of a model whose weights say which version it is."""

    @staticmethod
    def write(folder, version):
        import tfp_ibnn as ibnn
        from tests.robustness.checkpoints import network

        model = Checkpoints.__dict__.get("model") or network(1)
        Checkpoints.model = model
        for variable in model.trainable_variables:
            variable.assign(np.full(variable.shape, version, "float32"))
        checkpoint = ibnn.Checkpoint(folder / "run.npz")
        checkpoint.set_model(model)
        checkpoint.logs = [{"loss": 0.0}] * version
        checkpoint.on_epoch_end(version, {"loss": 1.0})

    @staticmethod
    def read(folder):
        import tfp_ibnn as ibnn
        from tests.robustness.checkpoints import network

        model = network(2)
        version = ibnn.Checkpoint(folder / "run.npz").restore(model) - 1
        if not all((np.asarray(v) == version).all() for v in model.trainable_variables):
            raise Wrong("the checkpoint is of two versions")
        return version


class Exports:
    """An exported folder, whose seed says which version it is."""

    @staticmethod
    def write(folder, version):
        small_export(folder / "1", seed=version, overwrite=True)

    @staticmethod
    def read(folder):
        served().verify(folder / "1")
        return json.loads((folder / "1" / "assets.extra" / "tfp_ibnn.json").read_text())["seed"]


class Caches:
    """The cache file of a dataset."""

    @staticmethod
    def write(folder, version):
        from tfp_ibnn.training import replacing

        with replacing(folder / "made.npz") as temporary:  # as `load` does
            np.savez(temporary, x=np.full((200, 20), version, "int32"), y=np.full(200, version))

    @staticmethod
    def read(folder):
        with np.load(folder / "made.npz", allow_pickle=False) as file:
            found = {int(x) for name in file for x in file[name].ravel()}
        (version,) = found
        return version


class Records:
    """The JSON file of a run."""

    @staticmethod
    def write(folder, version):
        from lib import files

        files.write_json(folder / "metrics.json", {"version": version, "rows": [version] * 5000})

    @staticmethod
    def read(folder):
        content = json.loads((folder / "metrics.json").read_text())
        if set(content["rows"]) != {content["version"]}:
            raise Wrong("the record is of two versions")
        return content["version"]


class Runs:
    """A run of scripts/train_cifar.py, which is taken up after the kill."""

    @staticmethod
    def write(folder, version):
        import lib

        settings = lib.Settings(
            dataset="digits",
            model="mlp",
            posterior="gaussian",
            epochs=2,
            limit=100,
            batch_size=50,
            samples=2,
        )
        lib.run(settings, folder / "run", folder.parent / "digits", log=lambda line: None)

    @staticmethod
    def read(folder):
        path = folder / "run" / "metrics.json"
        found = json.loads(path.read_text())
        served().verify(folder / "run" / "saved_model")
        return [found[key] for key in ("accuracy", "nll", "brier", "ece")]


WRITERS = {
    "checkpoint": Checkpoints,
    "export": Exports,
    "cache": Caches,
    "record": Records,
    "run": Runs,
}

# ------------------------------------------------------------------------------------- the victims

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def zygote():
    """Fork a victim for each line of standard input: TensorFlow is imported once for all."""
    import tensorflow  # noqa: F401

    import lib  # noqa: F401
    import tfp_ibnn  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            victim(order, write)
        os.close(write)
        print(json.dumps(watched(pid, read, order)), flush=True)


def victim(order, write):
    """Write versions, telling of each, until the end or until killed; it never returns."""
    try:
        sys.stdout = sys.stderr
        warnings.simplefilter("ignore")
        writer, folder = WRITERS[order["writer"]], Path(order["folder"])
        if order["event"] is not None:
            kill_at(*order["event"], folder)
        for version in range(order["first"], order["last"] + 1):
            os.write(write, b"begin\n")
            writer.write(folder, version)
            os.write(write, f"{version}\n".encode())
        os._exit(0)
    except BaseException as error:
        os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def kill_at(kind, number, folder):
    """Kill this process at the event of that number, before it takes place."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event not in EVENTS or (kind != "any" and event != kind):
            return
        if not any(isinstance(x, str | Path) and str(folder) in str(x) for x in arguments):
            return
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    sys.addaudithook(hook)


def watched(pid, read, order):
    """Wait for a victim, or kill it after a while; return what became of it."""
    told, deadline = b"", None
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([read], [], [], wait)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            break
        part = os.read(read, 4096)
        if not part:
            break
        told += part
        if deadline is None and order["delay"] is not None and b"begin" in told:
            deadline = time.monotonic() + order["delay"]
    _, status = os.waitpid(pid, 0)
    os.close(read)
    lines = told.decode(errors="replace").splitlines()
    done = [int(line) for line in lines if line.isdecimal()]
    return {
        "killed": os.WIFSIGNALED(status),
        "done": done[-1] if done else None,
        "error": None if os.WIFSIGNALED(status) or status == 0 else lines[-1:],
    }


# ------------------------------------------------------------------------------------ the campaign


@contextlib.contextmanager
def full_disk(size):
    """Let no file grow beyond a size: the system refuses the rest, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Campaign:
    """What was written before is whole, or what is written now is."""

    def __init__(self, place):
        self.place = place
        self._zygote = self._unbroken = None

    def case(self, rng, number):
        """Cut one writing short."""
        if number % 12 == 11:
            return self.killed_run(rng)
        name = ("checkpoint", "export", "cache", "record")[number // 3 % 4]
        folder = self.place.empty("written")
        writer = WRITERS[name]
        writer.write(folder, 1)
        kind = ("full disk", "kill at an event", "kill at a moment")[number % 3]
        self.label = f"{name}, {kind}"
        if kind == "full disk":
            return self.disk(rng, writer, folder)
        order = {"first": 2, "last": 2, "event": None, "delay": None}
        if kind == "kill at an event":
            some = ("any", rng.randrange(30)), ("os.rename", rng.randrange(4))
            order["event"] = rng.choice(some)
            self.label += f" {order['event']}"
        else:
            order["last"], order["delay"] = 10**6, rng.uniform(0, 1.0 if name == "export" else 0.2)
            self.label += f" {order['delay']:.3f}"
        told = self.send(name, folder, order)
        least = told["done"] or 1
        found = writer.read(folder)
        if found not in (least, least + 1):
            raise Wrong(f"version {found} is there, after {least} was written")
        writer.write(folder, 1)
        if writer.read(folder) != 1:
            raise Wrong("the next writing failed")
        return {"right": 1, "kills": int(told["killed"]), "lost": 0}

    def disk(self, rng, writer, folder):
        largest = max(x.stat().st_size for x in folder.rglob("*") if x.is_file())
        size = rng.randrange(largest)
        self.label += f" at {size} of {largest}"
        before = names(folder)
        try:
            with full_disk(size):
                writer.write(folder, 2)
        except Exception as error:
            if writer.read(folder) != 1:
                raise Wrong("the old version is gone") from error
            if names(folder) != before:
                raise Wrong(f"{names(folder) - before} was left behind") from error
            refusal(error)
            return {"refused": 1, "full disks": 1, "lost": 0}
        if writer.read(folder) != 2:
            raise Wrong("it was written without an error, and is not there")
        return {"right": 1, "full disks": 1, "lost": 0}

    def killed_run(self, rng):
        """Kill a training, take it up, and compare its scores with those of an unbroken one."""
        order = {"first": 1, "last": 1, "event": None, "delay": None}
        if self._unbroken is None:
            folder = self.place.empty("unbroken")
            self.send("run", folder, order)
            self._unbroken = Runs.read(folder)
        folder = self.place.empty("killed")
        cut = dict(order)
        if rng.random() < 0.5:
            cut["event"] = rng.choice(
                (("any", rng.randrange(120)), ("os.rename", rng.randrange(16)))
            )
        else:
            cut["delay"] = rng.uniform(0.5, 6.0)
        self.label = f"run, kill at {cut['event'] or cut['delay']}"
        told = self.send("run", folder, cut)
        self.send("run", folder, order)
        if not np.allclose(Runs.read(folder), self._unbroken, rtol=1e-5, atol=1e-6):
            raise Wrong("the run that was taken up ends elsewhere")
        return {"right": 1, "kills": int(told["killed"]), "lost": 0}

    def send(self, writer, folder, order):
        """Have a victim write; return what became of it."""
        if self._zygote is None:
            code = "from tests.robustness import writing; writing.zygote()"
            self._zygote = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        content = {"writer": writer, "folder": str(folder), **order}
        self._zygote.stdin.write(json.dumps(content) + "\n")
        self._zygote.stdin.flush()
        told = json.loads(self._zygote.stdout.readline())
        if told["error"]:
            raise RuntimeError(f"the victim failed by itself: {told['error']}")
        return told


def names(folder):
    """Return all paths below a folder."""
    return {str(x.relative_to(folder)) for x in folder.rglob("*")}

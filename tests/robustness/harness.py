"""Runs campaigns in child processes, and counts what came of every input.

A campaign is a class with

- a constructor that takes a `Place` and makes what the cases damage;
- `case(rng, number)`, which tries one input, and returns "refused" if it was refused in words,
  "right" if it was answered rightly, or a dict with the number of each, where it tries several.
  It raises `Wrong` for a silent wrong answer; any other exception counts as a crash, as do a
  process that ends and one that hangs. It may set `label` to say what it tries.

Each case has a random generator of its own, so that a case is the same in every run with a seed.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

__all__ = ["CAMPAIGNS", "Place", "Tally", "Wrong", "refusal", "run", "table"]

ROOT = Path(__file__).parents[2]


class Size(NamedTuple):
    """How large a campaign is.

    Attributes:
        module: in which it is.
        full: cases at scale 1.
        least: cases at the smallest scale.
        seconds: a case counts as hung that has computed for so long, or waited for so long
            without computing. One that a busy machine lets compute slowly does not.
    """

    module: str
    full: int
    least: int
    seconds: float = 30.0


CAMPAIGNS = {
    "keras files": Size("keras_files", 1000, 16),
    "checkpoints": Size("checkpoints", 2000, 40),
    "exported models": Size("exported", 600, 26),
    "in-memory models": Size("in_memory", 1200, 40),
    "configs": Size("configs", 2400, 60),
    "posterior files": Size("posterior_files", 2000, 60),
    "dataset files": Size("dataset_files", 2000, 60),
    "HTTP server": Size("http_server", 10, 1, 300.0),
    "interrupted writing": Size("writing", 60, 11, 120.0),
}

COLUMNS = (
    "campaign",
    "inputs tried",
    "refused in words",
    "answered rightly",
    "crashes",
    "silent wrong answers",
    "writes outside",
)

MEMORY = 12 * 2**30
"""Bytes that a worker may ask for, so that a hostile size cannot harm the machine."""

GDB = shutil.which("gdb")
"""Shows where a process hangs outside Python, if it is installed."""

IDLE = 0.02
"""Share of the time in which a process that only waits may compute."""


class Wrong(Exception):
    """An input that was neither refused nor answered rightly."""


@dataclasses.dataclass
class Tally:
    """What came of a campaign.

    Attributes:
        name: of the campaign.
        tried: inputs.
        refused: those that were refused, with a message.
        right: those that were answered rightly.
        crashes: exceptions of a wrong kind or without a message, processes that ended or hung.
        wrong: silent wrong answers.
        outside: writes outside the folder that the campaign was given.
        extra: further numbers, by name.
        seconds: all of it took.
    """

    name: str
    tried: int = 0
    refused: int = 0
    right: int = 0
    crashes: list = dataclasses.field(default_factory=list)
    wrong: list = dataclasses.field(default_factory=list)
    outside: list = dataclasses.field(default_factory=list)
    extra: dict = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def faults(self):
        """All that must not be."""
        return [*self.crashes, *self.wrong, *self.outside]


class Place:
    """Where a campaign may write, and where it must not.

    Args:
        sandbox: a folder for both.
        name: of the campaign's module.
    """

    def __init__(self, sandbox, name):
        self.folder = Path(sandbox) / "work" / name
        self.outside = Path(sandbox) / "outside"
        self.folder.mkdir(parents=True, exist_ok=True)

    def empty(self, name):
        """Return a folder of this name inside, emptied."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path


def refusal(error, kinds=Exception, lines=None):
    """Return "refused" for an error that says what is wrong; raise it again for any other.

    Args:
        error: what was raised.
        kinds: exceptions that it may be.
        lines: how many lines its message may have; None is any number.
    """
    message = str(error).strip()
    if not isinstance(error, kinds) or not message:
        raise error
    if lines is not None and len(message.splitlines()) > lines:
        raise error
    return "refused"


# --------------------------------------------------------------------------------------- the child


class Watch:
    """Notes every path that Python opens to write, makes, moves or removes out of the work."""

    # Where the arguments of an event have a path, and the folder that it is relative to.
    _PATHS = {
        "os.mkdir": ((0, 2),),
        "os.rename": ((0, 2), (1, 3)),
        "os.remove": ((0, 1),),
        "os.rmdir": ((0, 1),),
        "os.symlink": ((1, 2),),
        "os.link": ((1, 3),),
        "os.chmod": ((0, 2),),
    }

    def __init__(self, allowed):
        self.allowed = [os.path.realpath(path) for path in allowed]
        self.active, self.found = False, []
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if not self.active:
            return
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            paths = [(path, -1)] if writes else []
        else:
            paths = [(arguments[x], arguments[y]) for x, y in self._PATHS.get(event, ())]
        for path, folder in paths:
            if isinstance(path, int | None):
                continue
            path = os.fsdecode(path)
            if folder != -1:
                path = os.path.join(f"/proc/self/fd/{folder}", path)
            # A link itself is made, moved or removed where it lies; what is opened is its target.
            if not self._is_inside(path, follow=event == "open"):
                self.found.append(f"{event} {path}")

    def _is_inside(self, path, follow):
        folder, name = os.path.split(path)
        real = os.path.realpath(path) if follow else os.path.join(os.path.realpath(folder), name)
        return any(real == root or real.startswith(root + os.sep) for root in self.allowed)


def child(sandbox, results):
    """Take (module, seed, first, last) from standard input and tell of each case."""
    sandbox = Path(sandbox)
    watch = Watch([sandbox / "work", sandbox / "tmp", "/dev", "/proc"])
    campaigns = {}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def tell(**content):
        results.write(json.dumps(content) + "\n")
        results.flush()

    for line in sys.stdin:
        module, seed, first, last = json.loads(line)
        if module not in campaigns:
            kind = importlib.import_module(f"tests.robustness.{module}").Campaign
            campaigns[module] = kind(Place(sandbox, module))
            if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        campaign = campaigns[module]
        for number in range(first, last):
            tell(begin=number)
            watch.found.clear()
            campaign.label, watch.active = "", True
            gc.freeze()  # so that there is little to look through at the end of the case
            try:
                verdict = campaign.case(random.Random(f"{seed} {module} {number}"), number)
                found = {"verdict": verdict}
            except Wrong as error:
                found = {"wrong": str(error)}
            except BaseException as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                text = " ".join(str(error).split())[:200]
                found = {"crash": f"{type(error).__name__}: {text} ({where})"}
            finally:
                watch.active = False
            # A failed `predict` leaves a tf.data iterator in a reference cycle. TensorFlow may take
            # as long to delete it as it has lived, up to a minute: results/robustness/README.md.
            gc.collect()
            tell(end=number, label=campaign.label, outside=list(watch.found), **found)
        tell(done=True)


# -------------------------------------------------------------------------------------- the parent


class Worker:
    """A child process that tries cases, and is started again where it ends."""

    def __init__(self, sandbox):
        self._sandbox, self._process = Path(sandbox), None
        for name in ("work", "tmp", "home", "outside", "here"):
            (self._sandbox / name).mkdir(parents=True, exist_ok=True)

    def _start(self):
        folder = self._sandbox
        environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "KERAS_HOME": str(folder / "tmp"),
            "MPLCONFIGDIR": str(folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        environment.pop("TFP_IBNN_DATA", None)
        read, write = os.pipe()
        self._log = (folder / "tmp" / "log").open("ab")
        code = (
            "import os, sys; from tests.robustness import harness; "
            "harness.child(sys.argv[1], os.fdopen(int(sys.argv[2]), 'w'))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(write)],
            cwd=folder / "here",
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[write],
            text=True,
            start_new_session=True,
        )
        os.close(write)
        self._results, self._rest = read, b""

    def close(self):
        """End the child."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # what it has started, too
            self._process.stdin.close()
            self._process.wait()
            os.close(self._results)
            self._log.close()
            self._process = None

    def _lines(self, seconds):
        """Yield what the child tells; return at its end, or if it hangs, see `Size`."""
        while True:
            while b"\n" in self._rest:
                line, self._rest = self._rest.split(b"\n", 1)
                yield json.loads(line)
            begin = now = self._computed()
            while not (ready := select.select([self._results], [], [], seconds)[0]):
                before, now = now, self._computed()
                if now - before < IDLE * seconds or now - begin > seconds:
                    break
            part = os.read(self._results, 65536) if ready else b""
            if not part:
                self._ended = bool(ready)
                return
            self._rest += part

    def _computed(self):
        """Return the seconds for which the child has computed."""
        status = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = status.rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def tell(self, module, seed, count, seconds):
        """Yield what the child tells of each case, and what it could not tell itself."""
        first = 0
        while first < count:
            if self._process is None:
                self._start()
            self._process.stdin.write(json.dumps([module, seed, first, count]) + "\n")
            self._process.stdin.flush()
            number, done = None, False
            for told in self._lines(seconds):
                if "begin" in told:
                    number = told["begin"]
                elif "end" in told:
                    first, number = told["end"] + 1, None
                    yield told
                else:
                    done = True
                    break
            if done:
                return
            stacks = "" if self._ended else self._stacks()
            code = self._process.wait() if self._ended else None
            self.close()
            how = f"ended with {code}" if self._ended else f"hung, in {_innermost(stacks)}"
            if number is None:
                raise RuntimeError(f"{module}: the child {how} before case {first}: {self._tail()}")
            crash = f"The process {how}."
            yield {"end": number, "label": "", "outside": [], "crash": crash, "stacks": stacks}
            first = number + 1

    def _stacks(self):
        """Return where all threads of a child that hangs are, in Python, and in C++ by gdb."""
        path, begin = self._sandbox / "tmp" / "log", self._log.seek(0, os.SEEK_END)
        self._process.send_signal(signal.SIGUSR1)
        python, native = "", ""
        for _ in range(100):
            time.sleep(0.1)
            before, python = python, path.read_bytes()[begin:].decode(errors="replace")
            if python and python == before:
                break
        if GDB:
            command = [GDB, "-batch", "-ex", "thread apply all backtrace", "-p"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                native = subprocess.run(
                    [*command, str(self._process.pid)], capture_output=True, text=True, timeout=300
                ).stdout
        return python + native

    def _tail(self):
        return (self._sandbox / "tmp" / "log").read_text(errors="replace")[-2000:]

    def strangers(self):
        """Return, and remove, what lies where nothing may be written."""
        found = [
            path
            for name in ("home", "outside", "here")
            for path in (self._sandbox / name).iterdir()
        ]
        found += [x for x in self._sandbox.iterdir() if x.name not in _NAMES]
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
            if not path.is_dir():
                path.unlink(missing_ok=True)
        return [str(path.relative_to(self._sandbox)) for path in found]


_NAMES = {"work", "tmp", "home", "outside", "here"}


def _innermost(stacks):
    """Return the innermost Python frames of the main thread."""
    main = stacks.partition("Current thread")[2]
    frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\w+)', main)
    return " < ".join(f"{file}:{line} {name}" for file, line, name in frames[:8]) or "silence"


def run(worker, name, seed=0, scale=1.0, say=lambda line: None):
    """Run a campaign; return its tally.

    Args:
        worker: a `Worker`.
        name: one of CAMPAIGNS.
        seed: of the cases.
        scale: size of the campaign; 1 is full.
        say: told of every fault, with all stacks of a process that hung, and from time to time how
            it goes.
    """
    size = CAMPAIGNS[name]
    count = max(size.least, round(size.full * scale))
    tally, begin = Tally(name), time.monotonic()
    last = begin

    def fault(where, text):
        where.append(text)
        say(f"  {text}")

    for told in worker.tell(size.module, seed, count, size.seconds):
        case = f"{name} {told['end']} {told['label']}".strip()
        if "verdict" in told:
            verdict = told["verdict"]
            counts = {verdict: 1} if isinstance(verdict, str) else dict(verdict)
            tally.refused += counts.pop("refused", 0)
            tally.right += counts.pop("right", 0)
            for key, number in counts.items():
                tally.extra[key] = tally.extra.get(key, 0) + number
        elif "wrong" in told:
            fault(tally.wrong, f"{case}: {told['wrong']}")
        else:
            fault(tally.crashes, f"{case}: {told['crash']}")
            if stacks := told.get("stacks"):
                say(stacks)
        for what in told["outside"]:
            fault(tally.outside, f"{case}: {what}")
        if time.monotonic() - last > 30:
            last = time.monotonic()
            say(f"{name}: {told['end'] + 1} of {count} cases")
    for what in worker.strangers():
        fault(tally.outside, f"{name}: {what} was written")
    tally.tried = tally.refused + tally.right + len(tally.crashes) + len(tally.wrong)
    tally.seconds = time.monotonic() - begin
    return tally


def table(tallies):
    """Return the lines of a Markdown table."""
    rows = [
        (
            tally.name,
            tally.tried,
            tally.refused,
            tally.right,
            len(tally.crashes),
            len(tally.wrong),
            len(tally.outside),
        )
        for tally in tallies
    ]
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, len(COLUMNS)))))
    return [
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {row[0]} | {' | '.join(f'{number:,}' for number in row[1:])} |" for row in rows),
    ]

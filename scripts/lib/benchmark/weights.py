"""Steps of posteriors over weights, beside those of other libraries."""

import gc
import json
import subprocess
from pathlib import Path

import keras

import tfp_ibnn as ibnn
from lib.benchmark import children, comparison, timing
from lib.benchmark import networks as nets
from lib.benchmark.record import row

OURS = {"shared": "MeanField, shared", "flipout": "MeanField, Flipout"}
OURS |= {"local": "MeanField, Flipout, local in Dense"}
OTHERS = {"reparameterization": "Reparameterization", "flipout": "Flipout"}
# An environment with PyTorch and bayesian-torch, which `make peers` makes.
PEERS = Path(".venv-peers/bin/python")
_SCRIPT = Path(__file__).with_name("torch_peer.py")


def weight_steps(settings):
    """Time LeNet's step with random weights: ours, TFP's and bayesian-torch's, if it is there.

    Each library's is compared with its own deterministic one. The memory of training is measured in
    processes of their own, one for each case.
    """
    seed, rounds = settings.seed, settings.rounds
    keras.utils.set_random_seed(seed)
    kinds = {"deterministic": None, **{f"weights.{kind}": kind for kind in OURS}}
    actions = {
        name: nets.stepper(_ours(kind), comparison.BATCH, comparison.STEPS, seed)
        for name, kind in kinds.items()
    }
    described = {f"weights.{kind}": (f"LeNet step, {label}", None) for kind, label in OURS.items()}
    yield from _with_memory(
        comparison.step_rows(actions, described, rounds),
        {name: _memory(_trained, kind, seed) for name, kind in kinds.items()},
    )
    legacy = {"TF_USE_LEGACY_KERAS": "1"}
    names = {"deterministic": None}
    names |= {f"weights.tfp_{name}": kind for name, kind in children.METHODS.items()}
    yield from _with_memory(
        nets.in_process(children.tfp_layers, "weights", rounds, seed, **legacy),
        {name: _memory(_tfp_trained, kind, seed, **legacy) for name, kind in names.items()},
    )
    if PEERS.exists():
        yield from _torch_rows(rounds, seed)


def _ours(kind):
    if kind is None:
        return nets.plain()
    maps = {".*": ibnn.MeanField(estimator="flipout" if kind == "local" else kind, beta=1.0)}
    if kind == "local":
        maps = {"fc.*": ibnn.MeanField(estimator="local", beta=1.0), **maps}
    return ibnn.to_stochastic(nets.plain(), maps, nets.TRAIN_SIZE)


def _torch_rows(rounds, seed):
    def ask(*words):
        command = [PEERS, _SCRIPT, *map(str, words)]
        return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])

    times = ask(rounds, seed)
    rows = [
        row(
            f"weights.torch_{name}",
            f"LeNet step, bayesian-torch {label}",
            timing.ratio(times[name], times["deterministic"]),
            seconds={"step": min(times[name]), "deterministic": min(times["deterministic"])},
        )
        for name, label in OTHERS.items()
    ]
    sizes = {f"weights.torch_{name}": ask(name, seed, "memory") for name in OTHERS}
    yield from _with_memory(rows, {**sizes, "deterministic": ask("deterministic", seed, "memory")})


def _with_memory(rows, sizes):
    own = sizes["deterministic"]
    for found in rows:
        mine = sizes[found["id"]]
        mebibytes = [round(size / 2**20, 1) for size in (mine, own)]
        yield {**found, "memory_ratio": round(mine / own, 4), "mebibytes": mebibytes}


def _memory(function, *arguments, **environment):
    # Memory that is freed goes back to the system at once: the peak is of what is in use.
    return nets.in_process(function, *arguments, MALLOC_MMAP_THRESHOLD_="65536", **environment)


def _trained(kind, seed):
    keras.utils.set_random_seed(seed)
    return _growth(nets.stepper(_ours(kind), comparison.BATCH, comparison.STEPS, seed))


def _tfp_trained(kind, seed):
    import tf_keras

    tf_keras.utils.set_random_seed(seed)
    model = children.lenet(kind)
    return _growth(nets.stepper(model, comparison.BATCH, comparison.STEPS, seed, tf_keras))


def _growth(action):
    """Return by how much the largest resident size grows in training, the graph included."""
    gc.collect()
    before = children.begin_with_the_largest_size()
    action()
    return children.status("VmHWM") - before

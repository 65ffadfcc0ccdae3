"""The cases of a CPU: each group is a function of `Settings` that gives rows, see `record`."""

import math
import subprocess
import sys
import time

import keras
from keras import layers

import tfp_ibnn as ibnn
from lib import checks
from lib.benchmark import children, timing
from lib.benchmark import networks as nets
from lib.benchmark.comparison import BATCH, IMAGES, SAMPLES, STEPS, prediction_rows, step_rows
from lib.benchmark.record import row
from lib.networks import vgg16

ENSEMBLE = 4
LINEAR = 1.05  # the largest exponent that counts as linear


@checks.settings("benchmark")
class Settings(checks.Checked):
    """How long and how carefully to measure, see `settings.toml`."""


def _parts(group, settings):
    for part in list(nets.CASES[group])[: 1 if settings.short else None]:
        label, targets, options = nets.CASES[group][part]
        for kind, name in nets.KINDS.items():
            yield f"{part}.{kind}", kind, label, name, targets.get(kind), options


def _others(group, action, settings, dropout):
    if settings.short:
        return {}
    members = [action(nets.plain()) for _ in range(ENSEMBLE)]
    ensemble = {f"{group}.ensemble": lambda: sum(member() for member in members)}
    return {f"{group}.dropout": action(dropout(nets.plain(dropout=0.1))), **ensemble}


def lenet_steps(settings):
    """Time LeNet's step, batch 128, 16 steps an execution, and those of other methods."""
    keras.utils.set_random_seed(settings.seed)

    def action(model):
        return nets.stepper(model, BATCH, 4 if settings.short else STEPS, settings.seed)

    actions, described = {"deterministic": action(nets.plain())}, {}
    for found, kind, label, name, target, options in _parts("steps", settings):
        described[f"training.{found}"] = (f"LeNet step, {name}, {label}", target)
        actions[f"training.{found}"] = action(nets.stochastic("lenet", kind, **options))
    if others := _others("training", action, settings, lambda model: model):
        labels = "LeNet step, MC dropout", "LeNet step, deep ensemble of 4 (four networks)"
        described |= {name: (label, None) for name, label in zip(others, labels, strict=True)}
    yield from step_rows(actions | others, described, settings.rounds)
    if others and keras.backend.backend() == "tensorflow":
        yield from _tfp_rows("training", settings)


def vgg16_steps(settings):
    keras.utils.set_random_seed(settings.seed)
    actions, described = {}, {}
    actions["deterministic"] = nets.stepper(nets.plain("vgg16"), 32, 2, settings.seed)
    for kind, target in (("gaussian", 1.05), ("flow", 1.15)):
        described[f"vgg16.all.{kind}"] = (f"VGG16 step, {nets.KINDS[kind]}, all layers", target)
        model = nets.stochastic("vgg16", kind)
        actions[f"vgg16.all.{kind}"] = nets.stepper(model, 32, 2, settings.seed)
    yield from step_rows(actions, described, max(4, settings.rounds // 4))


def _tfp_rows(group, settings):
    """Return the rows of TensorFlow Probability's own layers, timed in a process of their own."""
    return nets.in_process(
        children.tfp_layers, group, settings.rounds, settings.seed, TF_USE_LEGACY_KERAS="1"
    )


def predictions(settings):
    """Time 128 samples of LeNet on 100 images, and the prediction of other methods."""
    keras.utils.set_random_seed(settings.seed)
    x, _ = nets.images(IMAGES, settings.seed)
    actions, described = {}, {}
    for found, kind, label, name, target, options in _parts("predictions", settings):
        options = {**options, "seed": settings.seed} if "seed" in options else options
        described[f"prediction.{found}"] = (f"LeNet, 128 {label}, {name}", target)
        model = _average(nets.stochastic("lenet", kind), **options)
        actions[f"prediction.{found}"] = nets.compiled(model, x)
    others = _others(
        *("prediction", lambda model: nets.compiled(model, x), settings),
        lambda model: _average(model, dropout=True),
    )
    labels = "LeNet, 128 samples, MC dropout", "LeNet, deep ensemble of 4 (four passes)"
    described |= {name: (label, None) for name, label in zip(others, labels, strict=False)}
    rounds, plain = max(4, settings.rounds // 2), nets.plain()
    rows, times = prediction_rows(actions | others, described, plain, rounds, settings.seed)
    yield from rows
    for kind, name in nets.KINDS.items() if others else ():
        ours, theirs = times[f"prediction.shared.{kind}"], times["prediction.ensemble"]
        yield row(
            f"prediction.to_ensemble.{kind}",
            f"LeNet, 128 shared samples, {name}, to the ensemble of 4",
            timing.ratio(ours, theirs),
            seconds={"prediction": min(ours), "ensemble": min(theirs)},
        )
    if others:
        yield from _tfp_rows("prediction", settings)


def _average(model, samples=SAMPLES, **options):
    return ibnn.MonteCarlo(model, samples, from_logits=True, **options)


def memory_in_training(settings):
    """Measure the peak memory of training VGG16 with batches of 32, each case in a process."""
    targets = {
        "channel": {"gaussian": 1.15, "flow": 1.3},
        "position": dict.fromkeys(nets.KINDS, 1.6),
    }
    cases = {"deterministic": ("none", "channel")}
    cases |= {f"{noise}.{kind}": (kind, noise) for noise in targets for kind in nets.KINDS}
    found = {name: [] for name in cases}
    for number in range(2 if settings.rounds < 12 else 3):
        for name, case in cases.items():
            # Memory that is freed goes back to the system at once: the peak is of what is in use.
            more = {"MALLOC_MMAP_THRESHOLD_": "65536"}
            found[name].append(
                nets.in_process(children.memory, *case, settings.seed + number, **more)
            )
    sizes = {
        "memory": ("in training", lambda run: run["peak"] - run["before"]),
        "memory.step": ("of a step", lambda run: run["step"]),
        "graph": ("", lambda run: run["rest"] - run["before"]),
        "peak": ("", lambda run: run["peak"]),
    }
    own = found.pop("deterministic")
    for name, runs in found.items():
        kind, noise = cases[name]
        least = {
            part: [round(min(map(size, of)) / 2**20, 1) for of in (runs, own)]
            for part, (_, size) in sizes.items()
        }
        for part in ("memory", "memory.step"):
            words, size = sizes[part]
            yield row(
                f"{part}.{name}",
                f"VGG16 memory {words}, {nets.KINDS[kind]}, {noise} noise",
                timing.ratio(list(map(size, runs)), list(map(size, own))),
                targets[noise][kind],
                mebibytes=least,
            )


def extra_parameters(settings):
    """Count the trainable weights that a posterior adds to VGG16."""

    def weights(model):
        return sum(math.prod(weight.shape) for weight in model.trainable_variables)

    plain = weights(vgg16())
    for kind, target in (("gaussian", 0.1), ("flow", 10.0)):
        share = 100 * (weights(nets.stochastic("vgg16", kind)) / plain - 1)
        name, label = f"parameters.{kind}", f"VGG16, extra parameters, {nets.KINDS[kind]}"
        measured = {"ratio": share, "median": share, "noise": 0.0}
        yield row(name, label, measured, target, "%", parameters=plain)


def import_time(settings):
    """Time `import tfp_ibnn` in processes that have imported Keras and TFP already."""
    command = [sys.executable, "-c", nets.CASES["import_time"]]
    times = [float(subprocess.check_output(command, text=True).split()[-1]) for _ in range(6)]
    yield row("imports", "import tfp_ibnn, after Keras and TFP", timing.smallest(times), 0.2, "s")


def conversion_time(settings):
    plain, times = keras.applications.ResNet50(weights=None), []
    for _ in range(4):
        began = time.perf_counter()
        ibnn.to_stochastic(plain, ibnn.NormalAffine(), nets.TRAIN_SIZE)
        times.append(time.perf_counter() - began)
    yield row("conversions", "to_stochastic of ResNet50", timing.smallest(times), 5.0, "s")


def exponents(settings):
    """Measure how cost grows: the slopes of cost against size on logarithmic axes."""
    keras.utils.set_random_seed(settings.seed)
    x, _ = nets.images(100, settings.seed)
    networks = {"own": "none"} | {kind: kind for kind in nets.KINDS}
    networks = {name: nets.stochastic("lenet", kind) for name, kind in networks.items()}
    kinds = {"own": None, "gaussian": ibnn.NormalAffine, "flow": ibnn.NormalInvConv}
    deep = {"own": None, "planar": ibnn.NormalPlanar1d, "convolutions": ibnn.NormalInvConv}
    alone = _layer(64, None, settings)  # which has no depth

    def samples(name, count):
        if name == "own":
            return nets.compiled(networks[name], x, count)
        return nets.compiled(_average(networks[name], count), x)

    def batch(name, size):
        model = nets.stochastic("lenet", "none" if name == "own" else name)
        return nets.stepper(model, size, 4, settings.seed)

    def channels(name, count):
        return _layer(count, None if name == "own" else kinds[name](), settings)

    def depth(name, count):
        return alone if name == "own" else _layer(64, deep[name](depth=count), settings)

    linear = dict.fromkeys(nets.KINDS, LINEAR)
    yield from _growth("samples", (8, 32, 128, 512), networks, samples, settings, linear)
    yield from _growth("batch", (16, 64, 256, 1024), networks, batch, settings, linear)
    for found in _growth("channels", (32, 64, 128, 256), kinds, channels, settings):
        # No worse than the wrapped layer's own, to the same tolerance as what is to be linear.
        yield {**found, "target": round(found["growth"]["own_exponent"] + LINEAR - 1, 3)}
    for found in _growth("depth", (1, 2, 4, 8), deep, depth, settings):
        own = found["growth"]["own"]
        yield {**found, "growth": {**found["growth"], "own": [min(own)] * len(own)}}


def _layer(channels, posterior, settings):
    """Return an action that trains one 3x3 convolution between equal channels on 8x8 maps."""
    inputs = keras.Input((8, 8, channels))
    x = layers.Conv2D(channels, 3, padding="same", activation="relu", name="conv")(inputs)
    outputs = layers.Dense(nets.CLASSES, name="head")(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    if posterior is not None:
        model = ibnn.to_stochastic(model, {"conv": posterior}, nets.TRAIN_SIZE)
    return nets.stepper(model, 32, 8, settings.seed)


def _growth(axis, sizes, names, make, settings, targets=None):
    """Time all curves at all sizes in turn; give a row for each but the layer's own."""
    actions = {(name, size): make(name, size) for name in names for size in sizes}
    times = timing.interleave(actions, max(4, settings.rounds // 3))
    found = {name: [times[name, size] for size in sizes] for name in names}
    # The exponents are without the smallest size, at which fixed costs show most.
    slopes = {name: timing.slope(sizes[1:], measured[1:]) for name, measured in found.items()}
    least = {name: [float(f"{min(t):.5g}") for t in measured] for name, measured in found.items()}
    for name in (name for name in names if name != "own"):
        growth = {"axis": axis, "sizes": list(sizes), "seconds": least[name], "own": least["own"]}
        growth["own_exponent"] = round(slopes["own"]["ratio"], 4)
        label = f"growth with {axis}, {nets.KINDS.get(name, name)}: exponent"
        target = (targets or {}).get(name)
        yield row(f"growth.{axis}.{name}", label, slopes[name], target, "exponent", growth=growth)


GROUPS = {"training": lenet_steps, "vgg16": vgg16_steps, "prediction": predictions}
GROUPS |= {"memory": memory_in_training, "parameters": extra_parameters, "imports": import_time}
GROUPS |= {"conversions": conversion_time, "growth": exponents}

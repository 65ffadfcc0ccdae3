"""Laplace beside laplace-torch, case by case in turns, and how its cost grows.

A fit is timed with the tracing of its function, a prediction without: `predict` ran before.
"""

import subprocess
import time
from argparse import Namespace
from functools import partial

import keras
import numpy as np
from scipy.optimize import isotonic_regression

import tfp_ibnn as ibnn
from lib.benchmark import timing
from lib.benchmark.record import row
from lib.figures import facets, marked

NAMES = {"last_layer full": "last layer, full", "last_layer kron": "last layer, Kronecker"}
NAMES["all kron"] = "all layers, Kronecker"
WAYS = {"glm probit": "probit", "glm mc": "linearised draws", "nn mc": "draws of weights"}
WORK, GROWN = ("fit", "predict"), ("last_layer kron", "all kron")
ENOUGH, LONG = 3, 15  # rounds of a case, and seconds after which no further one begins
AXES = {  # width, classes and examples
    "parameters": [(width, 10, 250) for width in (0.5, 1, 2, 4)],
    "classes": [(1, classes, 250) for classes in (4, 20, 100)],
    "examples": [(1, 10, count) for count in (250, 1000, 4000)],
}


def fitter(model, name, x, y, options, way="glm mc"):
    """Return a function that fits a case, such as "all kron", and returns the posterior."""
    kind = dict(zip(("pred_type", "link_approx"), way.split(), strict=True))
    la = ibnn.Laplace(model, *name.split(), prior_precision=options.prior_precision, **kind)
    return lambda: la.fit(x, y, batch_size=options.batch_size, verbose=0)


def predictor(model, name, x, y, x_test, options, way="glm mc"):
    """Return a function that predicts images; what is fitted has few."""
    la = fitter(model, name, x[:500], y[:500], options, way)()
    mc = ibnn.MonteCarlo(la, samples=options.samples, seed=0)
    mc.predict(x_test[: 2 * options.batch_size], batch_size=options.batch_size, verbose=0)
    return lambda: mc.predict(x_test, batch_size=options.batch_size, verbose=0)


def beside_peer(model, x, y, x_test, peer, options, known=()):
    """Yield a row for each case that is not known: our seconds and those of the `Peer`, in turns.

    Fits have a row with their case's name, "fit.all kron fit", and predictions with the kind of
    prediction and the number of images, "predict.all kron nn mc 10000".
    """

    def measured(line, label, prepare):
        name = f"{'fit' if line.endswith('fit') else 'predict'}.{line}"
        if name in known:
            return
        action = prepare()
        sides = {"ours": lambda: _seconds(action), "laplace-torch": lambda: peer.seconds(line)}
        times = take_turns(sides, options.rounds)
        seconds = {side: np.median(found) for side, found in times.items()}
        more = {"rounds": len(times["ours"]), "peer": peer.versions, "seconds": seconds}
        yield row(name, label, timing.ratio(*times.values()), 1.0, **more)

    for name, label in NAMES.items():
        fit = partial(fitter, model, name, x, y, options)
        yield from measured(f"{name} fit", label, fit)
    for name, label in NAMES.items():
        for way, words in WAYS.items():
            # The peer makes whole Jacobians: 10,000 images would take it half an hour.
            count = options.batch_size if name == "all kron" and way != "nn mc" else len(x_test)
            images = x_test[:count]
            words = f"{label}: {words}, {len(images):,} images"
            predict = partial(predictor, model, name, x, y, images, options, way)
            yield from measured(f"{name} {way} {len(images)}", words, predict)


def take_turns(sides, rounds):
    """Return the seconds of each side, per round; another side begins each round.

    After `ENOUGH` rounds none begins once all of them have taken `LONG` seconds.
    """
    times = {side: [] for side in sides}
    for number in range(rounds):
        if number >= ENOUGH and sum(map(sum, times.values())) > LONG:
            break
        for side in list(sides)[:: -1 if number % 2 else 1]:
            times[side].append(sides[side]())
    return times


class Peer:
    """The process of `laplace_peer.py`: it answers a line by how many seconds that took."""

    def __init__(self, command):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen(command, **pipes)
        self.versions = self._answer("begin")

    def seconds(self, line):
        print(line, file=self._process.stdin)
        return float(self._answer(line))

    def _answer(self, line):
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(
                f"The process of laplace-torch ended at {line!r}; see its error above."
            )
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()


def growth(network, images, options, known=()):
    """Yield a row for each curve that is not known: seconds by parameters, classes and examples.

    The least of two rounds; predictions have few draws. An exponent is that of the last step.
    """
    options = Namespace(**{**vars(options), "samples": 8})
    for axis, points in AXES.items():
        times, places = {}, []
        if {f"growth.{axis} {way}, {NAMES[name]}" for way in WORK for name in GROWN} <= {*known}:
            continue
        for width, classes, count in points:
            model, x, y = network(width, classes), images[:count], np.arange(count) % classes
            model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            counts = {"parameters": model.count_params(), "classes": classes, "examples": count}
            places.append(counts[axis])
            for name in GROWN:
                fit = fitter(model, name, x, y, options)
                predict = predictor(model, name, x, y, x, options)
                for way, action in zip(WORK, (fit, predict), strict=True):
                    seconds = [_seconds(action) for _ in range(2)]
                    times.setdefault(f"{way}, {NAMES[name]}", []).append(seconds)
        for label, found in times.items():
            about = {"axis": axis, "sizes": places, "seconds": [min(part) for part in found]}
            slope = timing.slope(places[-2:], found[-2:])
            yield row(f"growth.{axis} {label}", label, slope, unit="exponent", growth=about)


def _seconds(action):
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def figure(rows):
    """Draw the curves of `growth` on logarithmic axes, with their exponents at the end."""
    rows = [found for found in rows if "growth" in found]
    seconds = [value for found in rows for value in found["growth"]["seconds"]]
    gap = 0.05 * np.log(max(seconds) / min(seconds))  # the height of a number
    cells = [(axis, [r for r in rows if r["growth"]["axis"] == axis], gap) for axis in AXES]
    return facets([cells], _panel, (10.4, 3.9), legend=4, grid_lines="both", sharey=True)


def _panel(ax, axis, rows, gap):
    heights = apart([np.log(found["growth"]["seconds"][-1]) for found in rows], gap)
    for number, (found, height) in enumerate(zip(rows, heights, strict=True)):
        sizes, seconds = found["growth"]["sizes"], found["growth"]["seconds"]
        look = marked(number)
        ax.loglog(sizes, seconds, label=found["label"], **look)
        where = {"ha": "left", "va": "center", "fontsize": 8.5, "color": look["color"]}
        ax.text(1.12 * sizes[-1], np.exp(height), f"{found['ratio']:.1f}", **where)
    ax.set(xlabel=axis, ylabel="seconds" if axis == "parameters" else None)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()


def apart(heights, gap):
    """Return heights in the same order, moved as little as it takes to be a gap apart."""
    order = np.argsort(heights, kind="stable")
    steps = gap * np.arange(len(heights))
    # With the steps taken off, heights that only rise are a gap apart: isotonic regression.
    rising = isotonic_regression(np.asarray(heights)[order] - steps).x
    moved = np.empty(len(heights))
    moved[order] = rising + steps
    return moved

"""Laplace beside laplace-torch, case by case in turns, and how its cost grows.

All times are those of the call that a user writes: `fit`, with the tracing of its function, and
`predict`, after one that has traced it.
"""

import subprocess
import time

import keras
import numpy as np

import tfp_ibnn as ibnn
from experiments.benchmark import timing
from experiments.benchmark.record import row
from experiments.figures import facets
from tfp_ibnn.plots.style import marked

NAMES = {"last_layer full": "last layer, full", "last_layer kron": "last layer, Kronecker"}
NAMES["all kron"] = "all layers, Kronecker"
WAYS = {"glm probit": "probit", "glm mc": "linearised, {} draws", "nn mc": "sampled weights, {}"}
LONG = 20
"""After how many seconds of one case no further round of it begins."""


def fitter(model, name, x, y, options, **more):
    """Return a function that fits a case, such as "all kron", and returns the posterior."""
    more["prior_precision"] = options.prior_precision
    return lambda: ibnn.Laplace(model, *name.split(), **more).fit(
        x, y, batch_size=options.batch_size, verbose=0
    )


def predictor(model, name, way, x, y, x_test, options):
    """Return a function that predicts images, traced already; a fit of few images is enough."""
    pred_type, link_approx = way.split()
    few = x[:500], y[:500]
    kind = {"pred_type": pred_type, "link_approx": link_approx}
    la = fitter(model, name, *few, options, **kind)()
    mc = ibnn.MonteCarlo(la, samples=options.samples, seed=0)
    mc.predict(x_test[: 2 * options.batch_size], batch_size=options.batch_size, verbose=0)
    return lambda: mc.predict(x_test, batch_size=options.batch_size, verbose=0)


def beside_peer(model, x, y, x_test, command, options):
    """Yield a row for each case: our seconds and those of laplace-torch, in turns."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as peer:
        versions = peer.stdout.readline().strip()

        def ask(line):
            print(line, file=peer.stdin)
            return float(peer.stdout.readline())

        def measured(group, name, way, action):
            ours, theirs = [], []
            while len(ours) < options.rounds and sum(ours) + sum(theirs) < LONG:
                ours.append(_seconds(action))
                theirs.append(ask(f"{name} {way}"))
            label = f"{NAMES[name]}: {WAYS.get(way, way).format(options.samples)}"
            label = label.removesuffix(": fit")
            found = timing.ratio(ours, theirs)
            seconds = {"ours": np.median(ours), "laplace-torch": np.median(theirs)}
            more = {"rounds": len(ours), "peer": versions}
            return row(f"{group}.{name} {way}", label, found, 1.0, seconds=seconds, **more)

        for name in options.cases:
            yield measured("fit", name, "fit", fitter(model, name, x, y, options))
        for name in options.cases:
            for way in WAYS:
                action = predictor(model, name, way, x, y, x_test, options)
                yield measured("predict", name, way, action)
        peer.stdin.close()


def growth(network, images, options):
    """Yield a row for each curve: seconds against parameters, classes and examples."""
    sizes = {
        "parameters": [(width, 10, 500) for width in (1, 2, 4, 8)],
        "classes": [(1, classes, 500) for classes in (5, 20, 80)],
        "examples": [(1, 10, count) for count in (250, 1000, 4000)],
    }
    for axis, points in sizes.items():
        times, places = {}, []
        for width, classes, count in points:
            model, x = network(width, classes), images[:count]
            y = np.arange(count) % classes
            model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            sizes_of = {"parameters": model.count_params(), "classes": classes, "examples": count}
            places.append(sizes_of[axis])
            for name in ("last_layer kron", "all kron"):
                actions = {
                    "fit": fitter(model, name, x, y, options),
                    "predict": predictor(model, name, "glm mc", x, y, x, options),
                }
                for way, action in actions.items():
                    action()
                    times.setdefault((name, way), []).append([_seconds(action) for _ in range(3)])
        for (name, way), found in times.items():
            about = {"axis": axis, "sizes": places, "seconds": [min(part) for part in found]}
            measured = timing.slope(places[-2:], found[-2:])
            label = f"{way}, {NAMES[name]}"
            yield row(f"growth.{axis} {name} {way}", label, measured, unit="exponent", growth=about)


def _seconds(action):
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def figure(rows):
    """Draw the curves of `growth` on logarithmic axes, with their exponents at the end."""
    rows = [found for found in rows if "growth" in found]
    axes = list(dict.fromkeys(found["growth"]["axis"] for found in rows))
    cells = [(axis, [r for r in rows if r["growth"]["axis"] == axis]) for axis in axes]
    return facets([cells], _panel, (10.4, 3.9), legend=4, grid_lines="both", sharey=True)


def _panel(ax, axis, rows):
    for number, found in enumerate(rows):
        sizes, seconds = found["growth"]["sizes"], found["growth"]["seconds"]
        look = marked(number)
        ax.loglog(sizes, seconds, label=found["label"], **look)
        text = {"fontsize": 8.5, "color": look["color"], "va": "center"}
        place = {"xytext": (6, 0), "textcoords": "offset points"}
        ax.annotate(f"{found['ratio']:.1f}", (sizes[-1], seconds[-1]), **place, **text)
    ax.set_xlabel(axis)
    if axis == "parameters":
        ax.set_ylabel("seconds")
    ax.margins(x=0.12)

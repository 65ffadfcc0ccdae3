"""Times of several networks taken in turns, as rows to one reference."""

from lib.benchmark import networks as nets
from lib.benchmark import timing
from lib.benchmark.record import row

BATCH = 128  # of a training step
STEPS = 16  # of an execution
SAMPLES = 128  # of a prediction
IMAGES = 100  # of a prediction
BATCHES = (32, 64, 128, 256, 512, 1024)  # of the deterministic network in prediction


def step_rows(actions, described, rounds):
    """Time actions in turn; give a row for each that is described, to "deterministic"."""
    times = timing.interleave(actions, rounds)
    reference = times["deterministic"]
    for found, (label, target) in described.items():
        seconds = {"step": min(times[found]), "deterministic": min(reference)}
        yield row(found, label, timing.ratio(times[found], reference), target, seconds=seconds)


def prediction_rows(actions, described, plain, rounds, seed, networks=None):
    """Return rows of predictions, and all times; the reference is 128 deterministic passes.

    These are over 100 images at the best batch size, found from an eighth of them. So are those of
    `networks`, by name, each of whose passes is a draw, in one compiled loop.
    """
    needed = IMAGES * SAMPLES

    def passes(model, batch, run):
        repeats = max(1, needed // (8 * batch))
        run = run(model, nets.images(batch, seed)[0], repeats)
        return lambda: run() * needed / (repeats * batch)

    networks = {None: (plain, nets.compiled)} | {
        name: (model, nets.looped) for name, model in (networks or {}).items()
    }
    sizes = {(name, batch): (*networks[name], batch) for name in networks for batch in BATCHES}
    sized = {case: passes(model, batch, run) for case, (model, run, batch) in sizes.items()}
    times = timing.interleave(actions | sized, rounds)
    best = {name: min(BATCHES, key=lambda b, n=name: min(times[n, b])) for name in networks}
    times |= {name: times[name, batch] for name, batch in best.items()}
    rows = []
    for found, (label, target) in described.items():
        seconds = {"prediction": min(times[found]), "deterministic": min(times[None])}
        measured = timing.ratio(times[found], times[None])
        about = {"best_batch": best[None]} | ({"own_batch": best[found]} if found in best else {})
        rows.append(row(found, label, measured, target, seconds=seconds, **about))
    return rows, times

r"""Measure what the noise costs, and print it beside the targets.

    training      a step of LeNet, to a deterministic one's; TFP's layers, dropout, an ensemble
    weights       a step of LeNet with random weights; TFP, and bayesian-torch by `make peers`
    vgg16         a step of VGG16
    prediction    128 samples of LeNet, to 128 deterministic passes; the same others
    sampling      error of 32 quasi-random samples, to that of 128 independent ones
    memory        peak memory in training
    parameters    extra parameters
    imports       import tfp_ibnn
    conversions   to_stochastic of ResNet50
    export        32 draws of LeNet in onnxruntime and LiteRT, to MonteCarlo.predict and one network
    growth        exponents of cost against samples, batch, channels and depth
    gpu           a step of VGG16 on a GPU; by itself, and the only group with KERAS_BACKEND=jax

Every number is the minimum over repeats that take turns, all in one run; the details are in
results/benchmark/README.md. A target that is missed is shown. The exit status is 1 where a ratio is
worse than the stored one by more than the noise of the two runs; with --short, where it is more
than twice as large. A run that is stored takes the place of the old one, and exits with 0.

Examples:
    python scripts/benchmark.py
    python scripts/benchmark.py --short
    python scripts/benchmark.py --only training prediction --rounds 40
    python scripts/benchmark.py --store
    python scripts/benchmark.py --only gpu --store
    KERAS_BACKEND=jax python scripts/benchmark.py --only gpu --store
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from subprocess import CalledProcessError

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

CPU = (
    "training",
    "weights",
    "vgg16",
    "prediction",
    "sampling",
    "memory",
    "parameters",
    "imports",
    "conversions",
    "growth",
    "export",
)
SHORT = ("training", "prediction", "parameters")
SHORT_FACTOR = 2.0
RESULTS = Path("results/benchmark")
PAGE = RESULTS / "README.md"  # its figures lie beside it
COMPARED, SEEDS = {"qmc": 32, "iid": 128}, 16


def main(argv=None):
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    options = parse(argv, on_jax=backend == "jax")
    on_gpu = options.only == ["gpu"]
    if on_gpu:  # its processes share the memory of the GPU
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    from lib import benchmark
    from lib.benchmark import record

    name = {"gpu": f"gpu_{backend}", "weights": "peers", "export": "export"}.get(
        "".join(options.only), "cpu"
    )
    path = RESULTS / f"{name}.json"
    try:
        stored = stored_record(options.compare, path, record)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Every case compiles a function of its own; TensorFlow takes them for one, and warns.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    settings = benchmark.Settings(rounds=options.rounds, seed=options.seed, short=options.short)
    groups = {**benchmark.GROUPS, "sampling": sampling, **benchmark.GPU}
    output = Path(options.output)
    rows, failed = run(
        {name: groups[name] for name in options.only},
        settings,
        record,
        lambda rows: record.write(output / path.name, rows, vars(options)),
    )
    save_figures(rows, output)
    print(f"\nWritten to {output}.")
    worse = compare(rows, stored, options.short, record)
    if failed:
        print(f"error: {', '.join(failed)} failed, see above", file=sys.stderr)
        return 2
    if options.store:
        record.write(path, rows, vars(options))
        show_stored(record)
        print(f"Stored as {path}, with the tables and figures of {PAGE}.")
        return 0
    return 1 if worse else 0


def parse(argv, on_jax=False):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        metavar="GROUP",
        choices=(*CPU, "gpu"),
        help="some of the groups above (default: all of this backend's)",
    )
    add("--short", action="store_true", help="a smoke test: a few cases, under a minute")
    add("--rounds", type=int, help="repeats of each case (default 24, or 4 with --short)")
    add("--seed", type=int, default=0, help="of weights, images and noise (default 0)")
    add("--output", default="outputs/benchmark", help="folder (default outputs/benchmark)")
    add("--compare", metavar="FILE", help=f"record to compare with (default that in {RESULTS})")
    add("--store", action="store_true", help=f"keep a whole run in {RESULTS}, and in the page")
    options = parser.parse_args(argv)
    groups = ("gpu",) if on_jax or options.only == ["gpu"] else CPU
    if unfit := sorted(set(options.only or ()) - set(groups)):
        why = "by itself" if unfit == ["gpu"] else "with KERAS_BACKEND=tensorflow"
        parser.error(f"--only {' '.join(unfit)} runs {why}")
    if options.short and groups == ("gpu",):
        parser.error("--short is of the groups of a CPU; leave it out here")
    whole = options.only in (["weights"], ["export"]) or set(options.only or groups) == set(groups)
    if options.store and (options.short or not whole):
        parser.error(
            "--store keeps whole runs: leave out --short, and --only but for export, gpu, weights"
        )
    if options.store and not PAGE.exists():
        parser.error("--store works in the folder of the repository")
    chosen = options.only or (SHORT if options.short else groups)
    options.only = [name for name in groups if name in chosen]
    options.rounds = (4 if options.short else 24) if options.rounds is None else options.rounds
    for name, least, most in (("rounds", 2, 10_000), ("seed", 0, 2**31 - 1)):
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name} must be {least} to {most}; got {getattr(options, name)}")
    return options


def stored_record(given, default, record):
    """Return the record to compare with, or None if none was asked for and none is there."""
    if given is None and not default.exists():
        return None
    return record.read(given or default)


def run(groups, settings, record, keep):
    """Return the rows of all groups, each printed and kept at once, and the groups that failed."""
    print(f"{'':66}{'target':>10}{'measured':>10}")
    rows, failed = [], []
    for name, group in groups.items():
        began = time.perf_counter()
        try:
            for row in group(settings):
                rows.append(row)
                print(record.line(row), flush=True)
                keep(rows)
        except (RuntimeError, CalledProcessError) as error:  # of a child; the others still count
            print(f"    {name}: {error}", flush=True)
            failed.append(name)
        print(f"    {name}: {time.perf_counter() - began:.0f} s", flush=True)
    return rows, failed


def compare(rows, stored, short, record):
    """Print what is worse than it was, and return it."""
    if stored is None:
        print("No stored run to compare with.")
        return []
    if differs := record.other_machine(stored):
        print(f"Another machine: {differs}. Ratios are compared, seconds are not.")
        rows = [row for row in rows if row["unit"] != "s"]
    worse = record.compare(rows, stored["rows"], SHORT_FACTOR if short else None)
    for line in worse:
        print(f"WORSE  {line}")
    if not worse:
        print("No ratio is worse than the stored one.")
    return worse


def save_figures(rows, folder):
    from lib.benchmark import figures

    folder.mkdir(parents=True, exist_ok=True)
    figures.save(figures.ratios(rows), folder / "benchmark.png")
    figures.save(figures.growths(rows), folder / "benchmark_growth.png")


def show_stored(record):
    """Bring the figures and tables of the page up to date."""
    from lib import files

    # Whole runs: the other files of the folder have parts of one, or another form.
    paths = (RESULTS / f"{name}.json" for name in ("cpu", "gpu_jax", "gpu_tensorflow"))
    rows = [row for path in paths if path.exists() for row in record.read(path)["rows"]]
    save_figures(rows, PAGE.parent)
    files.write_text(PAGE, record.fill(PAGE.read_text(encoding="utf-8"), RESULTS))


def sampling(settings):
    """Measure the error of the predictive mean, on the digits network of `study.py sampling`."""
    import keras
    import numpy as np

    import tfp_ibnn as ibnn
    from lib.benchmark import networks, record, timing
    from studies.sampling.run import IMAGES, means
    from train_digits import LOSS, convert, load, network, posteriors

    def train(model, optimizer):
        model.compile(optimizer, LOSS)
        model.fit(x_train, y_train, batch_size=32, epochs=30, verbose=0)
        return model

    def ratio(part):
        first, second = np.mean(part, axis=0)
        return float(np.sqrt(first / second))

    keras.utils.set_random_seed(settings.seed)
    x_train, x_test, y_train, _ = load()
    start = train(network(), keras.optimizers.Adam(1e-3))
    for posterior, kind in zip(posteriors().values(), ("gaussian", "flow"), strict=True):
        optimizer = ibnn.two_speed(keras.optimizers.Adam(1e-3), stochastic_lr=5e-3)
        model, x = train(convert(start, posterior), optimizer), x_test[:IMAGES]
        reference = np.mean(means(model, x, 1024, "qmc", range(1000, 1008)), axis=0)
        squares = {
            way: np.mean((means(model, x, samples, way, range(SEEDS)) - reference) ** 2, (1, 2))
            for way, samples in COMPARED.items()
        }
        pairs = list(zip(*squares.values(), strict=True))
        measured = {
            "ratio": ratio(pairs),
            "median": float(np.median([ratio([pair]) for pair in pairs])),
            "noise": timing.spread(pairs, ratio) / 2,  # of a mean over the four parts
        }
        label = f"error, 32 quasi-random samples to 128 independent, {networks.KINDS[kind]}"
        errors = {way: round(float(np.sqrt(part.mean())), 6) for way, part in squares.items()}
        yield record.row(f"sampling.{kind}", label, measured, 1.0, errors=errors)


if __name__ == "__main__":
    sys.exit(main())

r"""Run the original report's experiments, with seeds, and write their tables and figures.

    toy2d    four clusters in the plane: flows of several lengths (figures 3 and 4)
    frozen   digits: flows against a Gaussian, where the network is trained as well and where not
    lenet    LeNet on Fashion-MNIST and CIFAR-10 (figure 5), at the report's budget and equal ones
    vgg16    VGG16 on CIFAR-10 (figure 6); it takes a GPU. Its parts: equal, all methods for 100
             epochs, with corrupted and OOD images; long, 300 epochs; report, the report's
             budget; half, with half of the classes held out; ablations, one change at a time;
             draws, one model with several numbers of draws
    defaults Gaussian posteriors by prior, scale at the start and beta, on shallow and deep
             networks, from scratch and after training: what defaults learn; it takes a GPU
    mnist_mlp two layers of 400, 800 and 1200 on MNIST, as in Bayes by Backprop; their weights,
             pruned as well
    lenet5   LeNet on MNIST and Fashion-MNIST: posteriors over weights and over z
    rotation the MNIST part of lenet5, with rotated digits; its results are there
    novelty  classes never seen, and OOD inputs; it takes a GPU
    density  densities in the plane by every flow
    mnist_density bits per dimension of MNIST by flows; it takes a GPU
    vae      VAEs with flow posteriors on binarized MNIST; these four take the options of study.py
    cifar5   CIFAR-10 with five of ten classes, as in the paper of multiplicative normalizing flows
    all      toy2d, frozen and lenet, which need none

Everything that an experiment needs is trained; lib/plan.toml has the settings. Runs have
folders below --runs, and what is there already is not trained again: the same command resumes after
an interruption, and with more --seeds it adds those; another backend, or another first seed of
lenet and vgg16, needs another --runs. If a run fails, the others continue, and the command exits
with 1 at the end. The results go to results/EXPERIMENT/: summary.json (mean and standard deviation
over the seeds), runs.jsonl (every run, keyed by the hash of its settings) and figures, and for
vgg16 the test probabilities of every run. With --add vgg16 trains only what its results do not
hold, even if the folders of those runs are gone, and adds it to them.

Examples:
    python scripts/reproduce.py toy2d
    python scripts/reproduce.py lenet --seeds 0 1 2 3 4 --backend jax --jobs 12
    python scripts/reproduce.py lenet --datasets cifar10 --methods deterministic flow \
        --results outputs/part
    python scripts/reproduce.py vgg16 --backend jax --jobs 6
    python scripts/reproduce.py vgg16 --backend jax --parts equal --methods gaussian flow_last \
        --results outputs/part
    python scripts/reproduce.py vgg16 --backend jax --parts long --seeds 3 4 --add
    python scripts/reproduce.py all --quick
"""

import argparse
import importlib
import json
import os
import sys
import time
import tomllib
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")


STUDIES = {  # experiments that scripts/study.py runs as well, by their names there
    "novelty": "novelty",
    "density": "density",
    "mnist_density": "image_density",
    "vae": "vae",
}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    if name := next((x for x in argv if x in STUDIES), None):
        study = importlib.import_module(f"studies.{STUDIES[name]}").STUDY
        return study.main([x for x in argv if x != name])
    options = parse(argv)
    # Before Keras is imported, here and in the processes that this one starts.
    if options.backend:
        os.environ["KERAS_BACKEND"] = options.backend
    if options.jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    try:
        import lib
        from lib.plan import PLANS
    except ModuleNotFoundError as error:
        print(f"error: {error}: is the backend installed here? See --backend.", file=sys.stderr)
        return 2

    # A broken pool: one of the processes was killed, for want of memory perhaps.
    errors = (lib.RunError, lib.data.DataError, OSError, BrokenProcessPool)
    names = ["toy2d", "frozen", "lenet"] if options.experiment == "all" else [options.experiment]
    given, code = options.seeds, 0
    if options.quick:
        print("A smoke test: the numbers mean nothing.")
    for name in names:
        options.seeds = given or ([0] if options.quick else list(PLANS[name].seeds))
        began = time.perf_counter()
        folder = Path(options.results) / name
        if (lost := what_is_lost(folder, options)) and not options.force:
            code = fail(
                f"{folder} holds results of other {lost}, which these would replace: choose "
                "another --results, or give --force."
            )
            continue
        missing = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            table = experiment(name, options, folder, missing)
        except errors as error:
            code = fail(error)
            continue
        except KeyboardInterrupt:
            print("\ninterrupted; what is finished in --runs stays", file=sys.stderr)
            return 130
        print(f"\n{lib.summary_table(table, COLUMNS)}\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s, written to {folder}")
        if missing and not options.finished:
            failed, why = next(iter(missing.items()))
            code = fail(f"{len(missing)} runs of {name} failed, the first {failed}: {why}")
    if options.results == "results":
        fill_tables()
    return code


def fail(error):
    print(f"error: {error}", file=sys.stderr)
    return 1


def what_is_lost(folder, options):
    """Name an option by which results that are there know more than these will, or None."""
    try:
        before = dict(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["options"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return "kinds"
    if options.quick and not before.get("quick"):
        return "settings, without --quick"
    if options.add:
        return "settings, with --quick" if before.get("quick") and not options.quick else None
    if set(before.get("seeds", ())) - set(options.seeds):
        return "--seeds"
    for name in ("datasets", "methods", "parts"):
        now, then = getattr(options, name), before.get(name)
        if now and (not then or set(then) - set(now)):
            return f"--{name}"
    return None


def fill_tables():
    """Bring the tables of this repository's texts up to date."""
    from lib import files
    from lib.markdown import PAGES, fill

    for path in map(Path, PAGES):
        try:
            files.write_text(path, fill(path.read_text(encoding="utf-8"), "results"))
        except (OSError, ValueError) as error:
            print(f"The tables of {path} stay as they are: {error}")


COLUMNS = ("dataset", "budget", "method", "epochs")


def experiment(name, options, folder, missing):
    """Run an experiment, and write its results and figures; return the rows of its summary."""
    from lib import RunError, figures, published_figures, store, write_results
    from lib.plan import PLANS
    from lib.study import study

    plan, runs = PLANS[name], Path(options.runs) / name
    kept = store.read(folder) if options.add and (folder / "runs.jsonl").exists() else None
    results = study(
        plan,
        runs,
        options.seeds,
        parts=options.parts,
        methods=options.methods if name in METHODS else None,
        datasets=options.datasets if name == "lenet" else None,
        quick=options.quick,
        train=not options.finished,
        kept=kept,
        missing=missing,
        jobs=options.jobs,
        data_dir=options.data_dir,
        log=lambda line: print(line, flush=True),
    )
    print(*results.missing, sep="\n")
    if not any(record["budget"] != "trials" for record in results.records):
        raise RunError(f"{runs} holds no finished run.")
    where = {}
    if plan.probabilities:
        shifts = {name: part.evaluations.get("robustness") for name, part in plan.parts.items()}
        shifts = {name: settings.as_dict() for name, settings in shifts.items() if settings}
        where = {"runs": runs, "kept": results.kept, "evaluations": shifts}
    told = recorded(options, folder)
    table = write_results(folder, results.records, told, results.missing, **where)
    if draw := {**figures.FIGURES, **published_figures.FIGURES}.get(name):
        figures.save(draw(results.records, runs, folder), folder)
    return table


def recorded(options, folder):
    """Return the options that tell what the results hold, with what these are added to."""
    now = dict(vars(options))
    if options.add and (folder / "summary.json").exists():
        before = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["options"]
        now["seeds"] = sorted({*before["seeds"], *now["seeds"]})
        for name in ("methods", "parts"):
            both = before.get(name) and now[name]  # None is all of them
            now[name] = sorted({*before[name], *now[name]}) if both else None
    return now


# The package, and with it the plan, cannot be imported before its backend is chosen.
PLAN = tomllib.loads((Path(__file__).parent / "lib" / "plan.toml").read_text("utf-8"))
EXPERIMENTS = tuple(name for name in PLAN if name != "changes")
METHODS = {
    name: tuple(
        dict.fromkeys(
            method
            for part in PLAN[name]["parts"].values()
            for method in (part["runs"] if part.get("narrowed", True) else ())
            if "continued" not in method
        )
    )
    for name in ("lenet", "vgg16")
}
# What can be run in parts, and added to.
IN_PARTS = ("vgg16", "defaults", "mnist_mlp", "lenet5", "cifar5")


def parse(argv):
    methods = "\n".join(f"methods of {name}: {', '.join(all_)}" for name, all_ in METHODS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=methods, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("experiment", choices=(*EXPERIMENTS, "rotation", "novelty", "all"))
    add(
        "--seeds",
        type=int,
        nargs="+",
        help="default: those of the stored results, or 0 with --quick",
    )
    add(
        "--quick",
        action="store_true",
        help="a smoke test, whose numbers mean nothing: minutes; an hour or more for vgg16",
    )
    add = parser.add_argument_group("a part of an experiment").add_argument
    add("--datasets", nargs="+", choices=("fashion_mnist", "cifar10"), help="of lenet")
    add("--methods", nargs="+", metavar="METHOD", help="of lenet and vgg16, see below")
    where = ", ".join(IN_PARTS)
    add("--finished", action="store_true", help=f"of {where}: train nothing, show what is finished")
    add("--parts", nargs="+", help=f"of {where} (default: all)")
    add = parser.add_argument_group("how it runs").add_argument
    add("--jobs", type=int, default=1, help="runs at once (default 1); more pay on a GPU")
    add("--backend", choices=("tensorflow", "jax"), help="default: KERAS_BACKEND, or tensorflow")
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    add = parser.add_argument_group("what it writes").add_argument
    add("--add", action="store_true", help=f"of {where}: add to the results that are there")
    add("--force", action="store_true", help="replace results of other seeds, methods and the like")
    add("--runs", help="folder of the runs (default outputs/reproduce, or outputs/quick/runs)")
    add("--results", help="folder of the results (default results, or outputs/quick/results)")
    options = parser.parse_args(argv)
    if options.experiment == "rotation":
        options.experiment, options.parts = "lenet5", ["mnist"]
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {options.jobs}")
    in_parts, is_vgg16 = options.experiment in IN_PARTS, options.experiment == "vgg16"
    for name, wrong in (
        ("--finished", options.finished and not in_parts),
        ("--parts", options.parts and not in_parts),
        ("--add", options.add and not in_parts),
        ("--datasets", options.datasets and options.experiment not in ("lenet", "all")),
        ("--methods", options.methods and options.experiment not in (*METHODS, "all")),
    ):
        if wrong:
            parser.error(f"{name} is not of {options.experiment}")
    parts = PLAN[options.experiment]["parts"] if in_parts else ()
    if unknown := set(options.parts or ()) - set(parts):
        parser.error(f"--parts must be some of {', '.join(parts)}; got {', '.join(unknown)}")
    known = METHODS["vgg16" if is_vgg16 else "lenet"]
    if unknown := set(options.methods or ()) - set(known):
        parser.error(f"--methods must be some of {', '.join(known)}; got {', '.join(unknown)}")
    seeds = options.seeds or ()
    valid = all(0 <= seed < 2**31 for seed in seeds)
    if not valid or len(set(seeds)) < len(seeds):
        parser.error(f"--seeds must differ and be at least 0 and below 2**31; got {options.seeds}")
    # A quick look never replaces results.
    options.runs = options.runs or ("outputs/quick/runs" if options.quick else "outputs/reproduce")
    options.results = options.results or ("outputs/quick/results" if options.quick else "results")
    return options


if __name__ == "__main__":
    sys.exit(main())

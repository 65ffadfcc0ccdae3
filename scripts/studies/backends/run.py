"""Short runs of the same networks with each backend, collected in one table."""

import concurrent.futures
import csv
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "train_cifar.py"
# Those chosen for each network on held-out images, at equal budgets.
NETWORKS = {
    "lenet": [
        *("--prior-scale", "0.2", "--learning-rate", "0.06"),
        *("--stochastic-learning-rate", "0.12", "--batch-size", "256"),
    ],
    "vgg16": [
        *("--prior-scale", "0.3", "--beta", "100", "--learning-rate", "0.05"),
        *("--stochastic-learning-rate", "0.02", "--weight-decay", "0.01"),
    ],
}
# All runs share the memory of one GPU.
SHARED = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
SHOWN = ("loss", "nll", "kl", "accuracy")
SCORES = ("accuracy", "nll", "ece")
FULL = [
    "",
    "## Full length",
    "",
    "VGG16 with the Gaussian, 100 epochs in mixed_bfloat16, 128 draws: of `--full`, and of the",
    "runs behind `results/vgg16`.",
    "",
    "| | accuracy | NLL | ECE |",
    "|---|---|---|---|",
]


def execute(options):
    """Do what the command line says; return the status."""
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    cases = {
        name: arguments
        for name, arguments in cases_of(backend, options).items()
        if not options.only or any(part in name for part in options.only)
    }
    if not cases:
        print(f"error: --only {' '.join(options.only)} leaves no run", file=sys.stderr)
        return 2
    failed = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(train, name, x, options): name for name, x in cases.items()}
        for future in concurrent.futures.as_completed(futures):
            name, found = futures[future], future.result()
            if isinstance(found, str):
                failed.append(name)
                print(f"{name} failed: {found}", flush=True)
                continue
            print(f"{name}: loss {', '.join(f'{x:.4f}' for x in found['loss'])}", flush=True)
            keep(found, Path(options.results))
    if failed:
        print(f"error: {len(failed)} of {len(cases)} runs failed", file=sys.stderr)
    return 1 if failed else 0


def cases_of(backend, options):
    """Return the arguments of train_cifar.py for each run, by a name."""
    if options.full:
        arguments = ["--model", "vgg16", "--posterior", "gaussian", *NETWORKS["vgg16"]]
        arguments += ["--epochs", "100", "--log-every", "50", "--mixed-precision", "bfloat16"]
        return {
            f"{backend}-vgg16-gaussian-full-seed{options.seed}": arguments
            + ["--seed", str(options.seed)]
        }
    ways = (True, False) if backend == "tensorflow" else (True,)
    found = {}
    for model, posterior, precision, jit in itertools.product(
        NETWORKS, ("gaussian", "flow"), ("float32", "bfloat16"), ways
    ):
        seed = f"-seed{options.seed}" if options.seed else ""
        name = f"{backend}-{model}-{posterior}-{precision}{seed}{'' if jit else '-no_jit'}"
        arguments = ["--model", model, "--posterior", posterior, *NETWORKS[model]]
        arguments += ["--epochs", str(options.epochs), "--samples", "32"]
        arguments += ["--seed", str(options.seed)]
        if precision != "float32":
            arguments += ["--mixed-precision", precision]
        found[name] = arguments if jit else [*arguments, "--no-jit"]
    return found


def train(name, arguments, options):
    """Run train_cifar.py; return a row, or the last line of what went wrong."""
    folder = Path(options.runs) / name
    command = [sys.executable, str(SCRIPT), *arguments, "--output", str(folder)]
    if options.data_dir:
        command += ["--data-dir", options.data_dir]
    environment = {**os.environ, **SHARED, "KERAS_BACKEND": name.partition("-")[0]}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return row_of(name, folder, arguments)


def row_of(name, folder, arguments):
    """Return what the folder of a run holds."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    with open(folder / "training.csv", encoding="utf-8", newline="") as file:
        epochs = list(csv.DictReader(file))
    curves = {key: [round(float(row[key]), 5) for row in epochs] for key in SHOWN}
    scores = {f"test_{key}": round(metrics[key], 5) for key in SCORES}
    about = {key: metrics[key] for key in ("backend", "versions", "python", "hardware", "seconds")}
    shown = " ".join(["python scripts/train_cifar.py", *arguments, "--backend", about["backend"]])
    return {"name": name, **curves, **scores, **about, "command": shown}


def keep(row, folder):
    """Add a row to the results, in place of one of its name, and write the table anew."""
    path = folder / "runs.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = sorted([x for x in rows if x["name"] != row["name"]] + [row], key=lambda x: x["name"])
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(page(rows), encoding="utf-8")


def page(rows):
    """Return a page with one line for each network, and a column for each way of running it."""
    cells, full = {}, [row for row in rows if "-full" in row["name"]]
    for row in rows:
        if row in full:
            continue
        backend, rest = row["name"].split("-", 1)
        case, _, no_jit = rest.partition("-no_jit")
        way = {"jax": "JAX"}.get(
            backend, "TensorFlow, no XLA" if "no_jit" in rest else "TensorFlow"
        )
        cells.setdefault(case, {})[way] = row
    ways = ("TensorFlow", "TensorFlow, no XLA", "JAX")
    lines = [
        "# The same networks with each backend",
        "",
        "The training loss after each epoch, the KL after the last, the test accuracy and NLL.",
        "The seed is 0 unless a row names another; backends, and XLA, draw other noise from it,",
        "so rows of several seeds show how far two runs of one kind differ. Without XLA means",
        "training steps; the test is compiled. [`runs.json`](runs.json) has the command, the",
        "versions and the seconds of each run. To reproduce, run",
        "`python scripts/study.py backends --jobs 8` in each environment.",
        "An empty cell was not run. Runs share the GPU with others, so the seconds say little.",
        "",
    ]
    machines = sorted({f"{row['backend']}: {describe(row)}" for row in rows})
    lines += [*(f"- {machine}" for machine in machines), ""]
    lines += ["| | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for case, found in sorted(cells.items()):
        texts = [text(found[way]) if way in found else "" for way in ways]
        lines.append(f"| {case.replace('-', ', ')} | " + " | ".join(texts) + " |")
    if full:
        lines += FULL
        lines += [f"| {row['name'].replace('-', ', ')} | {scores(row)} |" for row in full]
        stored = Path("results/vgg16/runs.jsonl").read_text(encoding="utf-8").splitlines()
        for run in map(json.loads, stored):
            if (run["method"], run["budget"]) == ("gaussian", "equal"):
                name = f"{run['backend']}, {run['model']}, seed {run['seed']}, of results/vgg16"
                lines.append(f"| {name} | {scores({f'test_{x}': run[x] for x in SCORES})} |")
    return "\n".join(lines) + "\n"


def scores(row):
    return " | ".join(f"{row[f'test_{name}']:.4f}" for name in SCORES)


def describe(row):
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return f"{row['hardware']}; Python {row['python']}, {versions}"


def text(row):
    losses = " → ".join(f"{x:.3f}" for x in row["loss"])
    return f"{losses}; {row['kl'][-1]:.1f}; {row['test_accuracy']:.3f}, {row['test_nll']:.3f}"

"""What a finished run shows: figures and a model card."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tfp_ibnn import data
from tfp_ibnn._core import files
from tfp_ibnn.experiments.scoring import Scores

__all__ = ["write_report"]


def write_report(
    folder: Path, metrics: dict[str, Any], scores: Scores, test: tuple[np.ndarray, np.ndarray]
) -> None:
    """Write `reliability.png`, `training.png`, `images.png` and `MODEL_CARD.md`.

    Args:
        folder: of the run.
        metrics: what `metrics.json` will hold.
        scores: of the test.
        test: images and labels of the test.
    """
    # Only now: pyplot takes a while to import, and a run's first errors should not wait for it.
    from tfp_ibnn import plots

    images, labels = test
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    plots.reliability_diagram(scores.mean, labels, title=metrics["method"], ax=figure.subplots())
    _save(figure, folder / "reliability.png")
    _save(plots.training_panel({metrics["method"]: history(folder)}), folder / "training.png")
    count = min(8, len(images) // 2)
    if count:
        chosen = plots.extreme_images(
            images,
            scores.entropy,
            count=count,
            labels=labels,
            predictions=scores.mean,
            class_names=_classes(metrics["options"]),
        )
        _save(chosen, folder / "images.png")
    files.write_text(folder / "MODEL_CARD.md", model_card(metrics))


def history(folder: Path) -> dict[str, list[float]]:
    """Return what the training stage of a run logged, by name."""
    with (folder / "training.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: [float(row[name]) for row in rows if row[name]] for name in rows[0] if name != "epoch"
    }


def model_card(metrics: dict[str, Any]) -> str:
    """Return a description of the trained model, in Markdown."""
    options = metrics["options"]
    dataset = data.DATASETS[options["dataset"]]
    kind = {
        "deterministic": "a deterministic network",
        "mc_dropout": "a deterministic network, averaged over dropout masks",
    }.get(metrics["method"], f"an implicit Bayesian network with a {metrics['method']} posterior")
    tested = "held-out training" if metrics["tested_on"] == "validation" else "test"
    rows = [("accuracy", "accuracy"), ("NLL", "nll"), ("Brier score", "brier"), ("ECE", "ece")]
    scores = "\n".join(f"| {label} | {metrics[key]:.4f} |" for label, key in rows)
    settings = "\n".join(f"| `{name}` | `{value}` |" for name, value in options.items())
    versions = ", ".join(f"{name} {version}" for name, version in metrics["versions"].items())
    height, width, channels = dataset.image_shape
    return f"""# {options["model"]} on {options["dataset"]}

This is {kind}, with {metrics["parameters"]:,} parameters.

## What goes in and what comes out

Images of {height} x {width} pixels and {channels} channel{"s" if channels > 1 else ""}, raw values
from 0 to {dataset.maximum}; normalisation is part of the model. Out come the classes
{", ".join(_classes(options))}: logits from `model.keras`, and from `saved_model/`, if it is there,
averaged probabilities with their uncertainty.

    import keras, tfp_ibnn as ibnn  # without the second, Keras cannot load the file
    model = keras.saving.load_model("model.keras")
    {_use(metrics)}

## How good it is

| {metrics["test_size"]:,} {tested} images, {metrics["samples"]} draws | |
|---|---|
{scores}

Trained on {metrics["train_size"]:,} images with one seed ({options["seed"]}). The scores hold for
images like these; on others the confidence can be wrong. `scripts/evaluate.py` measures that.

## How it was made

    {metrics["command"]}

Backend {metrics["backend"]}; {metrics["hardware"]}; Python {metrics["python"]}; {versions}.
Seconds: {", ".join(f"{name} {seconds}" for name, seconds in metrics["seconds"].items())}.

| setting | value |
|---|---|
{settings}
"""


def _classes(options: dict[str, Any]) -> tuple[str, ...]:
    return data.DATASETS[options["dataset"]].classes[: options.get("classes")]


def _use(metrics: dict[str, Any]) -> str:
    """Return the line that predicts as the test did."""
    if metrics["method"] == "deterministic":
        return "model.predict(images)  # logits"
    dropout = ", dropout=True" if metrics["method"] == "mc_dropout" else ""
    options = f"samples={metrics['samples']}, seed={metrics['options']['seed']}{dropout}"
    return f"ibnn.MonteCarlo(model, {options}).predict(images)  # mean, entropy, epistemic, ..."


def _save(figure: Figure, path: Path) -> None:
    import matplotlib.pyplot as plt

    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)

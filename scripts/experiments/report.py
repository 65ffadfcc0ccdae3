"""What a finished run shows: figures and a model card."""

import pandas as pd

from experiments import files
from experiments.settings import DATASETS

__all__ = ["history", "write_report"]


def write_report(folder, metrics, scores, test):
    """Write `reliability.png`, `training.png`, `images.png` and `MODEL_CARD.md`."""
    # Only now: pyplot takes a while to import, and a run's first errors should not wait for it.
    from experiments.figures import facets, save
    from tfp_ibnn import plots

    (images, labels), method = test, metrics["method"]
    figures = {
        "reliability.png": facets(
            [[()]],
            lambda ax: plots.reliability_diagram(scores.mean, labels, title=method, ax=ax),
            (4.6, 4.2),
            grid_lines=None,
        ),
        "training.png": plots.training_panel({method: history(folder)}),
    }
    if (number := min(8, len(images) // 2)) and images.ndim > 2:
        known = {"labels": labels, "predictions": scores.mean}
        known["class_names"] = _classes(metrics["options"])
        figures["images.png"] = plots.extreme_images(images, scores.entropy, count=number, **known)
    save(figures, folder)
    files.write_text(folder / "MODEL_CARD.md", model_card(metrics))


def history(folder):
    """Return what the training stage of a run logged, by name."""
    rows = pd.read_csv(folder / "training.csv")
    return {name: rows[name].dropna().to_list() for name in rows if name != "epoch"}


def model_card(metrics):
    """Return a description of the trained model, in Markdown."""
    options = metrics["options"]
    dataset = DATASETS[options["dataset"]]
    kind = {
        "deterministic": "a deterministic network",
        "mc_dropout": "a deterministic network, averaged over dropout masks",
    }.get(metrics["method"], f"an implicit Bayesian network with a {metrics['method']} posterior")
    tested = "held-out training" if metrics["tested_on"] == "validation" else "test"
    rows = [("accuracy", "accuracy"), ("NLL", "nll"), ("Brier score", "brier"), ("ECE", "ece")]
    scores = "\n".join(f"| {label} | {metrics[key]:.4f} |" for label, key in rows)
    settings = "\n".join(f"| `{name}` | `{value}` |" for name, value in options.items())
    versions = ", ".join(f"{name} {version}" for name, version in metrics["versions"].items())
    shape = " x ".join(map(str, dataset.image_shape))
    inputs = f"Images of {shape} (height, width, channels), raw values from 0 to {dataset.maximum};"
    inputs = f"{inputs}\nnormalisation is part of the model" if len(shape) > 1 else "Points (2,)"
    # The line that predicts as the test did.
    use = "model.predict(images)  # logits"
    if metrics["method"] != "deterministic":
        dropout = ", dropout=True" if metrics["method"] == "mc_dropout" else ""
        draws = f"samples={metrics['samples']}, seed={options['seed']}{dropout}"
        use = f"ibnn.MonteCarlo(model, {draws}).predict(images)  # mean, entropy, epistemic, ..."
    return f"""# {options["model"]} on {options["dataset"]}

This is {kind}, with {metrics["parameters"]:,} parameters.

## What goes in and what comes out

{inputs}. Out come the classes
{", ".join(_classes(options))}: logits from `model.keras`, and from `saved_model/`, if it is there,
averaged probabilities with their uncertainty.

    import keras, tfp_ibnn as ibnn  # without the second, Keras cannot load the file
    model = keras.saving.load_model("model.keras")
    {use}

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


def _classes(options):
    return DATASETS[options["dataset"]].classes[: options.get("classes")]

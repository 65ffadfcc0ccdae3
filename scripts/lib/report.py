"""What a finished run shows: figures and a model card."""

from pathlib import Path

from lib import files
from lib.settings import DATASETS
from lib.store import history


def write_report(folder, metrics, scores, test):
    """Write `reliability.png`, `training.png`, `images.png` and `MODEL_CARD.md`."""
    # Only now: pyplot takes a while to import, and a run's first errors should not wait for it.
    from lib.figures import save
    from lib.panels import extreme_images, training_panel
    from tfp_ibnn import plots

    (images, labels), method = test, metrics["method"]
    reliability = plots.reliability_diagram(scores.mean, labels, title=method)
    figures = {"reliability.png": reliability.figure}
    figures["training.png"] = training_panel({method: history(folder)})
    if (number := min(8, len(images) // 2)) and images.ndim > 2:
        known = {"labels": labels, "predictions": scores.mean}
        known["class_names"] = _classes(metrics["options"])
        figures["images.png"] = extreme_images(images, scores.entropy, count=number, **known)
    save(figures, folder)
    files.write_text(folder / "MODEL_CARD.md", model_card(metrics))


def model_card(metrics):
    """Return a description of the trained model, in Markdown, by `model_card.md`."""
    options, method = metrics["options"], metrics["method"]
    dataset, inputs = DATASETS[options["dataset"]], "Points in the plane, (2,)"
    masks = ", averaged over dropout masks" if method == "mc_dropout" else ""
    kind = f"an implicit Bayesian network with a {method} posterior"
    kind = f"a deterministic network{masks}" if masks or method == "deterministic" else kind
    if len(dataset.image_shape) > 1:
        shape = " x ".join(map(str, dataset.image_shape))
        inputs = f"Images of {shape} (height, width, channels), raw values from 0 to "
        inputs += f"{dataset.maximum};\nnormalisation is part of the model"
    # The line that predicts as the test did.
    use = "model.predict(images)  # logits"
    if method != "deterministic":
        dropout = ", dropout=True" if method == "mc_dropout" else ""
        draws = f"samples={metrics['samples']}, seed={options['seed']}{dropout}"
        use = f"ibnn.MonteCarlo(model, {draws}).predict(images)  # mean, entropy, epistemic, ..."
    more = {
        **{"kind": kind, "inputs": inputs, "classes": ", ".join(_classes(options)), "use": use},
        "tested_on": "held-out training" if metrics["tested_on"] == "validation" else "test",
        "packages": ", ".join(" ".join(pair) for pair in metrics["versions"].items()),
        "times": ", ".join(f"{name} {seconds}" for name, seconds in metrics["seconds"].items()),
        "settings": "\n".join(f"| `{name}` | `{value}` |" for name, value in options.items()),
    }
    template = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return template.format(**{**metrics, **more})


def _classes(options):
    return DATASETS[options["dataset"]].classes[: options.get("classes")]

"""What a finished run shows: figures and a model card."""

from pathlib import Path

from lib import files, networks
from lib.scoring import SCORES
from lib.settings import DATASETS, Settings
from lib.store import history
from tfp_ibnn.metrics.calibration import ece_floor


def write_report(folder, metrics, scores, test, baseline=None):
    """Write `reliability.png`, `training.png`, `images.png` and `MODEL_CARD.md`.

    `baseline` are the scores of the deterministic network that the training began with.
    """
    # Only now: pyplot takes a while to import, and a run's first errors should not wait for it.
    from lib.figures import save
    from lib.panels import extreme_images, training_panel
    from tfp_ibnn import plots

    (images, labels), method = test, metrics["method"]
    reliability = plots.reliability_diagram(scores.mean, labels, title=method)
    figures = {"reliability.png": reliability.figure}
    figures["training.png"] = training_panel(
        {method: history(folder)}, loss_label=loss_label(metrics["options"])
    )
    if (number := min(8, len(images) // 2)) and images.ndim > 2:
        known = {"labels": labels, "predictions": scores.mean}
        known["class_names"] = _classes(metrics["options"])
        figures["images.png"] = extreme_images(images, scores.entropy, count=number, **known)
    save(figures, folder)
    files.write_text(folder / "MODEL_CARD.md", model_card(metrics, scores, baseline))


def loss_label(options):
    """Return what the training loss of these settings is called in a figure."""
    if options["posterior"] == "none":
        return "NLL"
    if options["posterior"] not in networks.POSTERIORS:  # a file may give each layer its own beta
        return "loss"
    is_elbo = options["beta"] == 1 and not options["gamma"] and not options["kl_warmup"]
    return "negative ELBO" if is_elbo and options["kl_reduction"] == "sum" else "NLL + weighted KL"


def model_card(metrics, scores, baseline=None):
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
        "scores": _scores_table(metrics, scores, baseline),
        "defaults": _defaults(options),
        **{"kind": kind, "inputs": inputs, "classes": ", ".join(_classes(options)), "use": use},
        "tested_on": "held-out training" if metrics["tested_on"] == "validation" else "test",
        "packages": ", ".join(" ".join(pair) for pair in metrics["versions"].items()),
        "times": ", ".join(f"{name} {seconds}" for name, seconds in metrics["seconds"].items()),
        "settings": "\n".join(f"| `{name}` | `{value}` |" for name, value in options.items()),
    }
    template = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return template.format(**{**metrics, **more})


def _scores_table(metrics, scores, baseline):
    """Return the scores, and those of the deterministic network where there is one."""
    tested = {f"this model, {metrics['samples']} draws": scores}
    if baseline is not None:
        tested["the deterministic network it began with"] = baseline
    rows = [f"| | {' | '.join(tested)} |", "|---" * (len(tested) + 1) + "|"]
    found = [(x.scores() | {"floor": ece_floor(x.mean, 0)}) for x in tested.values()]
    for key, name in (SCORES | {"floor": "ECE of a perfectly calibrated model"}).items():
        rows.append(f"| {name} | {' | '.join(f'{values[key]:.4f}' for values in found)} |")
    return "\n".join(rows)


def _defaults(options):
    """Return a sentence on the defaults of the library for these settings."""
    settings = Settings(**options)
    if not settings.is_stochastic:
        return "It has no prior."
    known = settings.library_defaults
    texts = [f"`{name}` {value:.4g}" for name, value in known.items()]
    same = [f"`{name}`" for name, value in known.items() if options[name] == value]
    applied = f"applied: {', '.join(same)}" if same else "none applied"
    return f"The library's defaults for this network and these data: {', '.join(texts)}; {applied}."


def _classes(options):
    return DATASETS[options["dataset"]].classes[: options.get("classes")]

"""A trained model on images unlike those that it was trained on."""

import dataclasses
import hashlib
import itertools
import time
from collections import namedtuple
from pathlib import Path

import keras
import numpy as np
import pandas as pd

from lib import checks, data, files, shifts
from lib.folder import RunError, RunFolder, read_record
from lib.markdown import markdown_table
from lib.scoring import HELD_OUT, SCORES, Scorer, Scores, read_model
from lib.store import METHODS, provenance
from tfp_ibnn import metrics

UNCERTAINTIES = ("entropy", "epistemic")
_DETECTION = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}
_KEPT = 20  # draws of the image that is shown
# The gradient of an average holds all its draws in memory: images times draws of one step.
_AT_ONCE = 512


@checks.settings("evaluate")
class Settings(checks.Checked):
    """What to evaluate a model on, see `settings.toml`."""

    def __post_init__(self):
        super().__post_init__()
        if self.foreign is None:
            object.__setattr__(self, "foreign", shifts.USUAL[self.dataset])
        others = (name for name in data.DATASETS if name != self.dataset)
        checks.each(checks.choice(*others), empty=True)("foreign", self.foreign)
        if self.classes is not None:
            known = len(data.DATASETS[self.dataset].classes)
            checks.choice(*range(2, known))("classes", self.classes)

    def __len__(self):
        sizes = {"corruptions": len(self.corruptions) * len(self.severities)}
        sizes |= {"rotations": len(self.degrees), "fgsm": len(self.epsilons)}
        sizes["foreign"] = len(self.foreign) + (self.classes is not None)
        return 1 + sum(size for name, size in sizes.items() if name in self.shifts)

    def as_dict(self):
        found = dataclasses.asdict(self)
        for name in ("classes", "shown"):
            if found[name] is None:
                del found[name]  # as in the records of the first evaluations
        return {key: list(v) if isinstance(v, tuple) else v for key, v in found.items()}


# What a model does on all shifts: rows, one for each set of images with `shift`, `name`, `level`,
# and measures; the scores of clean images; and those of OOD datasets, whose labels mean nothing.
Measured = namedtuple("Measured", "rows clean ood")


def evaluate(model, settings, output, data_dir=None, *, export=None, log=print):
    """Measure a `.keras` file with logits as its output; return what `robustness.json` holds.

    The folder gets `settings.json`, then `robustness.png` and `foreign.png`, where such shifts were
    asked for, and `robustness.json` at last; or `failure.txt`, if it fails. If `robustness.json` is
    there already, from the same model and settings, it is read and nothing is measured. `export` is
    a folder, missing or empty, for a SavedModel of what was measured.
    """
    path, backend = Path(model), keras.backend.backend()
    network = read_model(path, settings.dataset, settings.classes)
    if export is not None:
        _check_export(Path(export), Path(output))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with RunFolder(output, {**settings.as_dict(), "model": digest, "backend": backend}) as folder:
        folder.claim()
        try:
            scorer = Scorer(network, settings.samples, settings.seed)
        except ValueError as error:
            raise RunError(f"The model {path} cannot be scored: {_first_line(error)}") from error
        if (folder / "robustness.json").exists():
            log(f"{folder.path}: finished already.")
            record = read_record(folder / "robustness.json")
        else:
            record = _evaluate(scorer, settings, folder, data_dir, {str(path): digest}, log)
    if export is not None:
        scorer.export(export)
        log(f"SavedModel: {export}")
    return record


def _evaluate(scorer, settings, folder, data_dir, model, log):
    # Only now: matplotlib takes a while to import.
    from lib import robustness_figures
    from lib.figures import save

    _, test = data.load(settings.dataset, data_dir)
    others, wanted = {}, "foreign" in settings.shifts
    if settings.classes is not None:
        test, (unknown, _) = shifts.split_classes(*test, settings.classes)
        others = {HELD_OUT: unknown.astype("float32")} if wanted else {}
    test = tuple(part[: settings.limit] for part in test)
    if wanted and not (settings.foreign or others):
        log(f"No OOD data: {settings.dataset} has no usual one, name some.")
    for name in settings.foreign if wanted else ():
        _, (images, _) = data.load(name, data_dir)
        others[name] = shifts.convert_images(images[: len(test[0])], name, settings.dataset)
    began = time.perf_counter()
    found = measure(scorer, settings, test, others, log)
    record = {"rows": found.rows, "draws": found.clean.samples, "model": model}
    record["seconds"] = round(time.perf_counter() - began, 1)
    record |= provenance(settings.as_dict())
    if HELD_OUT in found.ood:
        unknown = found.ood[HELD_OUT].mean.astype("float16")
        np.savez_compressed(folder / "unknown.npz", unknown=unknown)
    save(robustness_figures.figures(found, settings.dataset), folder.path)
    files.write_json(folder / "robustness.json", record)
    return record


def measure(scorer, settings, test, others, log=lambda line: None):
    """Predict all shifts of some labelled images, and OOD ones; return what was `Measured`."""
    images, labels = test
    began, rows, ood = time.perf_counter(), [], {}

    def add(what, level, name, found, **more):
        about = {"shift": what, "name": name, "level": level, "images": len(found.mean)}
        means = {kind: float(np.mean(getattr(found, kind))) for kind in UNCERTAINTIES}
        rows.append({**about, **({} if more else found.scores()), **means, **more})
        log(f"[{len(rows)}/{len(settings)}] {_line(rows[-1])}, {time.perf_counter() - began:.0f} s")

    # In float32 all, as some shifts are: another type would be compiled again.
    clean = _score(scorer, images.astype("float32"), labels)
    add("clean", 0, "", clean)
    for *what, shifted in _shifted(settings, images, labels, scorer):
        add(*what, _score(scorer, shifted, labels))
    for name, unknown in others.items():
        # As many as the known ones, so that no batch has a new shape.
        number = min(len(unknown), len(images))
        found = _score(scorer, unknown[np.arange(len(images)) % number], labels)
        parts = (part[:number] for part in (found.mean, found.epistemic, labels))
        ood[name] = Scores(*parts, found.samples)
        add("foreign", None, name, ood[name], **_detected(clean, ood[name]))
    if settings.shown is not None:
        _keep_draws(rows, scorer, shifts.to_bytes(images[settings.shown][None], settings.dataset))
    return Measured(rows, clean, ood)


def _shifted(settings, images, labels, scorer):
    dataset = settings.dataset
    pixels = shifts.to_bytes(images, dataset)
    if "corruptions" in settings.shifts:
        for name, severity in itertools.product(settings.corruptions, settings.severities):
            changed = shifts.corrupt(pixels, name, severity, settings.seed)
            yield "corruption", severity, name, shifts.from_bytes(changed, dataset)
    if "rotations" in settings.shifts:
        for degrees in settings.degrees:
            changed = shifts.rotate(pixels, degrees)
            yield "rotation", degrees, "", shifts.from_bytes(changed, dataset)
    if "fgsm" in settings.shifts:
        # What is attacked is what is scored: the average, where there are draws.
        draws = 1 if scorer.monte_carlo is None else scorer.monte_carlo.samples
        options = {"seed": settings.seed, "batch_size": max(1, min(128, _AT_ONCE // draws))}
        attacked = scorer.monte_carlo or scorer.model
        direction = shifts.fgsm_direction(attacked, images, labels, **options)
        maximum = data.DATASETS[dataset].maximum
        for epsilon in settings.epsilons:
            step = np.float32(epsilon * maximum / 255) * direction
            yield "fgsm", epsilon, "", np.clip(images.astype("float32") + step, 0, maximum)


def _keep_draws(rows, scorer, image):
    """Give rows of rotations the class probabilities of one image, turned as far."""
    turned = {row["level"]: row for row in rows if row["shift"] in ("clean", "rotation")}
    images = np.concatenate([shifts.rotate(image, degrees) for degrees in turned])
    for row, draws in zip(turned.values(), scorer.draws(images.astype("float32")), strict=True):
        row["shown"] = draws.mean(axis=0).round(4).tolist()
        row["draws"] = draws[:_KEPT].round(3).tolist()


def _score(scorer, images, labels):
    try:
        found = scorer.score(images, labels)
    except ValueError as error:
        raise RunError(f"The model cannot predict: {_first_line(error)}") from error
    if not np.isfinite(found.mean).all():
        raise RunError("The predictions of the model are not finite: its training diverged.")
    return found


def _first_line(error):
    return str(error).splitlines()[0]


def _detected(known, unknown):
    row = {}
    for kind in UNCERTAINTIES:
        # A single network has no draws that could disagree.
        found = dict.fromkeys(_DETECTION)
        if kind == "entropy" or known.samples > 1:
            found = metrics.ood_scores(getattr(known, kind), getattr(unknown, kind))
        row |= {f"{kind}_{score}": value for score, value in found.items()}
    return row


def _line(row):
    if row["shift"] == "foreign":
        found = row["epistemic_auroc"]
        more = "" if found is None else f", of the epistemic uncertainty {found:.4f}"
        return f"OOD {row['name']}: AUROC of the entropy {row['entropy_auroc']:.4f}{more}"
    level = f"{row['level']:g}" if row["level"] else ""
    name = " ".join(filter(None, [row["shift"], row["name"], level]))
    return f"{name}: accuracy {row['accuracy']:.4f}, NLL {row['nll']:.4f}, ECE {row['ece']:.4f}"


def _check_export(export, output):
    if (backend := keras.backend.backend()) != "tensorflow":
        raise RunError(f"A SavedModel takes TensorFlow, not {backend}: give --backend tensorflow.")
    if export.exists() and (not export.is_dir() or any(export.iterdir())):
        raise RunError(f"{export} holds something already: choose another folder to export to.")
    if output.resolve().is_relative_to(export.resolve()):
        raise RunError(f"{export} is to hold the results: choose another folder to export to.")


def table(rows):
    """Return rows of `robustness.json` as Markdown tables, for the terminal.

    One has the labelled images, of the corruptions their mean at each severity; the other, if there
    are any, the OOD datasets.
    """
    rows, titles = pd.DataFrame(rows), {**SCORES, "entropy": "entropy", "epistemic": "epistemic"}
    is_ood = rows["shift"] == "foreign"
    groups = rows[~is_ood].groupby(["shift", "level"], sort=False)
    means = groups[list(titles)].mean().map("{:.4f}".format).rename(columns=titles)
    labels = []
    for shift, level in means.index:
        names = groups.get_group((shift, level))["name"]
        name = names.iloc[0] if len(names) == 1 else f"mean of {len(names)}"
        labels.append(METHODS["labels"][shift].format(level, name=name))
    means.insert(0, "images", labels)
    tables = [means]
    if is_ood.any():
        lines = []
        for row, kind in itertools.product(rows[is_ood].to_dict("records"), UNCERTAINTIES):
            values = [*(row[f"{kind}_{key}"] for key in _DETECTION), rows[kind].iloc[0], row[kind]]
            cells = ["-" if pd.isna(value) else f"{value:.4f}" for value in values]
            lines.append([row["name"], kind, *cells])
        columns = ["OOD", "by", *_DETECTION.values(), "mean known", "mean OOD"]
        tables.append(pd.DataFrame(lines, columns=columns))
    return "\n\n".join(markdown_table(one, aligned=True) for one in tables)

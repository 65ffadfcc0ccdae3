"""A trained model on images unlike those that it was trained on."""

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfp_ibnn import data, metrics
from tfp_ibnn._core import backend, checks, files
from tfp_ibnn.experiments import foreign
from tfp_ibnn.experiments.folder import RunError, RunFolder, read_record
from tfp_ibnn.experiments.provenance import provenance
from tfp_ibnn.experiments.saved import read_model
from tfp_ibnn.experiments.scoring import Scorer, Scores

__all__ = ["SHIFTS", "Measured", "Settings", "evaluate", "measure"]

Arrays = tuple[np.ndarray, np.ndarray]
Row = dict[str, Any]
Say = Callable[[str], None]

SHIFTS = ("clean", "corruptions", "rotations", "fgsm", "foreign")
HELD_OUT = "held-out classes"
"""Name of the foreign images that are of the model's own dataset."""
UNCERTAINTIES = ("entropy", "epistemic")
_DETECTION = {
    "auroc": metrics.auroc,
    "aupr": metrics.aupr,
    "fpr95": metrics.fpr_at_95_tpr,
}
# The gradient of an average holds all its draws in memory: images times draws of one step.
_ATTACKED_AT_ONCE = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to evaluate a model on.

    Args:
        dataset: whose test images, those that the model was trained for.
        classes: number of the first classes that the model knows; images of the others are foreign.
            None is all.
        shifts: some of `SHIFTS`. Clean images are always measured: the others are compared with
            them.
        corruptions: names, see `ibnn.data.corrupt`.
        severities: of the corruptions, 1 to 5.
        degrees: angles of the rotations.
        epsilons: steps of FGSM, on the scale from 0 to 255.
        foreign: names of other datasets; None takes those of `foreign.FOREIGN`.
        samples: draws, where the model has any.
        limit: take only this many test images.
        seed: of the draws and the corruptions.
    """

    dataset: str
    classes: int | None = None
    shifts: Sequence[str] = SHIFTS
    corruptions: Sequence[str] = data.CORRUPTIONS
    severities: Sequence[int] = (1, 2, 3, 4, 5)
    degrees: Sequence[float] = tuple(range(15, 181, 15))
    epsilons: Sequence[float] = (1, 2, 4, 8)
    foreign: Sequence[str] | None = None
    samples: int = 64
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        names = tuple(data.DATASETS)
        checks.one_of("dataset", self.dataset, names)
        others = tuple(name for name in names if name != self.dataset)
        if self.foreign is None:
            object.__setattr__(self, "foreign", foreign.FOREIGN[self.dataset])
        tests = {
            "shifts": lambda value: checks.one_of("shifts", value, SHIFTS),
            "corruptions": lambda value: checks.one_of("corruptions", value, data.CORRUPTIONS),
            "severities": lambda value: checks.one_of("severities", value, range(1, 6)),
            "degrees": lambda value: checks.finite("degrees", value),
            "epsilons": lambda value: checks.positive("epsilons", value),
            "foreign": lambda value: checks.one_of("foreign", value, others),
        }
        for name, check in tests.items():
            # Each once: a mean over corruptions must not count one twice.
            values = tuple(dict.fromkeys(check(value) for value in getattr(self, name)))
            if not values and name != "foreign":
                raise ValueError(f"`{name}` must hold one value at least; got none.")
            object.__setattr__(self, name, values)
        if self.classes is not None:
            checks.one_of(
                "classes", self.classes, range(2, len(data.DATASETS[self.dataset].classes))
            )
        checks.positive_integer("samples", self.samples)
        if self.limit is not None:
            checks.positive_integer("limit", self.limit)
        checks.whole("seed", self.seed)

    def __len__(self) -> int:
        """Return the number of sets of images to predict."""
        sizes = {
            "corruptions": len(self.corruptions) * len(self.severities),
            "rotations": len(self.degrees),
            "fgsm": len(self.epsilons),
            "foreign": len(self.foreign) + (self.classes is not None),
        }
        return 1 + sum(size for name, size in sizes.items() if name in self.shifts)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings, ready for JSON."""
        found = dataclasses.asdict(self)
        if self.classes is None:
            del found["classes"]  # as in the records of the first evaluations
        return {key: list(v) if isinstance(v, tuple) else v for key, v in found.items()}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a model does on all shifts."""

    rows: list[Row]
    """One for each set of images: `shift`, `name`, `level`, `images` and measures."""
    clean: Scores
    foreign: dict[str, Scores]
    """By the dataset's name; their labels mean nothing."""


def evaluate(
    model: str | os.PathLike,
    settings: Settings,
    output: str | os.PathLike,
    data_dir: str | os.PathLike | None = None,
    *,
    export: str | os.PathLike | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Measure a saved model; return what `robustness.json` holds.

    The folder gets `settings.json`, then `robustness.png` and `foreign.png`, where such shifts were
    asked for, and `robustness.json` at last; or `failure.txt`, if it fails. If `robustness.json` is
    there already, from the same model and settings, it is read and nothing is measured.

    Args:
        model: a `.keras` file with logits as its output.
        settings: what to evaluate it on.
        output: folder of the evaluation, new or of the same one.
        data_dir: where the data is cached, see `ibnn.data.load`.
        export: folder, missing or empty, for a SavedModel of what was measured.
        say: called with lines of progress.

    Raises:
        RunError: if the model does not fit, or a folder holds something else.
        DataError: if the data cannot be had.
    """
    path = Path(model)
    network = read_model(path, settings.dataset, settings.classes)
    if export is not None:
        _check_export(Path(export), Path(output))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    identity = {**settings.as_dict(), "model": digest, "backend": backend.NAME}
    with RunFolder(output, identity) as folder:
        folder.claim()
        try:
            scorer = Scorer(network, settings.samples, settings.seed)
        except ValueError as error:
            raise RunError(f"The model {path} cannot be scored: {_first_line(error)}") from error
        if (folder / "robustness.json").exists():
            say(f"{folder.path}: finished already.")
            record = read_record(folder / "robustness.json")
        else:
            record = _evaluate(scorer, settings, folder, data_dir, {str(path): digest}, say)
    if export is not None:
        scorer.export(export)
        say(f"SavedModel: {export}")
    return record


def measure(
    scorer: Scorer,
    settings: Settings,
    test: Arrays,
    others: dict[str, np.ndarray],
    say: Say = lambda line: None,
) -> Measured:
    """Predict all shifts of some labelled images, and foreign ones.

    Args:
        scorer: of the model.
        settings: what to measure.
        test: images, uint8 as `ibnn.data.load` has them, and labels.
        others: images of foreign datasets by name, in the model's form.
        say: called with lines of progress.
    """
    images, labels = test
    began = time.perf_counter()
    rows, strangers = [], {}

    def add(row: Row) -> None:
        rows.append(row)
        seconds = time.perf_counter() - began
        say(f"[{len(rows)}/{len(settings)}] {_line(row)}, {seconds:.0f} s")

    # In float32 all, as some shifts are: another type would be compiled again.
    clean = _score(scorer, images.astype("float32"), labels)
    add(_labelled({"shift": "clean", "name": "", "level": 0}, clean))
    for what, shifted in _shifted(settings, images, labels, scorer):
        add(_labelled(what, _score(scorer, shifted, labels)))
    for name, unknown in others.items():
        # As many as the known ones, so that no batch has a new shape.
        count = min(len(unknown), len(images))
        filled = unknown[np.arange(len(images)) % count]
        found = _score(scorer, filled, labels)
        strangers[name] = Scores(
            found.mean[:count], found.epistemic[:count], labels[:count], found.samples
        )
        add(_unlabelled(name, clean, strangers[name]))
    return Measured(rows, clean, strangers)


def _evaluate(
    scorer: Scorer,
    settings: Settings,
    folder: RunFolder,
    data_dir: str | os.PathLike | None,
    model: dict[str, str],
    say: Say,
) -> dict[str, Any]:
    _, test = data.load(settings.dataset, data_dir)
    others = {}
    if settings.classes is not None:
        test, (unknown, _) = foreign.by_class(*test, settings.classes)
        if "foreign" in settings.shifts:
            others[HELD_OUT] = unknown.astype("float32")
    test = tuple(part[: settings.limit] for part in test)
    if "foreign" in settings.shifts:
        if not (settings.foreign or others):
            say(f"No foreign data: there is no usual one for {settings.dataset}, name some.")
        for name in settings.foreign:
            _, (images, _) = data.load(name, data_dir)
            others[name] = foreign.like(images[: len(test[0])], name, settings.dataset)
    began = time.perf_counter()
    found = measure(scorer, settings, test, others, say)
    record = {
        "rows": found.rows,
        "draws": found.clean.samples,
        "model": model,
        "seconds": round(time.perf_counter() - began, 1),
        **provenance(settings.as_dict()),
    }
    # Only now: matplotlib takes a while to import.
    from tfp_ibnn.experiments.robustness_figures import save_figures

    save_figures(found, settings.dataset, folder.path)
    files.write_json(folder / "robustness.json", record)
    return record


def _shifted(
    settings: Settings, images: np.ndarray, labels: np.ndarray, scorer: Scorer
) -> Iterator[tuple[Row, np.ndarray]]:
    """Yield what each shift is, and its images."""
    dataset = settings.dataset
    pixels = foreign.to_bytes(images, dataset)
    if "corruptions" in settings.shifts:
        for name in settings.corruptions:
            for severity in settings.severities:
                changed = data.corrupt(pixels, name, severity, settings.seed)
                what = {"shift": "corruption", "name": name, "level": severity}
                yield what, foreign.from_bytes(changed, dataset)
    if "rotations" in settings.shifts:
        for degrees in settings.degrees:
            changed = data.rotate(pixels, degrees)
            what = {"shift": "rotation", "name": "", "level": degrees}
            yield what, foreign.from_bytes(changed, dataset)
    if "fgsm" in settings.shifts:
        # What is attacked is what is scored: the average, where there are draws.
        draws = 1 if scorer.monte_carlo is None else scorer.monte_carlo.samples
        direction = data.fgsm_direction(
            scorer.monte_carlo or scorer.model,
            images,
            labels,
            batch_size=max(1, min(128, _ATTACKED_AT_ONCE // draws)),
            seed=settings.seed,
        )
        maximum = data.DATASETS[dataset].maximum
        for epsilon in settings.epsilons:
            step = np.float32(epsilon * maximum / 255)
            changed = np.clip(images.astype("float32") + step * direction, 0, maximum)
            yield {"shift": "fgsm", "name": "", "level": epsilon}, changed


def _score(scorer: Scorer, images: np.ndarray, labels: np.ndarray) -> Scores:
    try:
        found = scorer.score(images, labels)
    except ValueError as error:
        raise RunError(f"The model cannot predict: {_first_line(error)}") from error
    if not np.isfinite(found.mean).all():
        raise RunError("The predictions of the model are not finite: its training diverged.")
    return found


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _labelled(what: Row, found: Scores) -> Row:
    scores = found.summary()
    return {
        **what,
        "images": len(found.labels),
        **{name: scores[name] for name in ("accuracy", "nll", "brier", "ece")},
        **_means(found),
    }


def _unlabelled(name: str, known: Scores, unknown: Scores) -> Row:
    """Return how well each uncertainty tells foreign images from known ones; None if it cannot."""
    row = {"shift": "foreign", "name": name, "level": None, "images": len(unknown.mean)}
    row |= _means(unknown)
    for kind in UNCERTAINTIES:
        # A single network has no draws that could disagree.
        can = kind == "entropy" or known.samples > 1
        for score, function in _DETECTION.items():
            both = getattr(known, kind), getattr(unknown, kind)
            row[f"{kind}_{score}"] = function(*both) if can else None
    return row


def _means(found: Scores) -> dict[str, float]:
    return {kind: float(np.mean(getattr(found, kind))) for kind in UNCERTAINTIES}


def _line(row: Row) -> str:
    if row["shift"] == "foreign":
        found = row["epistemic_auroc"]
        more = "" if found is None else f", of the epistemic uncertainty {found:.4f}"
        return f"foreign {row['name']}: AUROC of the entropy {row['entropy_auroc']:.4f}{more}"
    level = f"{row['level']:g}" if row["level"] else ""
    name = " ".join(filter(None, [row["shift"], row["name"], level]))
    return f"{name}: accuracy {row['accuracy']:.4f}, NLL {row['nll']:.4f}, ECE {row['ece']:.4f}"


def _check_export(export: Path, output: Path) -> None:
    if backend.NAME != "tensorflow":
        raise RunError(
            f"A SavedModel takes TensorFlow, not {backend.NAME}: the model can be read "
            "and exported with --backend tensorflow."
        )
    if export.exists() and (not export.is_dir() or any(export.iterdir())):
        raise RunError(f"{export} holds something already: choose another folder to export to.")
    if output.resolve().is_relative_to(export.resolve()):
        raise RunError(f"{export} is to hold the results: choose another folder to export to.")

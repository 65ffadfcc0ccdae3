"""The evidence: every candidate's scores, the one that was chosen, and why."""

import dataclasses
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.extras import needs
from tfp_ibnn._core.progress import Heartbeat, printer
from tfp_ibnn.calibration.examples import Examples, read
from tfp_ibnn.calibration.scaling import scaled_model
from tfp_ibnn.calibration.trials import Trial
from tfp_ibnn.decisions import Conformal, OODDetector, error_threshold
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.prediction import MonteCarlo

_BLOCK = 2**23
"""So many numbers of raw outputs are held at once."""

_MARGIN = 1.96  # of 95 %, in standard errors

_CARD = """# Model card

{why}

`model.keras` is a `tfp_ibnn.MonteCarlo`: `predict` returns the averaged prediction and its
uncertainty. `import tfp_ibnn` before `keras.models.load_model("model.keras")`.

## Candidates

{table}

The choice was made on these examples: expect slightly worse scores on a test set. Differences
between ECEs near their floor mean nothing.

Dropped on the way, and why (NLLs are at the best temperature or scale of each):

{dropped}

## Run

{run}
"""


@dataclasses.dataclass(eq=False)
class Candidate:
    """A row of the table.

    `trial` is its network, and how it draws; `parameter` the temperature, of a regression the scale
    of each output, or their factor; `prediction` that for the validation examples it was scored on,
    (examples, ...), `nll` of each of them, and `errors`: whether its class is wrong, or the square.
    """

    name: str
    trial: Trial = dataclasses.field(repr=False)
    parameter: Any
    seconds: float
    prediction: np.ndarray = dataclasses.field(repr=False)
    nll: np.ndarray = dataclasses.field(repr=False)
    errors: np.ndarray = dataclasses.field(repr=False)

    @property
    def cost(self) -> tuple[int, bool]:
        """Draws, then whether it was trained; a fitted parameter costs nothing."""
        return self.trial.engine.samples, self.trial.trained


def choose(
    nll: Sequence[np.ndarray], costs: Sequence[Any], weight: np.ndarray | None = None
) -> int:
    """Return the best of all that cost no more than the cheapest within one standard error.

    The standard error, of the mean difference from the best, is small for what resembles the best:
    the cheapest within it may be worse than an equally cheap one.
    """
    difference, error = behind(nll, weight)
    cheapest = min(costs[i] for i in np.flatnonzero(difference <= error))
    return int(min(np.flatnonzero([x == cheapest for x in costs]), key=lambda i: difference[i]))


def behind(
    nll: Sequence[np.ndarray], weight: np.ndarray | None = None, best: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean distance (candidates,) from the best candidate, and its standard error.

    Or from the one of the number `best`. An example of weight 2 counts as two; without weights,
    each counts as one.
    """
    nll = np.stack(nll)
    count = np.float64(nll.shape[1] if weight is None else weight.sum())
    if best is None:
        best = int(np.argmin(np.average(nll, axis=1, weights=weight)))
    difference = nll - nll[best]
    mean = np.average(difference, axis=1, weights=weight)
    squares = np.average(np.square(difference - mean[:, None]), axis=1, weights=weight)
    return mean, np.sqrt(squares / (count - 1))


@dataclasses.dataclass(repr=False)
class Table:
    """Scores, `rows`, of all candidates by name: prints as Markdown, `chosen` in bold."""

    caption: str
    rows: dict[str, dict[str, Any]]
    chosen: str

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.rows[name]

    def __str__(self) -> str:
        header = ["candidate", *next(iter(self.rows.values()))]
        lines = [header] + [
            [f"**{name}**" if name == self.chosen else name, *map(_text, row.values())]
            for name, row in self.rows.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        form = " | ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
        return "\n".join([self.caption, "", *(f"| {form.format(*line)} |" for line in lines)])

    __repr__ = _repr_markdown_ = __str__


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclasses.dataclass(eq=False, repr=False)
class Report:
    """What `calibrate` returns.

    `candidates` are all that were compared, the first the model as it is; `dropped` has the names
    of those that were dropped on the way, and why. `chosen` is the candidate that was chosen, and
    `model` its `MonteCarlo`. `output` is what it predicts, `y` the targets of the validation
    examples that candidates were scored on, `seed` that of the ECE's floor, and `weight` how often
    each of these examples counts; None is once.
    """

    candidates: list[Candidate]
    dropped: dict[str, str]
    output: Likelihood
    y: np.ndarray
    notes: dict[str, Any]  # of the run, for the model card
    seed: int
    weight: np.ndarray | None = None
    chosen: Candidate = dataclasses.field(init=False)
    model: MonteCarlo = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        costs = [candidate.cost for candidate in self.candidates]
        nll = [candidate.nll for candidate in self.candidates]
        self.chosen = self.candidates[choose(nll, costs, self.weight)]
        self.model = self.model_of(self.chosen.name)

    def model_of(self, name: str) -> MonteCarlo:
        """Return the model of any candidate."""
        by_name = {x.name: x for x in self.candidates}
        found = by_name[checks.one_of("name", name, [*by_name])]
        engine = found.trial.engine
        network = engine.copy(found.trial.best)
        return scaled_model(self.output, network, found.parameter, **engine.options)

    def table(self) -> Table:
        """Return the scores on the validation examples that the selection has used."""
        caption = f"{len(self.y):,} validation examples, on which the choice was made"
        predictions = {candidate.name: candidate.prediction for candidate in self.candidates}
        return self._table(caption, predictions, self.y, self.weight)

    def evaluate(self, test: Any, minutes: float | None = None, verbose: bool = True) -> Table:
        """Return the scores of all candidates on new examples.

        The chosen candidate and the model as it is are scored first.

        Args:
            test: arrays (x, y) or (x, y, weight), or a dataset, as `calibrate` takes them; an
                example of weight 2 counts as two.
            minutes: after which no other candidate than these two is begun; None has no limit.
            verbose: print progress.
        """
        limit = math.inf if minutes is None else checks.positive("minutes", minutes)
        end = time.monotonic() + 60 * limit
        say = printer(verbose)
        first = self.chosen.trial, self.candidates[0].trial
        with Heartbeat("reading the test examples", say):
            examples = read(test, first[1].engine.network, self.output, "test")
        trials = list(dict.fromkeys([*first, *(x.trial for x in self.candidates)]))
        say(f"Scoring {len(self.candidates)} candidates on {len(examples.y):,} test examples.")
        found: dict[str, np.ndarray] = {}
        for trial in trials:
            if trial not in first and time.monotonic() > end:
                break
            own = [x for x in self.candidates if x.trial is trial]
            with Heartbeat(f"scoring {trial.name}", say):
                predictions = predict(trial, self.output, examples, [x.parameter for x in own])
            for candidate, prediction in zip(own, predictions, strict=True):
                nll = np.average(self.output.nll(prediction, examples.y), weights=examples.weight)
                say(f"{candidate.name}: NLL {nll:.4f}")
                found[candidate.name] = prediction
        caption = f"{len(examples.y):,} test examples"
        missing = [x.name for x in self.candidates if x.name not in found]
        if missing:
            caption += f"; `minutes` left out {', '.join(missing)}"
            say(f"`minutes` ended the evaluation: {', '.join(missing)} are not scored.")
        return self._table(caption, found, examples.y, examples.weight)

    def decide(
        self, test: Any, ood: Mapping[str, Any] | None = None, verbose: bool = True
    ) -> dict[str, Any]:
        """Return how well the chosen model decides on new examples, for the model card too.

        That is the coverage of 90 % sets (fitted to half of them), the share answered at 1 % error,
        and the AUROC of the entropy, or of the epistemic variance, against inputs `ood`, by name.

        Args:
            test: arrays (x, y), or a dataset, of examples used for nothing else.
            ood: inputs unlike the training data, by name; arrays or datasets.
            verbose: print progress.
        """
        say = printer(verbose)
        with Heartbeat("deciding on the test examples", say):
            return self._decide(test, ood)

    def _decide(self, test: Any, ood: Mapping[str, Any] | None) -> dict[str, Any]:
        examples = read(test, self.candidates[0].trial.engine.network, self.output, "test")
        if examples.weight is not None and np.any(examples.weight != 1):
            raise ValueError("`test` has weights, which `decide` cannot use: give (x, y).")
        order = np.random.default_rng(self.seed).permutation(len(examples.y))
        known, new = map(examples.take, np.array_split(order, 2))
        is_classes = self.output.is_classifier
        method, score = ("lac", "entropy") if is_classes else ("split", "epistemic")
        found = {} if ood else {"OOD AUROC": "left out, as no set was given"}
        try:
            sets = Conformal(self.model, method).fit(known.x, known.y).evaluate(new.x, new.y)
            found["coverage of 90 % sets"] = round(sets["coverage"], 4)
            p = self.model.predict(examples.x, verbose=0)["mean"]
            answered = error_threshold(p, examples.y)["answered"]
            found["share answered at 1 % error"] = round(answered, 4)
        except ValueError as error:  # there are too few examples, or no classes
            found["left out"] = str(error)
        for name, unknown in (ood or {}).items():
            scores = OODDetector(self.model, score).evaluate(new.x, unknown)
            found[f"OOD AUROC against {name}"] = round(scores["auroc"], 4)
        self.notes |= {"decisions": "by examples used for nothing else", **found}
        return found

    def __str__(self) -> str:
        return f"{self.why()}\n\n{self.table()}"

    def why(self) -> str:
        """Return the reason for the choice, in a sentence or two."""
        difference, error = behind([x.nll for x in self.candidates], self.weight)
        best, own = self.candidates[np.argmin(difference)], self.candidates.index(self.chosen)
        nll = np.average(self.chosen.nll, weights=self.weight)
        text = f"Chosen: {self.chosen.name}, NLL {nll:.4f}"
        if best is self.chosen:
            text = f"{text}: the best of {len(error)}, and none as good is cheaper."
        else:
            distance = f"{difference[own]:.4f} ± {error[own]:.4f}"
            text += f", {distance} behind the best of {len(error)}, {best.name}, which costs more."
        return f"{text} {self.lost()}".strip()

    def lost(self) -> str:
        """Return that the chosen candidate is less accurate than the model as it is, if it is so.

        That is, beyond a 95 % margin of the paired difference, on the examples of the selection.
        """
        chosen, untreated = self.chosen.errors, self.candidates[0].errors
        if self.chosen.trial is self.candidates[0].trial:
            return ""
        (_, more), (_, error) = behind([untreated, chosen], self.weight, best=0)
        if more <= _MARGIN * error:
            return ""
        now, before = (np.average(x, weights=self.weight) for x in (chosen, untreated))
        if self.output.is_classifier:
            scores = f"accuracy {1 - now:.4f} against {1 - before:.4f}"
            scores += f", {more:.4f} ± {_MARGIN * error:.4f} less"
        else:
            scores = f"RMSE {math.sqrt(now):.4f} against {math.sqrt(before):.4f}"
        as_it_is = [x.name for x in self.candidates if x.trial is self.candidates[0].trial][-1]
        return (
            f"But it is less accurate than the model as it is: {scores}. If accuracy matters more "
            f"than the NLL, take report.model_of({as_it_is!r})."
        )

    def plot(self) -> Any:
        """Return a figure of the calibration before and after: accuracy against confidence.

        Of a regression, it is the share of targets in central intervals less the probability of
        these; the band is twice the standard error of a calibrated model.
        """
        with needs("plots"):
            import matplotlib.pyplot as plt

            from tfp_ibnn import plots

        pair = [("before", self.candidates[0]), ("after", self.chosen)]
        if self.chosen is self.candidates[0]:
            pair = [("before and after", self.chosen)]
        if self.output.is_classifier:
            options = {"figsize": (4 * len(pair), 4.2), "layout": "constrained"}
            figure, axes = plt.subplots(1, len(pair), **options)
            for ax, (when, x) in zip(np.atleast_1d(axes), pair, strict=True):
                p = x.prediction / x.prediction.sum(axis=1, keepdims=True)
                options = {"title": f"{when}: {x.name}", "sample_weight": self.weight}
                plots.reliability_diagram(p, self.y, ax=ax, **options)
                ax.title.set_fontsize(9)  # of a long name
            return figure
        figure, ax = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
        levels = np.linspace(0, 1, 101)
        count = self.y.size if self.weight is None else self.weight.sum() * self.y.shape[1]
        error = 2 * np.sqrt(levels * (1 - levels) / count)
        ax.axhline(0, color="0.4", lw=1)
        ax.fill_between(levels, -error, error, color="0.9", label="chance, of a calibrated model")
        for (when, x), color, style in zip(pair, plots.COLORS, ("--", "-"), strict=False):
            covered = self.output.coverage(x.prediction, self.y, levels, self.weight)
            excess = covered - levels
            ax.plot(levels, excess, style, color=color, label=f"{when}: {x.name}")
        ax.set(xlim=(0, 1), xlabel="probability", ylabel="share of targets inside - probability")
        figure.legend(loc="outside upper center", frameon=False)
        return figure

    def save(self, folder: str | os.PathLike) -> Path:
        """Write `model.keras`, `table.md`, `model_card.md` and, with matplotlib, a figure."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save(folder / "model.keras")
        (folder / "table.md").write_text(f"{self.table()}\n")
        (folder / "model_card.md").write_text(self.card())
        try:
            figure = self.plot()
            figure.savefig(folder / "calibration.png", dpi=120)
            import matplotlib.pyplot as plt

            plt.close(figure)  # which notebooks would show once more
        except ImportError as error:  # the rest is worth having without it
            print(f"No figure was written. {error}")
        return folder

    def card(self) -> str:
        """Return the model card, in Markdown."""
        packages = {name: importlib.metadata.version(name) for name in ("keras", "tfp_ibnn")}
        machine = f"Python {platform.python_version()} on {platform.machine()}"
        machine += f", {os.cpu_count()} cores"
        packages |= {"backend": keras.config.backend(), "machine": machine}
        left_out = {"decisions": "left out: `report.decide(test, ood)` was given no examples"}
        notes = {**left_out, **self.notes, self.output.column: _parameter(self.chosen), **packages}
        dropped, run = (
            "\n".join(f"- {name}: {value}" for name, value in part.items()) or "- none"
            for part in (self.dropped, notes)
        )
        return _CARD.format(why=self.why(), table=self.table(), dropped=dropped, run=run)

    def _table(
        self,
        caption: str,
        predictions: Mapping[str, np.ndarray],
        y: np.ndarray,
        weight: np.ndarray | None,
    ) -> Table:
        scored = [x for x in self.candidates if x.name in predictions]
        distances = behind([self.output.nll(predictions[x.name], y) for x in scored], weight)
        rows = {}
        for x, gap, error in zip(scored, *distances, strict=True):
            rows[x.name] = {
                **self.output.evidence(predictions[x.name], y, self.seed, weight),
                self.output.column: _parameter(x),
                "behind best": f"{gap:.4f} ± {error:.4f}" if gap else "best",
                "draws": x.trial.engine.samples,
                "seconds": round(x.seconds),
                "parameters": x.trial.engine.network.count_params(),
            }
        return Table(caption, rows, self.chosen.name)


def _parameter(candidate: Candidate) -> float | str:
    numbers = np.ravel(candidate.parameter).tolist()
    return numbers[0] if len(numbers) == 1 else ", ".join(f"{number:.4g}" for number in numbers)


def predict(
    trial: Trial, output: Likelihood, examples: Examples, parameters: Sequence[Any]
) -> list[np.ndarray]:
    """Return a trial's predictions with each of the parameters, a block of examples at a time."""
    size, blocks = max(1, _BLOCK // (trial.engine.samples * output.width)), []
    for first in range(0, len(examples.y), size):
        raw = trial.engine.draw(trial.best, examples.take(slice(first, first + size)).x)
        blocks.append([output.predict(raw, parameter) for parameter in parameters])
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]

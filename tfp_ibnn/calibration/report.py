"""The evidence: every candidate's scores, the one that was chosen, and why."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.progress import Heartbeat, printer
from tfp_ibnn.calibration.candidates import Candidate, behind, choose, predict
from tfp_ibnn.calibration.card import model_card
from tfp_ibnn.calibration.examples import Examples, read
from tfp_ibnn.calibration.figures import coverage_figure, reliability_figure
from tfp_ibnn.calibration.scaling import scaled_model
from tfp_ibnn.calibration.table import Table
from tfp_ibnn.calibration.trials import deadline
from tfp_ibnn.decisions import Conformal, OODDetector, error_threshold
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.prediction import MonteCarlo

_MARGIN = 1.96  # of 95 %, in standard errors


@dataclasses.dataclass(eq=False, repr=False)
class Report:
    """What `calibrate` returns: the chosen model, and the evidence for it.

    Printing it gives the reason for the choice and the table.

    Args:
        candidates: all that were compared; the first is the model as it is.
        dropped: why others were dropped on the way, by name.
        output: what the model predicts.
        y: targets of the validation examples that candidates were scored on.
        notes: what the model card says about the run, by name.
        seed: of the ECE's floor, and of the split in `decide`.
        weight: how often each of these examples counts; None is once.

    Attributes:
        chosen: the `Candidate` that was chosen.
        model: its `MonteCarlo`, which predicts at the fitted temperature or scale.
    """

    candidates: list[Candidate]
    dropped: dict[str, str]
    output: Likelihood
    y: np.ndarray
    notes: dict[str, Any]
    seed: int
    weight: np.ndarray | None = None
    chosen: Candidate = dataclasses.field(init=False)
    model: MonteCarlo = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        unit = self.candidates[0].trial.engine.network
        for candidate in self.candidates:
            candidate.unit = unit
        costs = [candidate.cost[:2] for candidate in self.candidates]
        nll = [candidate.nll for candidate in self.candidates]
        self.chosen = self.candidates[choose(nll, costs, self.weight)]
        self.model = self.model_of(self.chosen.name)

    def __str__(self) -> str:
        return f"{self.why()}\n\n{self.table()}"

    def model_of(self, name: str) -> MonteCarlo:
        """Return the model of any candidate, by its name in the table.

        Returns:
            A new `MonteCarlo` that predicts what the table scored.

        Raises:
            ValueError: for a name that is not in the table.
        """
        by_name = {candidate.name: candidate for candidate in self.candidates}
        candidate = by_name[checks.one_of("name", name, [*by_name])]
        engine = candidate.trial.engine
        network = engine.copy(candidate.trial.best)
        return scaled_model(self.output, network, candidate.parameter, **engine.options)

    def table(self) -> Table:
        """Return the scores on the validation examples on which the choice was made.

        Returns:
            A `Table`: it prints as Markdown, and `table[name]` is the row of a candidate, a dict
            with these keys:

            - for a classifier "accuracy", "NLL" (nats), "Brier", "ECE" and "ECE floor", the ECE of
                a perfectly calibrated model on as many examples; for a regression "RMSE", "NLL"
                (nats), "CRPS" and "90 % coverage";
            - "T", the temperature; for a regression "scale" or "factor", of the standard deviation;
            - "behind best": how much larger the NLL is than the lowest, ± the standard error of the
                difference, or "best";
            - "passes": what a prediction takes, in passes of the model as it is;
            - "trainings": what its training took, in trainings of the model as it is;
            - "MB": the memory of its weights, and of all that a posterior holds;
            - "seconds" that fitting and training took.
        """
        caption = f"{len(self.y):,} validation examples, on which the choice was made"
        predictions = {candidate.name: candidate.prediction for candidate in self.candidates}
        return self._table(caption, predictions, self.y, self.weight)

    def evaluate(self, test: Any, minutes: float | None = None, verbose: bool = True) -> Table:
        """Return the scores of all candidates on new examples.

        The chosen candidate and the model as it is are scored first.

        Args:
            test: arrays (x, y) or (x, y, weight), or a dataset, as `calibrate` takes them; an
                example of weight 2 counts as two.
            minutes: after which no candidate but these two is started; None sets no limit.
            verbose: print progress.

        Returns:
            A `Table` with the keys of `table`; its caption names the candidates that `minutes`
            left out.
        """
        end = deadline(minutes)
        say = printer(verbose)
        with Heartbeat("reading the test examples", say):
            examples = self._read(test)
        say(f"Scoring {len(self.candidates)} candidates on {examples.size:,} test examples.")
        predictions = self._predictions(examples, end, say)
        caption = f"{examples.size:,} test examples"
        missing = [x.name for x in self.candidates if x.name not in predictions]
        if missing:
            names = ", ".join(missing)
            caption = f"{caption}; `minutes` left out {names}"
            say(f"`minutes` ended the evaluation: {names} are not scored.")
        return self._table(caption, predictions, examples.y, examples.weight)

    def _read(self, test: Any) -> Examples:
        return read(test, self.candidates[0].trial.engine.network, self.output, "test")

    def _predictions(
        self, examples: Examples, end: float, say: Callable[[str], None]
    ) -> dict[str, np.ndarray]:
        """Return the predictions of candidates by name, of those that start before `end`."""
        always = (self.chosen.trial, self.candidates[0].trial)
        others = [candidate.trial for candidate in self.candidates]
        predictions = {}
        for trial in dict.fromkeys([*always, *others]):  # each once
            if trial not in always and time.monotonic() > end:
                break
            candidates = [x for x in self.candidates if x.trial is trial]
            parameters = [candidate.parameter for candidate in candidates]
            with Heartbeat(f"scoring {trial.name}", say):
                arrays = predict(trial, self.output, examples, parameters)
            for candidate, prediction in zip(candidates, arrays, strict=True):
                nll = self.output.nll(prediction, examples.y)
                say(f"{candidate.name}: NLL {np.average(nll, weights=examples.weight):.4f}")
                predictions[candidate.name] = prediction
        return predictions

    def decide(
        self, test: Any, ood: Mapping[str, Any] | None = None, verbose: bool = True
    ) -> dict[str, Any]:
        """Return how well the chosen model decides on new examples; the model card shows it too.

        Args:
            test: arrays (x, y), or a dataset, of examples used for nothing else.
            ood: out-of-distribution inputs by name, arrays or datasets; None has none.
            verbose: print progress.

        Returns:
            A dict with these keys, whose numbers are rounded to four places:

            - "coverage of 90 % sets": the share of the truth in conformal sets, or intervals,
                fitted to one half of the examples and scored on the other;
            - "share answered at 1 % error": for a classifier, the share of the examples that it can
                answer with an error of at most 1 %, if it passes on the others;
            - "left out": why one of these is missing, such as too few examples;
            - "OOD AUROC against NAME", for each of `ood`: how well the entropy, or for a regression
                the epistemic variance, separates it from the examples;
            - "OOD AUROC", without `ood`: a note that it was left out.

        Raises:
            ValueError: for examples with weights.
        """
        with Heartbeat("deciding on the test examples", printer(verbose)):
            examples = self._read(test)
            if examples.weight is not None and np.any(examples.weight != 1):
                raise ValueError("`test` has weights, which `decide` cannot use: give (x, y).")
            decisions = self._decisions(examples, ood or {})
        self.notes |= {"decisions": "by examples used for nothing else", **decisions}
        return decisions

    def _decisions(self, examples: Examples, ood: Mapping[str, Any]) -> dict[str, Any]:
        order = np.random.default_rng(self.seed).permutation(examples.size)
        fitted_half, new_half = np.array_split(order, 2)
        new = examples.take(new_half)
        decisions: dict[str, Any] = {}
        if not ood:
            decisions["OOD AUROC"] = "left out, as no set was given"
        try:
            coverage = self._coverage(examples.take(fitted_half), new)
            decisions["coverage of 90 % sets"] = round(coverage, 4)
            means = self.model.predict(examples.x, verbose=0)["mean"]
            answered = error_threshold(means, examples.y)["answered"]
            decisions["share answered at 1 % error"] = round(answered, 4)
        except ValueError as error:  # there are too few examples, or no classes
            decisions["left out"] = str(error)
        score = "entropy" if self.output.is_classifier else "epistemic"
        for name, inputs in ood.items():
            auroc = OODDetector(self.model, score).evaluate(new.x, inputs)["auroc"]
            decisions[f"OOD AUROC against {name}"] = round(auroc, 4)
        return decisions

    def _coverage(self, known: Examples, new: Examples) -> float:
        """Return how often 90 % sets, fitted to some examples, hold the truth of others."""
        method = "lac" if self.output.is_classifier else "split"
        conformal = Conformal(self.model, method).fit(known.x, known.y)
        return conformal.evaluate(new.x, new.y)["coverage"]

    def why(self) -> str:
        """Return the reason for the choice, in a sentence or two.

        Returns:
            The NLL of the chosen candidate, in nats, and how it compares with the best; then what
            `lost` returns.
        """
        distance, error = behind([x.nll for x in self.candidates], self.weight)
        best = self.candidates[np.argmin(distance)]
        count = len(self.candidates)
        name = self.chosen.name
        nll = np.average(self.chosen.nll, weights=self.weight)
        if best is self.chosen:
            reason = (
                f"Chosen: {name}, NLL {nll:.4f}: the best of {count}, and none as good is cheaper."
            )
        else:
            place = self.candidates.index(self.chosen)
            reason = (
                f"Chosen: {name}, NLL {nll:.4f}, {distance[place]:.4f} ± {error[place]:.4f} "
                f"behind the best of {count}, {best.name}, which costs more."
            )
        return f"{reason} {self.lost()}".strip()

    def lost(self) -> str:
        """Return how much less accurate the chosen candidate is than the model as it is.

        Returns:
            A sentence with both accuracies, or RMSEs; "" unless the paired difference, on the
            examples of the selection, is beyond its 95 % margin.
        """
        as_it_is = self.candidates[0]
        if self.chosen.trial is as_it_is.trial:
            return ""
        distance, error = behind([as_it_is.errors, self.chosen.errors], self.weight, best=0)
        more = distance[1]
        margin = _MARGIN * error[1]
        if more <= margin:
            return ""
        now = np.average(self.chosen.errors, weights=self.weight)
        before = np.average(as_it_is.errors, weights=self.weight)
        scores = f"RMSE {math.sqrt(now):.4f} against {math.sqrt(before):.4f}"
        if self.output.is_classifier:
            scores = (
                f"accuracy {1 - now:.4f} against {1 - before:.4f}, {more:.4f} ± {margin:.4f} less"
            )
        *_, remedy = [x.name for x in self.candidates if x.trial is as_it_is.trial]
        return (
            f"But it is less accurate than the model as it is: {scores}. If accuracy matters more "
            f"than the NLL, take report.model_of({remedy!r})."
        )

    def plot(self) -> Any:
        """Return a figure of the calibration before and after: accuracy against confidence.

        For a regression, it is the share of targets in central intervals minus their probability;
        the band is twice the standard error of a calibrated model.

        Returns:
            A Matplotlib figure.

        Raises:
            ImportError: without Matplotlib.
        """
        panels = {"before": self.candidates[0], "after": self.chosen}
        if self.chosen is self.candidates[0]:
            panels = {"before and after": self.chosen}
        if self.output.is_classifier:
            return reliability_figure(panels, self.y, self.weight)
        return coverage_figure(panels, self.output, self.y, self.weight)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write the chosen model and the evidence for it.

        Returns:
            The folder, which is created if needed, with `model.keras`, `table.md`, `model_card.md`
            and, if Matplotlib is installed, `calibration.png`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save(folder / "model.keras")
        (folder / "table.md").write_text(f"{self.table()}\n")
        (folder / "model_card.md").write_text(self.card())
        try:
            figure = self.plot()
            figure.savefig(folder / "calibration.png", dpi=120)
            import matplotlib.pyplot as plt

            plt.close(figure)  # otherwise notebooks would show it again
        except ImportError as error:  # the rest is saved without the figure
            print(f"No figure was written. {error}")
        return folder

    def card(self) -> str:
        """Return the model card, in Markdown.

        Returns:
            The reason for the choice, the table, what was dropped and why, `notes`, and the
            versions of the packages.
        """
        notes = {
            "decisions": "left out: `report.decide(test, ood)` was given no examples",
            **self.notes,
            self.output.column: self.chosen.shown_parameter,
        }
        return model_card(self.why(), self.table(), self.dropped, notes)

    def _table(
        self,
        caption: str,
        predictions: Mapping[str, np.ndarray],
        y: np.ndarray,
        weight: np.ndarray | None,
    ) -> Table:
        """Return the table of the candidates that have predictions, by name."""
        scored = [x for x in self.candidates if x.name in predictions]
        nll = [self.output.nll(predictions[x.name], y) for x in scored]
        distances, errors = behind(nll, weight)
        rows = {}
        for candidate, distance, error in zip(scored, distances, errors, strict=True):
            prediction = predictions[candidate.name]
            rows[candidate.name] = {
                **self.output.evidence(prediction, y, self.seed, weight),
                self.output.column: candidate.shown_parameter,
                "behind best": f"{distance:.4f} ± {error:.4f}" if distance else "best",
                **candidate.cost.columns(),
                "seconds": round(candidate.seconds),
            }
        return Table(caption, rows, self.chosen.name)

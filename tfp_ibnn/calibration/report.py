"""The evidence: the scores of every candidate, the chosen one, and why it was chosen."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfp_ibnn._core import checks
from tfp_ibnn._core.files import replacing
from tfp_ibnn._core.progress import Heartbeat, printer
from tfp_ibnn.calibration.candidates import Candidate, Standing, behind, choose, standings
from tfp_ibnn.calibration.card import environment, model_card
from tfp_ibnn.calibration.deciding import decisions_of
from tfp_ibnn.calibration.doubts import losses
from tfp_ibnn.calibration.evaluation import evaluation
from tfp_ibnn.calibration.examples import Examples
from tfp_ibnn.calibration.figures import report_figure
from tfp_ibnn.calibration.reading import read
from tfp_ibnn.calibration.record import folder_for_report, record_of, to_json
from tfp_ibnn.calibration.rows import described, groups_of
from tfp_ibnn.calibration.scaling import scaled_model
from tfp_ibnn.calibration.table import Table
from tfp_ibnn.calibration.trials import deadline
from tfp_ibnn.likelihoods import Likelihood
from tfp_ibnn.prediction import MonteCarlo


@dataclasses.dataclass(eq=False, repr=False)
class Report:
    """What `calibrate` returns: the chosen model, and the evidence for it.

    Printing it gives the reason for the choice and the short table.

    Args:
        candidates: all that were compared; the first is the model as it is.
        dropped: why others were dropped, by name.
        output: what the model predicts.
        y: targets of the validation examples that candidates were scored on.
        notes: facts about the run for the model card, by name.
        seed: of the ECE's floor, and of the split in `decide`.
        weight: how often each of these examples counts; None is once.
        groups: the example of each row of `y`, if examples have several rows, such as pixels.
        scored: the number of these examples, in words; "" counts `y` and `groups`.

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
    groups: np.ndarray | None = None
    scored: str = ""
    chosen: Candidate = dataclasses.field(init=False)
    model: MonteCarlo = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        unit = self.candidates[0].trial.engine.network
        for candidate in self.candidates:
            candidate.unit = unit
        costs = [candidate.price for candidate in self.candidates]
        nll = [candidate.nll for candidate in self.candidates]
        self.chosen = self.candidates[choose(nll, costs, self.weight, self.groups)]
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

    def table(self, all: bool = False) -> Table:
        """Return the scores on the validation examples on which the choice was made.

        Args:
            all: print every row. By default only the rows are printed that no other row matches in
                NLL, passes and trainings, with the model as it is and the chosen one.

        Returns:
            A `Table`. It prints as Markdown, and `table[name]` is the row of a candidate, printed
            or not: a dict with these keys:

            - for a classifier "accuracy", "NLL" (nats), "Brier", "ECE" and "ECE floor", the ECE of
                a perfectly calibrated model on as many examples; for a regression "RMSE", "NLL"
                (nats), "CRPS" and "90 % coverage";
            - "T", the temperature; for a regression "scale" or "factor", of the standard deviation;
            - "behind best": how much larger the NLL is than the lowest, ± the standard error of the
                difference, clustered by example if it has several rows, or "best";
            - "passes": cost of a prediction in passes of the model as it is, by multiply-adds;
                layers before the first noise run once for all draws;
            - "trainings": cost of its training, in trainings of the model as it is;
            - "MB": the memory of its weights, and of everything a posterior holds;
            - "seconds": the time of fitting and training.
        """
        examples = self.scored or _count("validation", self.y, self.groups)
        caption = f"{examples}, on which the choice was made"
        predictions = {candidate.name: candidate.prediction for candidate in self.candidates}
        table = self._table(caption, predictions, self.y, self.weight, self.groups)
        table = dataclasses.replace(table, call="report.table(all=True)")
        return table.all() if all else table

    def evaluate(self, test: Any, minutes: float | None = None, verbose: bool = True) -> Table:
        """Return the scores of all candidates on new examples.

        The chosen candidate and the model as it is are scored first. Ctrl-C ends the evaluation,
        and a candidate that fails is left out: the other scores are returned.

        Args:
            test: arrays (x, y) or (x, y, weight), or a dataset, as `calibrate` takes them; an
                example of weight 2 counts as two.
            minutes: time after which no other candidate is started; None sets no limit.
            verbose: print progress.

        Returns:
            A `Table` with the keys of `table`. It prints its short form, and `.all()` prints every
            row; its caption names the candidates that are missing, and why.
        """
        end = deadline(minutes)
        say = printer(verbose)
        with Heartbeat("reading the test examples", say):
            examples = self._read(test)
        count = described(examples, "test examples")
        say(f"Scoring {len(self.candidates)} candidates on {count}.")
        scored = evaluation(self.candidates, self.chosen, self.output, examples, end, say)
        caption = "; ".join([count, *scored.missing])
        groups = groups_of(examples)
        return self._table(caption, scored.predictions, examples.y, examples.weight, groups)

    def _read(self, test: Any) -> Examples:
        return read(test, self.candidates[0].trial.engine.network, self.output, "test")

    def decide(
        self, test: Any, ood: Mapping[str, Any] | None = None, verbose: bool = True
    ) -> dict[str, Any]:
        """Return how well the chosen model decides on new examples; the model card shows it too.

        Args:
            test: arrays (x, y), or a dataset, of examples used for nothing else.
            ood: out-of-distribution inputs by name, arrays or datasets; None has none.
            verbose: print progress.

        Returns:
            A dict with these keys; numbers are rounded to four decimals:

            - "coverage of 90 % sets": how often conformal sets, or intervals, contain the truth;
                they are fitted to one half of the examples and scored on the other;
            - "share answered at 1 % error": for a classifier, the share of the examples that it can
                answer with an error of at most 1 %, if it refuses the others;
            - "left out": why one of these is missing, such as too few examples;
            - "OOD AUROC against NAME", for each of `ood`: how well the entropy, or for a regression
                the epistemic variance, separates it from the examples;
            - "OOD AUROC", without `ood`: a note that it was left out.

        Raises:
            ValueError: for examples with weights, positions or several outputs.
        """
        if ood is not None and not isinstance(ood, Mapping):
            raise ValueError(f"`ood` must be a dict of inputs by name; got {type(ood).__name__}.")
        with Heartbeat("deciding on the test examples", printer(verbose)):
            examples = self._read(test)
            if groups_of(examples) is not None:
                raise ValueError(
                    "`decide` is for one output of shape (N, K): for others, fit ibnn.Conformal "
                    "and ibnn.OODDetector to report.model."
                )
            if examples.weight is not None and np.any(examples.weight != 1):
                raise ValueError("`test` has weights, which `decide` cannot use: give (x, y).")
            decisions = decisions_of(self.model, self.output, examples, ood or {}, self.seed)
        self.notes |= {"decisions": "by examples used for nothing else", **decisions}
        return decisions

    def why(self) -> str:
        """Return the reason for the choice, in a sentence or two.

        Returns:
            The NLL of the chosen candidate, in nats, and how it compares with the best; then what
            `lost` returns.
        """
        nll = [candidate.nll for candidate in self.candidates]
        distance, error = behind(nll, self.weight, groups=self.groups)
        best = self.candidates[np.argmin(distance)]
        count = len(self.candidates)
        name = self.chosen.name
        mean = np.average(self.chosen.nll, weights=self.weight)
        if best is self.chosen:
            reason = (
                f"Chosen: {name}, NLL {mean:.4f}: the best of {count}, and none as good is cheaper."
            )
        else:
            place = self.candidates.index(self.chosen)
            reason = (
                f"Chosen: {name}, NLL {mean:.4f}, {distance[place]:.4f} ± {error[place]:.4f} "
                f"behind the best of {count}, {best.name}, which costs more."
            )
        return f"{reason} {self.lost()}".strip()

    def lost(self) -> str:
        """Return how much less accurate the chosen candidate is than the model as it is.

        Returns:
            A sentence with both accuracies, or RMSEs; "" unless the paired difference, on the
            examples of the selection, is beyond its 95% margin.
        """
        as_it_is = self.candidates[0]
        errors = (as_it_is.errors, self.chosen.errors)
        if np.array_equal(*errors):
            return ""
        prediction = self.chosen.prediction
        scores = losses(self.output, errors, prediction, self.weight, self.groups)
        if not scores:
            return ""
        untreated = [x.name for x in self.candidates if x.trial is as_it_is.trial]
        # Those of `variants_as_it_is`, which come last, may also be less accurate.
        *_, remedy = untreated[: len(self.output.variants)]
        return (
            f"But it is less accurate than the model as it is: {scores}. If accuracy matters more "
            f"than the NLL, take report.model_of({remedy!r})."
        )

    def _standings(self) -> list[Standing]:
        """Return how the candidates compare on the examples of the selection."""
        nll = [candidate.nll for candidate in self.candidates]
        return standings(self.candidates, nll, self.weight, self.groups)

    def plot(self) -> Any:
        """Return a figure of what each candidate costs and gains, and of the calibration.

        Left: the NLL of each candidate against the passes of a prediction, with the standard error
        of its difference from the best. Labels name the chosen one, the model as it is, and those
        that no other one matches in NLL, passes and trainings, which a line joins. Right: the
        calibration before and after, as accuracy against confidence, where the area of a dot is the
        share of the examples; for a regression, as the share of targets in central intervals minus
        their probability, with a band of twice the standard error of a calibrated model.

        Returns:
            A Matplotlib figure of 10 by 4.5 inches, wider for several outputs.

        Raises:
            ImportError: without Matplotlib.
        """
        panels = {"before": self.candidates[0], "after": self.chosen}
        if self.chosen is self.candidates[0]:
            panels = {"before and after": self.chosen}
        return report_figure(self._standings(), panels, self.output, self.y, self.weight)

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Return the report as JSON, without the models and the predictions.

        Args:
            path: of a file to write as well; None writes none.

        Returns:
            An object, in which NaN and infinity are null, with these keys:

            - "chosen", the name of the candidate, and "reason", what `why` returns;
            - "examples", the number that the choice was made on, their "rows", and "seed";
            - "candidates": a list of objects with "name", "scores" as in `table`, "parameter" (the
                temperature, scale or factor), "behind best" with its "mean" and "standard error",
                "undominated", "cost" with "passes", "trainings" and "megabytes", and "seconds";
            - "dropped": why others were dropped, by name;
            - "notes": facts about the run and the results of `decide`, by name;
            - "versions" of the packages, the backend and the machine.
        """
        records = []
        for standing in self._standings():
            prediction = standing.candidate.prediction
            scores = self.output.evidence(prediction, self.y, self.seed, self.weight)
            records.append(record_of(standing, scores))
        record = {
            "chosen": self.chosen.name,
            "reason": self.why(),
            "examples": len(self.y) if self.groups is None else len(np.unique(self.groups)),
            "rows": len(self.y),
            "seed": self.seed,
            "candidates": records,
            "dropped": self.dropped,
            "notes": self.notes,
            "versions": environment(),
        }
        text = to_json(record)
        if path is not None:
            Path(path).write_text(f"{text}\n")
        return text

    def save(self, folder: str | os.PathLike) -> Path:
        """Write the chosen model and the evidence for it.

        If a file cannot be written, such as on a full disk, a line is printed and the rest is
        written; an older file of that name is kept. An older report in the folder is replaced.

        Returns:
            The folder, which is created if needed, with `model.keras`, `table.md`, `model_card.md`,
            `report.json` and, if Matplotlib is installed, `calibration.png`.

        Raises:
            FileExistsError: if the folder has a `model.keras` that is not of a report.
        """
        folder = folder_for_report(folder)
        writers = {
            "model.keras": self.model.save,
            "table.md": lambda path: path.write_text(f"{self.table(all=True)}\n"),
            "model_card.md": lambda path: path.write_text(self.card()),
            "report.json": self.to_json,
            "calibration.png": self._draw,
        }
        for name, write in writers.items():
            try:
                with replacing(folder / name) as path:
                    write(path)
            except (ImportError, OSError) as error:
                print(f"{name} was not written: {error}")
        return folder

    def _draw(self, path: Path) -> None:
        """Write the figure."""
        figure = self.plot()
        figure.savefig(path, dpi=120)
        import matplotlib.pyplot as plt

        plt.close(figure)  # otherwise notebooks would show it again

    def card(self) -> str:
        """Return the model card, in Markdown.

        Returns:
            The reason for the choice, the whole table, the dropped candidates and why, `notes`, and
            the versions of the packages.
        """
        notes = {
            "decisions": "left out: `report.decide(test, ood)` was given no examples",
            **self.notes,
            self.output.column: self.chosen.shown_parameter,
        }
        return model_card(self.why(), self.table(all=True), self.dropped, notes)

    def _table(
        self,
        caption: str,
        predictions: Mapping[str, np.ndarray],
        y: np.ndarray,
        weight: np.ndarray | None,
        groups: np.ndarray | None,
    ) -> Table:
        """Return the table of the candidates that have predictions, by name."""
        scored = [x for x in self.candidates if x.name in predictions]
        nll = [self.output.nll(predictions[x.name], y) for x in scored]
        compared = standings(scored, nll, weight, groups)
        rows = {}
        for candidate, _, distance, error, cost, _ in compared:
            prediction = predictions[candidate.name]
            rows[candidate.name] = {
                **self.output.evidence(prediction, y, self.seed, weight),
                self.output.column: candidate.shown_parameter,
                "behind best": f"{distance:.4f} ± {error:.4f}" if distance else "best",
                **cost.columns(),
                "seconds": round(candidate.seconds),
            }
        shown = [standing.candidate.name for standing in compared if standing.is_undominated]
        shown += [self.candidates[0].name, self.chosen.name]
        return Table(caption, rows, self.chosen.name, shown)


def _count(kind: str, y: np.ndarray, groups: np.ndarray | None) -> str:
    """Return how many examples there are, in words.

    Args:
        kind: of examples, such as "test".
        y: their targets.
        groups: the example of each target, if examples have several.
    """
    if groups is None:
        return f"{len(y):,} {kind} examples"
    return f"{len(np.unique(groups)):,} {kind} examples with {len(y):,} outputs"

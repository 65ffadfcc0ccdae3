"""MAPIE's sets for given predictions, in an environment of its own.

    python mapie_peer.py FOLDER    reads FOLDER/task.npz, writes FOLDER/peer.npz

MAPIE subtracts u p from the calibration scores of APS and RAPS, with u uniform, but not from those
of new examples when the last label is included; here u is 0 for both. RAPS keeps some of the
calibration examples to choose k and lambda: these, and the rows of the others, are written too.
"""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import (
    APSConformityScore,
    LACConformityScore,
    RAPSConformityScore,
)
from sklearn.base import BaseEstimator, ClassifierMixin


class Given(ClassifierMixin, BaseEstimator):
    """A classifier whose input is its prediction, with the row's number in the last column."""

    def fit(self, x, y):
        self.classes_ = np.arange(x.shape[1] - 1)
        return self

    def predict_proba(self, x):
        return x[:, :-1]

    def predict(self, x):
        return x[:, :-1].argmax(axis=1)


class WithoutNoise(np.random.RandomState):
    """A generator whose uniform numbers are 0."""

    def uniform(self, low=0.0, high=1.0, size=None):
        return np.zeros(size)


def main(folder):
    task = np.load(Path(folder) / "task.npz")
    x, new = (np.c_[p, np.arange(len(p))] for p in (task["p"], task["p_new"]))
    scores = {"lac": LACConformityScore, "aps": APSConformityScore, "raps": RAPSConformityScore}
    found = {"version": f"MAPIE {importlib.metadata.version('mapie')}"}
    for coverage in task["coverages"]:
        for method, score in scores.items():
            options = {"conformity_score": score(), "random_state": WithoutNoise(0)}
            made = SplitConformalClassifier(
                Given().fit(x, None), float(coverage), prefit=True, **options
            ).conformalize(x, task["y"])
            sets = made.predict_set(new, {"include_last_label": True})[1]
            name = f"{method} {coverage}"
            found[name] = sets[:, :, 0]
            if method == "raps":
                fitted = made._mapie_classifier.conformity_score_function_
                found[f"{name} k"], found[f"{name} lambda"] = fitted.k_star, fitted.lambda_star
                found[f"{name} kept"] = fitted.X_raps[:, -1].astype(int)
    np.savez(Path(folder) / "peer.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""laplace-torch on a network whose weights are given, in an environment of its own.

    python laplace_peer.py FOLDER          reads FOLDER/task.npz, writes FOLDER/peer.npz
    python laplace_peer.py FOLDER serve    answers each line of stdin by a line: seconds

The network is that of `run.py` beside this, images with the channels last; every case is a
subset of weights and a Hessian structure, such as "last_layer full". What is written are the probit
predictions and the evidence of each. A line of stdin has a case and what is to be timed, such as
"all kron fit" or "all kron glm probit 500", with the number of images.
"""

import importlib.metadata
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset


class ChannelsLast(nn.Module):
    """Puts the channels last, so that the Dense layer after it has Keras's order."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1).flatten(1)


def network(weights):
    first, second, dense, last = weights[::2]
    model = nn.Sequential(
        nn.Conv2d(first.shape[2], first.shape[3], first.shape[0]),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second.shape[2], second.shape[3], second.shape[0]),
        nn.ReLU(),
        nn.AvgPool2d(2),
        ChannelsLast(),
        nn.Linear(*dense.shape),
        nn.ReLU(),
        nn.Linear(*last.shape),
    )
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[value.ndim]
            parameter.copy_(torch.from_numpy(value.transpose(axes).copy()))
    return model.eval()


def main(folder, how="compare"):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    task = np.load(Path(folder) / "task.npz")
    case = Case(task)
    versions = [f"laplace-torch {_version('laplace-torch')}", f"torch {torch.__version__}"]
    if how == "serve":
        print(", ".join(versions), flush=True)
        for line in sys.stdin:
            name, way = line.strip().rsplit(" ", 1)
            seconds = case.fit(name) if way == "fit" else case.predict(*line.split())[0]
            print(seconds, flush=True)
        return
    found = {}
    for name in task["cases"]:
        case.fit(name)
        found[name] = case.predict(*name.split(), "glm", "probit")[1]
        found[f"{name} evidence"] = float(case.fitted[name].log_marginal_likelihood())
    np.savez(Path(folder) / "peer.npz", versions=", ".join(versions), **found)


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a folder on the path, not installed
        return "of an unknown version"


class Case:
    """Fits and predictions of a task, each with its seconds; the fitted ones are kept by name."""

    def __init__(self, task):
        self._weights = [task[f"weight_{i}"] for i in range(8)]
        x, self._x_test = (
            torch.from_numpy(task[key].transpose(0, 3, 1, 2).copy()) for key in ("x", "x_test")
        )
        self._data = TensorDataset(x, torch.from_numpy(task["y"]).long())
        self._batch, self._prior = int(task["batch"]), float(task["prior"])
        self._samples = int(task["samples"]) if "samples" in task else 1
        self.fitted = {}

    def fit(self, name):
        subset, structure = name.split()
        options = {"subset_of_weights": subset, "hessian_structure": structure}
        model = network(self._weights)
        la = Laplace(model, "classification", prior_precision=self._prior, **options)
        began = time.perf_counter()
        # A batch in one slice: the usual loader stacks it example by example.
        batches = BatchSampler(SequentialSampler(self._data), self._batch, drop_last=False)
        la.fit(DataLoader(self._data, sampler=batches, batch_size=None))
        self.fitted[name] = la
        return time.perf_counter() - began

    def predict(self, subset, structure, pred_type, link_approx, count=None):
        x_test = self._x_test[: None if count is None else int(count)]
        if (name := f"{subset} {structure}") not in self.fitted:
            self.fit(name)
        la = self.fitted[name]
        options = {"pred_type": pred_type, "link_approx": link_approx, "n_samples": self._samples}
        began = time.perf_counter()
        parts = [la(part, **options).detach().numpy() for part in x_test.split(self._batch)]
        return time.perf_counter() - began, np.concatenate(parts)


if __name__ == "__main__":
    main(*sys.argv[1:])

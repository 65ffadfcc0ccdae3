"""laplace-torch on a network whose weights are given, in an environment of its own.

    python laplace_peer.py FOLDER      reads FOLDER/task.npz, writes FOLDER/peer.npz

The network is that of `scripts/compare_laplace.py`, images with the channels last; every case is a
subset of weights and a Hessian structure, such as "last_layer full". What is written are the probit
predictions and the evidence of each, and the seconds of fit and prediction.
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
from torch.utils.data import DataLoader, TensorDataset


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


def main(folder):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    task = np.load(Path(folder) / "task.npz")
    weights = [task[f"weight_{i}"] for i in range(8)]
    x, x_test = (
        torch.from_numpy(task[key].transpose(0, 3, 1, 2).copy()) for key in ("x", "x_test")
    )
    y, batch = torch.from_numpy(task["y"]).long(), int(task["batch"])
    found = {}
    for name in task["cases"]:
        subset, structure = name.split()
        options = {"subset_of_weights": subset, "hessian_structure": structure}
        la = Laplace(
            network(weights), "classification", prior_precision=float(task["prior"]), **options
        )
        began = time.perf_counter()
        la.fit(DataLoader(TensorDataset(x, y), batch_size=batch))
        middle = time.perf_counter()
        parts = [
            la(part, pred_type="glm", link_approx="probit").detach().numpy()
            for part in x_test.split(batch)
        ]
        found[name] = np.concatenate(parts)
        found[f"{name} seconds"] = [middle - began, time.perf_counter() - middle]
        found[f"{name} evidence"] = float(la.log_marginal_likelihood())
    versions = [f"{x} {importlib.metadata.version(x)}" for x in ("laplace-torch", "torch")]
    np.savez(Path(folder) / "peer.npz", versions=", ".join(versions), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""LeNet with bayesian-torch's layers, in an environment of its own: see `weights.py`.

    python torch_peer.py ROUNDS SEED           seconds of a step of each kind, by round
    python torch_peer.py KIND SEED memory      bytes that training takes

It prints JSON. The network, the batches and the optimizer are those of `networks.py` there.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import timing
import torch
from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss
from torch import nn

BATCH, STEPS, EPOCHS, TRAIN_SIZE, CLASSES = 128, 16, 3, 50_000, 10
KINDS = {"deterministic": None, "reparameterization": "Reparameterization", "flipout": "Flipout"}
OPTIONS = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0}
OPTIONS |= {"posterior_rho_init": -4.6, "moped_enable": False}


def lenet(kind):
    images = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
    images += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
    dense = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)]
    model = nn.Sequential(*images, *dense)
    if kind is not None:
        dnn_to_bnn(model, {**OPTIONS, "type": kind})
    return model


def stepper(kind):
    """Return an action that trains, and returns the seconds of a step."""
    model = lenet(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = torch.randn(STEPS, BATCH, 3, 28, 28), torch.randint(0, CLASSES, (STEPS, BATCH))

    def epoch():
        began = time.perf_counter()
        for images, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            if kind is not None:
                loss = loss + get_kl_loss(model) / TRAIN_SIZE
            loss.backward()
            optimizer.step()
            loss.item()
        return (time.perf_counter() - began) / STEPS

    return lambda: min(epoch() for _ in range(EPOCHS))


def memory(kind):
    """Return by how much the largest resident size grows in training."""
    action = stepper(kind)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(kibibytes)


def main(first, seed, what="time"):
    torch.manual_seed(int(seed))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if what == "memory":
        return memory(KINDS[first])
    return timing.interleave({name: stepper(kind) for name, kind in KINDS.items()}, int(first))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

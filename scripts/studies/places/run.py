"""Where should the noise sit? Posteriors of z in some layers of transformers and of an LSTM.

A task is a pair of data and network, a seed, and a place. `member0` to `member2` train networks
that differ in their start; `ensemble` averages them. Every other task trains the same network from
the same start as `member0`, for as many epochs, with a posterior in the layers of a place. Nothing
is tuned; test data serves for nothing but the scores; temperatures are fitted on validation data.
"""

import time
from pathlib import Path

import keras
import numpy as np

import tfp_ibnn as ibnn
from lib import provenance
from lib.parts import images
from lib.tasks import run_tasks
from studies.methods.run import Problem as MethodProblem
from studies.methods.run import member, wait_for
from studies.places import texts

layers = keras.layers
MEMBERS = 3
PAIRS = {  # titles, epochs, batch size
    "fashion_vit": ("Fashion-MNIST 55,000, ViT of 4 blocks", 30, 128),
    "mails_transformer": ("SpamAssassin 4,000, transformer of 2 blocks", 20, 64),
    "fashion_lstm": ("Fashion-MNIST 55,000 row by row, LSTM 64", 20, 128),
}
POSTERIORS = {"Gaussian": ibnn.NormalAffine, "flow": ibnn.NormalPlanar1d}
PLACES = {  # patterns of layers
    "transformer": {"attention": ".*_attention/.*", "MLPs": ".*_(up|down)"},
    "lstm": {"input and state": "memory/.*", "last layer": "head"},
}
for places in PLACES.values():
    places["both"] = "|".join(places.values())


def transformer(x, blocks, width=64, heads=4, dropout=0.1):
    """Return tokens (N, T, width) after some blocks, normalised before attention and MLP."""
    for number in range(blocks):
        name = f"block{number}"
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(y, y)
        x = x + layers.Dropout(dropout)(y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(2 * width, "gelu", name=f"{name}_up")(y)
        y = layers.Dense(width, name=f"{name}_down")(y)
        x = x + layers.Dropout(dropout)(y)
    return layers.LayerNormalization()(x)


@keras.saving.register_keras_serializable(package="tfp_ibnn_experiments")
class Positions(layers.Layer):
    """Adds a learned vector to each position; the mask passes."""

    supports_masking = True

    def build(self, input_shape):
        self.table = self.add_weight(
            input_shape[1:], keras.initializers.RandomNormal(0.02), name="table"
        )

    def call(self, x):
        return x + keras.ops.cast(self.table, x.dtype)


class Problem(MethodProblem):
    """Data, network and training of a pair, drawn by a seed."""

    def __init__(self, pair, seed, quick=False, data_dir=None):
        _, self.epochs, self.batch_size = PAIRS[pair]
        self.pair, self.seed, self.draws, self.name = pair, seed, 32, "fashion_mnist"
        if pair == "mails_transformer":
            parts, hard, ood = texts.mails(seed, data_dir)
            self.others = ood, [hard[0]]
            self.shifted_labels = hard[1]
        else:
            parts = images(seed, data_dir, self.name, 55_000, 5000)
        self.train, self.validation, self.test = parts
        if quick:
            self.train, self.validation, self.test = [(x[:80], y[:80]) for x, y in parts]
            self.epochs, self.draws = 1, 4
        if pair != "mails_transformer":
            self.others, self.shifted_labels = self._others(data_dir), self.test[1]

    @property
    def places(self):
        """Patterns of layers, by place."""
        return PLACES["lstm" if self.pair == "fashion_lstm" else "transformer"]

    def build(self, seed, dropout=0.0):
        """Return a network as `seed` starts it."""
        keras.utils.set_random_seed(seed)
        if self.pair == "mails_transformer":
            inputs = keras.Input((texts.LENGTH,), dtype="int32")
            x = layers.Embedding(texts.WORDS, 64, mask_zero=True)(inputs)
            x = layers.GlobalAveragePooling1D()(transformer(Positions()(x), blocks=2))
            return keras.Model(inputs, layers.Dense(2, name="head")(x))
        inputs = keras.Input((28, 28, 1))
        if self.pair == "fashion_lstm":
            x = layers.LSTM(64, name="memory")(layers.Reshape((28, 28))(inputs))
        else:
            x = layers.Conv2D(64, 4, strides=4, name="patches")(inputs)
            x = transformer(Positions()(layers.Reshape((49, 64))(x)), blocks=4)
            x = layers.GlobalAveragePooling1D()(x)
        return keras.Model(inputs, layers.Dense(10, name="head")(x))

    def step(self, model):
        """Return the seconds of a training step: the shortest of three epochs, after the first."""
        ends = []
        clock = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: ends.append(time.perf_counter())
        )
        self.fit(model, 4, callbacks=[clock])
        return float(np.min(np.diff(ends))) / self.steps


def posterior_in(problem, kind, place):
    """Return the network with a posterior in a place, not trained."""
    posterior = {problem.places[place]: POSTERIORS[kind]()}
    model, size = problem.build(100 * problem.seed), len(problem.train[1])
    return ibnn.to_stochastic(model, posterior, size, seed=problem.seed)


def tasks(pair):
    """Return the groups of a pair."""
    places = PLACES["lstm" if pair == "fashion_lstm" else "transformer"]
    noisy = [f"{kind}, {place}" for kind in POSTERIORS for place in places]
    return [*(f"member{number}" for number in range(MEMBERS)), *noisy, "ensemble", "steps"]


def run(pair, seed, group, folder, quick=False, data_dir=None):
    """Run one task; return the record. Quick runs only show that it works."""

    def kept(number):
        return Path(folder) / "models" / f"{pair}-{seed}-{number}{'-quick' * quick}.keras"

    problem = Problem(pair, seed, quick, data_dir)
    kept(0).parent.mkdir(parents=True, exist_ok=True)
    about = {"pair": pair, "seed": seed, "group": group, **provenance({"quick": quick})}
    if group == "steps":  # alone on its machine, or it means little
        cases = {"network": problem.build(0)}
        for name in tasks(pair)[MEMBERS:-2]:
            cases[name] = posterior_in(problem, *name.split(", "))
        return {**about, "steps": {name: problem.step(model) for name, model in cases.items()}}
    begun = time.perf_counter()
    if group.startswith("member"):
        number = int(group.removeprefix("member"))
        made = member(problem, kept, number)
        found = {"network": problem.scores(*made["MAP"])} if made else {}
        return {**about, "methods": found}
    if group == "ensemble":
        wait_for(*map(kept, range(MEMBERS)))
        models = [keras.models.load_model(kept(number)) for number in range(MEMBERS)]
        posterior, group = ibnn.DeepEnsemble(models), f"ensemble of {MEMBERS}"
    else:
        posterior = problem.fit(posterior_in(problem, *group.split(", ")))
    return {**about, "methods": {group: problem.scores(posterior, time.perf_counter() - begun)}}


def run_all(pairs, seeds, folder, *, quick=False, jobs=1, data_dir=None):
    """Run what `runs.jsonl` in the folder lacks; return how many failed."""

    def shown(record):
        rows = record.get("methods", {}).items()
        return ", ".join(f"{key}: NLL {row['NLL']:.4f}" for key, row in rows)

    every = [(pair, seed, group) for pair in pairs for seed in seeds for group in tasks(pair)]
    apart = [task for task in every if task[2] == "steps" and task[1] == min(seeds)]
    every = [task for task in every if task[2] != "steps"]
    options = (folder, quick, data_dir)
    failed = run_tasks(run, every, options, folder, jobs, shown)
    return failed + run_tasks(run, apart, options, folder, 1, shown)

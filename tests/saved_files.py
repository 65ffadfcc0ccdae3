"""The saved models and checkpoints under tests/files, which every later version must load.

`python -m tests.saved_files`, run once on each backend, writes those of the present version into a
folder of its own. What is there already is never written over.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from tests import autodiff
from tests.registry import AT_PRIOR, ELBO, perturb

FOLDER = Path(__file__).parent / "files"

RECIPES = {
    "affine": lambda: ibnn.NormalAffine(**AT_PRIOR),
    "planar": lambda: ibnn.NormalPlanar1d(**AT_PRIOR),
    "inv_conv": lambda: ibnn.NormalInvConv(depth=1, planar=1, **AT_PRIOR),
    "glow": lambda: ibnn.NormalGlowStep(depth=1, hidden=4, **AT_PRIOR),
    "radial": lambda: ibnn.NormalRadial(depth=1, **AT_PRIOR),
    "sylvester": lambda: ibnn.NormalSylvester(depth=1, units=2, **AT_PRIOR),
    "iaf": lambda: ibnn.NormalIAF(depth=1, hidden=4, **AT_PRIOR),
    "full": lambda: ibnn.NormalFull(**AT_PRIOR),
    "low_rank": lambda: ibnn.NormalLowRank(rank=2, **AT_PRIOR),
    "normalised": lambda: ibnn.FlowPosterior(
        [ibnn.flows.ActNorm(), ibnn.flows.BatchNorm()], learn_prior_scale=True, **AT_PRIOR
    ),
    "mixture": lambda: ibnn.MixturePosterior(components=3, **ELBO),
    "mixture_averaged": lambda: ibnn.MixturePosterior(components=2, kl="averaged", **ELBO),
    "flow_of_mixture": lambda: ibnn.FlowPosterior(
        [ibnn.flows.Planar()], components=2, shared_components=True, affine="first", **AT_PRIOR
    ),
}

# The backends write the same form; a few files show that each reads the other's.
WRITTEN = {"tensorflow": list(RECIPES), "jax": ["planar", "glow", "mixture"]}

INPUTS = np.linspace(-1, 1, 6 * 4, dtype="float32").reshape(6, 4)
LABELS = np.arange(6) % 3


# One with a permutation among its weights, so that the checkpoint holds integers too.
CHECKPOINT_RECIPE = "glow"


def make(recipe, *callbacks):
    """A small trained model with dropout, two learning rates and a momentum."""
    keras.utils.set_random_seed(1)
    det = keras.Sequential(
        [
            keras.Input((4,), name="features"),
            keras.layers.Dense(4, "tanh", name="hidden"),
            keras.layers.Dropout(0.25, seed=5),
            keras.layers.Dense(3, name="logits"),
        ],
        name="saved",
    )
    sto = ibnn.to_stochastic(det, RECIPES[recipe](), train_size=60, train_samples=2, seed=3)
    for layer in ibnn.stochastic_layers(sto):
        beta = float(ops.convert_to_numpy(layer.posterior.beta))
        perturb(layer.posterior, seed=4, size=0.3)
        layer.posterior.beta.assign(beta)
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Without XLA, which draws other noise; JAX draws the same.
    jit = keras.backend.backend() == "jax"
    sto.compile(ibnn.two_speed(optimizer, stochastic_lr=2e-2), loss, jit_compile=jit)
    sto.fit(INPUTS, LABELS, batch_size=3, shuffle=False, callbacks=list(callbacks), verbose=0)
    return sto


def describe(model):
    """What a loaded model must still say, and where its random states stand."""
    mc = ibnn.MonteCarlo(model, samples=8, seed=0)
    weights = {id(weight) for weight in model.weights}
    states = [v for v in model.variables if v.name == "seed_generator_state"]
    assert not any(id(state) in weights for state in states)
    return {
        "at_mean": _numbers(mc.at_mean(INPUTS)["mean"]),
        "mean": _numbers(mc.average(INPUTS)["mean"]),
        "random_states": [ops.convert_to_numpy(state).tolist() for state in states],
        "learning_rates": [
            float(part.learning_rate)
            for part in (model.optimizer.deterministic, model.optimizer.stochastic)
        ],
        "steps": int(model.optimizer.deterministic.iterations),
        "momentum": float(
            sum(np.abs(ops.convert_to_numpy(v)).sum() for v in model.optimizer.variables)
        ),
    }


def next_losses(model):
    """The losses of two more epochs, with the noise that follows."""
    history = model.fit(INPUTS, LABELS, batch_size=3, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"]


def _numbers(values):
    return np.asarray(ops.convert_to_numpy(values), "float64").tolist()


def main():
    folder = FOLDER / ibnn.__version__ / keras.backend.backend()
    if folder.exists():
        sys.exit(f"{folder} exists: files of a version are written once.")
    folder.mkdir(parents=True)
    autodiff.enable_float64()  # as in the tests: JAX's dropout draws other masks then
    expected = {}
    for recipe in WRITTEN[keras.backend.backend()]:
        model = make(recipe)
        model.save(folder / f"{recipe}.keras")
        expected[recipe] = describe(model)
        expected[recipe]["next_losses"] = next_losses(model)
    model = make(CHECKPOINT_RECIPE, ibnn.Checkpoint(folder / "checkpoint.npz"))
    expected["checkpoint"] = {"next_losses": next_losses(model)}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()

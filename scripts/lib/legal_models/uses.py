"""Uses of a stochastic model, each compared with an independent answer.

Each check takes a `Trial`, and raises `Wrong` for a number that is not what it must be.
"""

from collections.abc import Callable, Iterator
from functools import partial

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib.legal_models import answers
from lib.legal_models.draw import Head
from lib.legal_models.trial import JAX, Inapplicable, Trial, Wrong, array

__all__ = ["check_means", "losses_for"]


def check_means(model: keras.Model) -> None:
    """Raise if a posterior, such as a mixture, has a mean that does not start at one."""
    for layer in ibnn.stochastic_layers(model):
        mean = getattr(layer.posterior, "mean", getattr(layer.posterior, "z", None))
        mean = getattr(mean, "mean", mean)
        if mean is not None and np.abs(array(mean()) - 1).max() > 1e-6:
            raise Inapplicable("a mean that does not start at one")


def noise_off(trial: Trial) -> None:
    """Without noise, a fresh copy computes what the original does."""
    check_means(trial.sto)
    for found, wanted in zip(trial.quiet(), trial.plain, strict=True):
        trial.close("the output without noise", found, wanted)


def folded(trial: Trial) -> None:
    """The folded model computes what the stochastic one does without noise."""
    plain = ibnn.to_deterministic(trial.sto)
    if ibnn.stochastic_layers(plain):
        raise Wrong("the folded model has a stochastic layer")
    for found, wanted in zip(trial.outputs(plain(trial.x)), trial.quiet(), strict=True):
        trial.close("the folded output", found, wanted)


def _examples(trial: Trial, number: int) -> object:
    return keras.tree.map_structure(lambda x: x[number : number + 1], trial.x)


def _draw(trial: Trial, inputs: object, ahead: bool, **options: object) -> list[np.ndarray]:
    """Return the outputs of one draw, in a pass of its own."""
    options = {"sampling": trial.case.predict.get("sampling", "iid"), "losses": False, **options}
    with ibnn.noise.scope(**options) as forward_pass:
        for layer in ibnn.stochastic_layers(trial.sto):
            if ahead and layer.draws_ahead:
                layer.draw_for(forward_pass, 1, None, False)
        return trial.outputs(trial.sto(inputs, training=False))


def looped_draws(trial: Trial, key: object) -> list[np.ndarray]:
    """Return the outputs (draws, examples, ...) that `MonteCarlo` averages, one by one."""
    key, found = ops.cast(key, "int32"), []
    for number in range(trial.case.predict["samples"]):
        sample = ops.convert_to_tensor([number], dtype="int32")
        if not trial.case.predict.get("independent"):
            found.append(_draw(trial, trial.x, True, groups=1, seed=key, sample=sample))
            continue
        rows = []
        for example in range(trial.case.batch):
            stream = ops.convert_to_tensor([example], dtype="int32")
            own = {"seed": key, "sample": sample, "stream": stream}
            rows.append(_draw(trial, _examples(trial, example), False, **own))
        found.append([np.concatenate(parts) for parts in zip(*rows, strict=True)])
    return [np.stack(parts) for parts in zip(*found, strict=True)]


def _each_output(trial: Trial, found: dict) -> Iterator[tuple]:
    parts = [found[name] for name in trial.names] if trial.names else [found]
    yield from zip(trial.case.heads, parts, strict=True)


def monte_carlo(trial: Trial) -> None:
    """The average over draws is that of an explicit loop."""
    mc = trial.average()
    found = mc(trial.x)
    draws = looped_draws(trial, mc._key)
    for (head, part), outputs in zip(_each_output(trial, found), draws, strict=True):
        wanted = answers.statistics(outputs, head.kind, head.from_logits)
        level = trial.case.predict.get("interval")
        for name, value in part.items():
            if name in wanted:
                trial.close(f"`{name}`", value, wanted[name], times=300)
        if level and head.kind == "gaussian":
            for name, share in (("lower", (1 - level) / 2), ("upper", (1 + level) / 2)):
                mass = answers.interval_mass(outputs, array(part[name]))
                _near(f"the mass below `{name}`", mass, share, 1e-3)
        elif level:
            ends = answers.quantiles(outputs, head.kind, head.from_logits, level)
            trial.close("`lower`", part["lower"], ends[0], times=300)
            trial.close("`upper`", part["upper"], ends[1], times=300)


def _near(what: str, found: np.ndarray, wanted: float, tolerance: float) -> None:
    if np.abs(found - wanted).max() > tolerance:
        raise Wrong(f"{what} is {np.ravel(found)[np.abs(found - wanted).argmax()]}, not {wanted}")


def batches(trial: Trial) -> None:
    """The prediction is the same in batches of any size, and with chunks of any size."""
    if trial.case.predict.get("independent"):
        raise Inapplicable("independent draws")
    whole = trial.average()(trial.x)
    size = int(trial.rng.integers(1, trial.case.batch + 1))
    chunk = int(trial.rng.integers(1, 4))
    parts = trial.average(chunk_size=chunk).predict(trial.x, batch_size=size, verbose=0)
    pairs = zip(keras.tree.flatten(parts), keras.tree.flatten(whole), strict=True)
    for found, wanted in pairs:
        trial.close(f"a prediction in batches of {size}", found, wanted, times=300)


def scores(trial: Trial) -> None:
    """`evaluate` scores as numpy does, with weights and padding."""
    if trial.case.predict.get("independent"):
        raise Inapplicable("independent draws")
    mc, size = trial.average(), int(trial.rng.integers(1, trial.case.batch + 1))
    found = mc.evaluate(
        trial.x,
        trial.by_name(trial.y),
        sample_weight=trial.weight,
        batch_size=size,
        verbose=0,
        return_dict=True,
    )
    predicted = _each_output(trial, mc.predict(trial.x, batch_size=size, verbose=0))
    parts = zip(predicted, trial.y, trial.masks(), strict=True)
    losses = [_checked_scores(trial, found, *pair, y, mask) for pair, y, mask in parts]
    if all(np.isfinite(loss) for loss, _ in losses):
        total = sum(loss for loss, _ in losses)
        slack = partial(sum, (slack() for _, slack in losses))
        trial.close("the loss of `evaluate`", found["loss"], total, times=300, slack=slack)


def _checked_scores(
    trial: Trial, found: dict, head: Head, part: dict, y: np.ndarray, mask: np.ndarray | None
) -> tuple[float, Callable[[], float]]:
    """Check the scores of one output; return its loss, NaN if masked, and how far it may be off."""
    part = {name: array(value) for name, value in part.items()}
    weight = np.ones(trial.case.batch) if trial.weight is None else array(trial.weight)
    is_masked = mask is not None and mask.ndim < part["mean"].ndim
    if is_masked:
        weight = weight.reshape(-1, *(1,) * (mask.ndim - 1)) * mask
    if not weight.sum():
        raise Inapplicable("all is padding")
    each = answers.losses_of(head.kind, y, part)
    slack = partial(_slack, trial, head.kind, y, part)
    prefix = f"{trial.names[trial.case.heads.index(head)]}_" if trial.names else ""
    for name, value in answers.scores(head.kind, y, part, weight).items():
        trial.close(f"the score {name}", found[prefix + name], value, times=300, slack=slack)
    if is_masked:
        return np.nan, slack
    return np.mean(each * weight.reshape(-1, *(1,) * (each.ndim - 1))), slack


def _slack(trial: Trial, kind: str, y: np.ndarray, part: dict) -> float:
    """Return by how much the largest loss changes if predictions do by their rounding."""
    step, changes = 30 * (trial.rounding + trial.eps), [0.0]
    for sign in (-1, 1):
        moved = {name: value + sign * step for name, value in part.items()}
        if kind in ("softmax", "sigmoid"):
            moved["mean"] = np.clip(moved["mean"], 0, 1)
        with np.errstate(all="ignore"):
            changes.append(
                np.abs(answers.losses_of(kind, y, moved) - answers.losses_of(kind, y, part))
            )
    return float(np.nan_to_num(max(np.max(x) for x in changes), nan=np.inf))


def losses_for(trial: Trial) -> list:
    made = []
    for head in trial.case.heads:
        logits = bool(head.from_logits)
        made.append(
            {
                "softmax": lambda on=logits: keras.losses.SparseCategoricalCrossentropy(on),
                "sigmoid": lambda on=logits: keras.losses.BinaryCrossentropy(on),
                "gaussian": ibnn.layers.GaussianNLL,
                "point": keras.losses.MeanSquaredError,
            }[head.kind]()
        )
    return made if len(made) > 1 else made[0]


def plain_loss(trial: Trial) -> None:
    """Without noise, the compiled copy has the loss of the original, whatever the weights."""
    several = len(trial.case.heads) > 1
    y = trial.y if several else trial.y[0]
    weight = [trial.weight] * len(trial.y) if several and trial.weight is not None else trial.weight
    plain = ibnn.to_deterministic(trial.sto)
    for model in (trial.sto, plain):
        model.compile(loss=losses_for(trial), run_eagerly=True)
    try:
        wanted = plain.test_on_batch(trial.x, y, weight, return_dict=True)["loss"]
    except Exception as error:  # whatever Keras has against it
        raise Inapplicable("a loss that Keras does not compute") from error
    with ibnn.noise_off(trial.sto):
        found = trial.sto.test_on_batch(trial.x, y, weight, return_dict=True)["loss"]
    trial.close("the loss without noise", found, wanted, times=300)


def exported(trial: Trial) -> None:
    """A SavedModel answers as the model in memory."""
    if JAX:
        raise Inapplicable("exports are TensorFlow's")
    import tensorflow as tf

    signature = None
    if trial.case.form == "subclass":
        flat = keras.tree.flatten(trial.x)
        signature = [keras.InputSpec(shape=(None, *x.shape[1:]), dtype=str(x.dtype)) for x in flat]
    mc = trial.average(seed=5)
    path = ibnn.export(mc, trial.folder / "exported", input_signature=signature, overwrite=True)
    serve = tf.saved_model.load(str(path)).signatures["serve"]
    names = sorted(serve.structured_input_signature[1])
    own = [x.name for x in trial.functional.inputs]
    given = dict(zip(own, keras.tree.flatten(trial.x), strict=True))
    if set(names) != set(given):
        given = dict(zip(names, given.values(), strict=True))
    served = serve(**{name: tf.constant(value) for name, value in given.items()})
    wanted = {}
    for name, value in mc(trial.x).items():
        wanted.update(
            {f"{name}_{k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    if set(served) != set(wanted):
        raise Wrong(f"the export has {sorted(served)} for {sorted(wanted)}")
    for name, value in wanted.items():
        trial.close(f"the exported {name!r}", served[name], value, times=300)


def file(trial: Trial) -> None:
    """A model from a `.keras` file predicts as the one in memory."""
    path = trial.folder / "model.keras"
    wanted = keras.tree.flatten(trial.average()(trial.x))
    trial.sto.save(path)
    loaded = keras.models.load_model(path)
    for found, value in zip(trial.quiet(loaded), trial.quiet(), strict=True):
        trial.close("the loaded model without noise", found, value, times=3)
    predicted = keras.tree.flatten(trial.average(loaded)(trial.x))
    for found, value in zip(predicted, wanted, strict=True):
        trial.close("the prediction of the loaded model", found, value, times=30)

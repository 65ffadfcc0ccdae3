"""Adversarial images: small changes of every pixel that make a model err."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib import checks
from tfp_ibnn.likelihoods import Labels
from tfp_ibnn.likelihoods.infer import likelihood_of


def fgsm(model: keras.Model, images: Any, labels: Any, epsilon: float, **kwargs: Any) -> np.ndarray:
    """Take one step of the fast gradient sign method.

    The result (N, ...) is clip(x + epsilon * sign(g), 0, 255), where g is the gradient of the
    labels' cross-entropy by the image x, and `epsilon` a number of 0 or above; float32, since
    rounding would undo a step below 0.5. The other arguments are those of `fgsm_direction`, which
    finds the signs once for several epsilons.

    Example:
        >>> import keras, numpy as np
        >>> from lib.shifts import fgsm
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        >>> model.set_weights([np.eye(2), np.zeros(2)])
        >>> fgsm(model, [[10, 0]], [0], epsilon=2.5, from_logits=True)
        array([[7.5, 2.5]], dtype=float32)

    References:
        Goodfellow et al., Explaining and Harnessing Adversarial Examples, arXiv 1412.6572.
    """
    epsilon = np.float32(checks.KINDS["non_negative"]("epsilon", epsilon))
    direction = fgsm_direction(model, images, labels, **kwargs)
    return np.clip(np.asarray(images, "float32") + epsilon * direction, 0, 255)


def fgsm_direction(
    model: keras.Model,
    images: Any,
    labels: Any,
    *,
    from_logits: bool | None = None,
    batch_size: int = 128,
    seed: int = 0,
) -> np.ndarray:
    """Return the sign of the cross-entropy's gradient at each pixel, (N, ...) int8: -1, 0 or 1.

    What is differentiated is the log-odds m = log((1 - p) / p) of the label's probability p. The
    cross-entropy, log(1 + exp(m)), grows with m, but its own gradient fades where the network is
    sure. (So does that of m where all other probabilities are 0: logits are better.) A `MonteCarlo`
    is attacked as a whole, by its `mean`; its memory grows with `batch_size` times its samples. Any
    other stochastic model has one draw of the noise for each image, a function of `seed` and the
    image's position. The state of the model stays as it is: weights, noise switches, random states.

    Args:
        model: a built classifier of images from 0 to 255, with outputs (N, classes) or (N, 1).
        images: (N, ...) pixels from 0 to 255.
        labels: (N,) or (N, 1) integers.
        from_logits: whether the model returns logits; None finds out from its last layer or loss.
        batch_size: how many images to attack at once.
        seed: of the noise of a stochastic model, a whole number of 0 or above.
    """
    slope = _slope(model, from_logits, checks.KINDS["whole"]("seed", seed))
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim < 2 or images.dtype.kind not in "uif":
        raise ValueError(f"`images` must be numbers, (N, ...); got {images.dtype} {images.shape}.")
    if not np.all((images >= 0) & (images <= 255)):
        low, high = images.min(), images.max()
        raise ValueError(f"`images` must lie between 0 and 255; got values from {low} to {high}.")
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != images.shape[:1] or (labels.size and labels.dtype.kind not in "ui"):
        wanted = f"whole numbers, one for each of the {len(images)} images"
        raise ValueError(f"`labels` must be {wanted}; got {labels.dtype} {labels.shape}.")
    if np.any(labels < 0):
        raise ValueError(f"`labels` must be 0 or above; got {labels.min()}.")
    batch_size = min(checks.KINDS["count"]("batch_size", batch_size), len(images)) or 1
    result = np.empty(images.shape, "int8")
    dtype = _precision(model)
    before = [(state, ops.convert_to_numpy(state)) for state in model.non_trainable_variables]
    try:
        for start in range(0, len(images), batch_size):
            # One compiled function serves one size, so the last batch overlaps the one before.
            start = min(start, len(images) - batch_size)
            part = np.arange(start, start + batch_size, dtype="int32")
            found = slope(images[part].astype(dtype), labels[part].astype("int32"), part)
            found = ops.convert_to_numpy(found)
            bad = ~np.isfinite(found).reshape(len(found), -1).all(axis=1)
            if bad.any():
                why = "its label is not a class of `model`, or the output is NaN"
                raise ValueError(f"The gradient at image {part[bad][0]} is not finite: {why}.")
            result[part] = np.sign(found)
    finally:
        # The calls have changed counters and random states.
        for state, value in before:
            state.assign(value)
    return result


def _slope(model: keras.Model, from_logits: bool | None, seed: int) -> Callable:
    """Return the compiled gradient of the log-odds for images, labels and the images' numbers."""
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(f"`model` must be a Keras model that is built; got {model!r}.")
    is_averaged = isinstance(model, ibnn.MonteCarlo)
    if is_averaged and from_logits:
        raise ValueError("`from_logits` is True, but a MonteCarlo returns probabilities.")
    hint = "Say from_logits=True for logits, from_logits=False for probabilities."
    if is_averaged:
        network = getattr(model.inner, "network", model.inner)  # that of a posterior of weights
        likelihood = likelihood_of(network, model.head, model.from_logits)
    else:
        likelihood = likelihood_of(model, None, from_logits, hint)
    if not likelihood.is_classifier:
        raise ValueError(f"`model` must classify; {model.name!r} predicts numbers.")
    has_logits = likelihood.from_logits and not is_averaged
    is_binary = isinstance(likelihood, Labels)

    def total(images, labels, numbers):
        # Noise by number is the same in batches of any size, and leaves the generators alone.
        with ibnn.noise.scope(seed=seed, sample=numbers, losses=False):
            outputs = model(images, training=False)
        scores = outputs["mean"] if is_averaged else outputs
        if len(scores.shape) != 2 or (is_binary and scores.shape[-1] != 1):
            got = f"several answers{' of yes or no' if is_binary else ''}, {tuple(scores.shape)}"
            raise ValueError(f"`model` must give each image one label; got {got}.")
        scores = ops.cast(scores, _precision(model))
        if is_binary:
            no = ops.zeros_like(scores) if has_logits else 1 - scores
            scores = ops.concatenate([no, scores], axis=-1)
        classes = scores.shape[-1]
        chosen = ops.one_hot(labels, classes, dtype="bool")
        limits = np.finfo(keras.backend.standardize_dtype(scores.dtype))
        logs = scores if has_logits else ops.log(ops.maximum(scores, limits.tiny))
        # Summed up and not 1 - p, which has no digits left where p is almost 1.
        others = ops.logsumexp(ops.where(chosen, limits.min, logs), axis=-1)
        log_odds = others - ops.sum(ops.where(chosen, logs, 0), axis=-1)
        # NaN for an unknown class. A sum, not a mean: an image's gradient is then its own.
        return ops.sum(log_odds * ops.where(labels < classes, 1.0, float("nan")))

    return _gradient(total, model.variables)


def _precision(model: keras.Model) -> str:
    return "float64" if model.variable_dtype == "float64" else "float32"


def _gradient(function: Callable, variables: list[keras.Variable]) -> Callable:
    """Return the compiled gradient of a scalar function by its first argument."""
    if keras.backend.backend() == "jax":
        import jax

        @jax.jit
        def jitted(values, *arrays):
            with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
                return jax.grad(function)(*arrays)

        return lambda *arrays: jitted([variable.value for variable in variables], *arrays)
    import tensorflow as tf

    @tf.function(autograph=False)
    def traced(x, *others):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = function(x, *others)
        return tape.gradient(value, x, unconnected_gradients="zero")

    return lambda *arrays: traced(*map(tf.convert_to_tensor, arrays))

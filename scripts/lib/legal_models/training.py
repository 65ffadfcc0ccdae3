"""Checks of what training sees: the KL in the loss, a step, and the moments of noisy outputs."""

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib.legal_models import answers
from lib.legal_models.trial import Inapplicable, Trial, Wrong, array
from lib.legal_models.uses import losses_for

__all__ = ["divergence", "moments", "step"]

ROWS, CALLS = 32, 24
"""How many copies of an example a call takes, and how many calls a first look."""

DRAWS = 8
"""How many explicit sets of weights go beside one call."""


def divergence(trial: Trial) -> None:
    """The loss that the layers add is (beta KL - gamma entropy) / train_size, by formula."""
    with ibnn.noise.scope() as forward_pass:
        trial.sto(trial.x)
    wanted, counted = 0.0, set()
    for layer in ibnn.stochastic_layers(trial.sto):
        posterior = getattr(layer.posterior, "joint", layer.posterior)
        z = forward_pass.recall(layer if posterior is layer.posterior else posterior)
        if id(posterior) in counted:
            continue
        counted.add(id(posterior))
        if isinstance(posterior, ibnn.MeanField):
            kl, entropy = _of_weights(layer)
        else:
            kl, entropy = _of_z(posterior, array(getattr(z, "z", z)))
        positions = np.prod(z.shape[1:-1]) if getattr(layer, "noise", "") == "position" else 1
        positions = 1 if getattr(layer, "kl_reduction", "") == "mean" else positions
        term = array(posterior.beta) * kl - posterior.gamma * entropy
        wanted += positions * term * layer.kl_scale / layer.train_size
    found = sum(array(loss) for loss in trial.sto.losses)
    if not np.isclose(found, wanted, rtol=1e-3 if trial.case.policy != "float64" else 1e-5):
        raise Wrong(f"the layers add {found} to the loss, and by the formula {wanted}")


def _of_weights(layer: keras.layers.Layer) -> tuple[float, float]:
    """Return KL and entropy of Gaussian weights."""
    posterior = layer.posterior
    prior = posterior.prior or ibnn.priors.Normal(posterior.prior_scale or 1.0)
    if not isinstance(prior, ibnn.priors.Normal) or isinstance(posterior, ibnn.MNF):
        raise Inapplicable("a KL that is estimated with noise of its own")
    kl = entropy = 0.0
    means = [weight for weight in layer.layer.weights if "kernel" in weight.name]
    means += [layer.layer.bias] * (len(posterior.raw_scales) > len(means))
    for number, (mean, raw) in enumerate(zip(means, posterior.raw_scales, strict=True)):
        loc, scale = array(mean), answers.scale(array(raw))
        center = array(posterior.prior_locs[number]) if posterior.prior_locs else prior.loc
        center = loc if isinstance(prior, ibnn.priors.Tied) else center
        kl += answers.normal_kl(loc, scale, center, prior.scale).sum()
        entropy += (np.log(scale) + 0.5 * np.log(2 * np.pi * np.e)).sum()
    return kl, entropy


def _of_z(posterior: ibnn.Posterior, z: np.ndarray) -> tuple[float, float]:
    """Return KL and entropy of a posterior over z, averaged over the draws if estimated."""
    is_mixture = posterior.components > 1
    if is_mixture and (isinstance(posterior, ibnn.MixturePosterior) or posterior.shared_components):
        raise Inapplicable("a bound of the KL")
    q, p = posterior.distribution(), posterior.prior()
    rows = ops.convert_to_tensor(z.reshape(-1, z.shape[-1]).astype(posterior.dtype))
    exact = not getattr(posterior, "flows", []) and not is_mixture
    entropy = array(q.entropy()) if exact else -array(q.log_prob(rows)).mean()
    if not exact or posterior._given_prior is not None:
        own = ops.cast(rows, p.dtype)  # of a prior that was given
        return -entropy - array(p.log_prob(own)).mean(), entropy
    if posterior.is_centered:
        loc, scale = map(array, posterior.loc_and_scale())
        covariance = np.diag(scale**2)
    else:
        loc, covariance = array(q.mean()), array(q.covariance())
    return answers.gaussian_kl(loc, covariance, 1.0, array(p.stddev())[0]), entropy


def step(trial: Trial) -> None:
    """A training step has a finite loss, that of its parts, and leaves weights finite."""
    several = len(trial.case.heads) > 1
    y = trial.y if several else trial.y[0]
    weight = [trial.weight] * len(trial.y) if several and trial.weight is not None else trial.weight
    plain = ibnn.to_deterministic(trial.sto)
    for model in (plain, trial.sto):
        model.compile(keras.optimizers.SGD(1e-3), losses_for(trial))
        model.run_eagerly = True
    copies = keras.tree.map_structure(
        lambda array: None if array is None else np.repeat(array, trial.sto.train_samples, axis=0),
        (trial.x, y, weight),
    )
    try:
        plain.train_on_batch(*copies)
    except Exception as error:  # whatever Keras has against it
        raise Inapplicable("a model that Keras does not train") from error
    logs = trial.sto.train_on_batch(trial.x, y, weight, return_dict=True)
    if not all(np.isfinite(value) for value in logs.values()):
        raise Wrong(f"a training step has {logs}")
    for variable in trial.sto.trainable_variables:
        if not np.isfinite(array(variable)).all():
            raise Wrong(f"{variable.path} is not finite after a step")


def moments(trial: Trial) -> None:
    """Outputs of training have the moments of explicit samples of the weights."""
    layers = [
        x for x in ibnn.stochastic_layers(trial.sto) if isinstance(x, ibnn.layers.MeanFieldLayer)
    ]
    if not layers:
        raise Inapplicable("no random weights")
    layer = layers[int(trial.rng.integers(len(layers)))]
    shape = tuple(3 if size is None else size for size in layer._input_shape[1:])
    example = trial.rng.normal(size=shape).astype(keras.config.floatx())
    first = _distance(trial, layer, example, CALLS)
    if first.max() > 5:
        again = _distance(trial, layer, example, 16 * CALLS)
        if again[first.argmax()] > 5:
            raise Wrong(
                f"outputs of {layer.name} in training differ from those of explicit weights"
                f" by {again[first.argmax()]:.1f} standard errors"
            )


def _distance(
    trial: Trial, layer: keras.layers.Layer, example: np.ndarray, calls: int
) -> np.ndarray:
    """Return by how many standard errors means and squares of outputs differ."""
    rows = np.repeat(example[None], ROWS, axis=0)
    trained = [array(layer(rows, training=True)) for _ in range(calls)]
    trained = np.stack(
        [np.concatenate([x.mean(0).ravel(), np.square(x).mean(0).ravel()]) for x in trained]
    )
    explicit = np.stack([_explicit(trial, layer, example, rows) for _ in range(calls)])
    error = np.sqrt((trained.var(0, ddof=1) + explicit.var(0, ddof=1)) / calls)
    gap = np.abs(trained.mean(0) - explicit.mean(0))
    return gap / (error + 30 * trial.eps * (1 + np.abs(explicit).max(0)))


def _explicit(
    trial: Trial, layer: keras.layers.Layer, example: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return mean and squares of outputs of sampled weights."""
    if isinstance(layer.posterior, ibnn.MNF):
        with ibnn.noise.scope(groups=ROWS, losses=False):
            found = array(layer(rows))
    else:
        found = np.stack([array(_sampled(trial, layer, example)) for _ in range(DRAWS)])
    return np.concatenate([found.mean(0).ravel(), np.square(found).mean(0).ravel()])


def _sampled(trial: Trial, layer: keras.layers.Layer, example: np.ndarray) -> np.ndarray:
    """Return the output for weights that numpy draws around their means."""
    plain, posterior = layer.layer, layer.posterior
    weights = [weight for weight in plain.weights if "kernel" in weight.name]
    weights += [plain.bias] * (len(posterior.raw_scales) > len(weights))
    means = [array(weight) for weight in weights]
    for weight, mean, raw in zip(weights, means, posterior.raw_scales, strict=True):
        draw = mean + answers.scale(array(raw)) * trial.rng.normal(size=mean.shape)
        weight.assign(draw.astype(keras.backend.standardize_dtype(weight.dtype)))
    found = plain(example[None])
    for weight, mean in zip(weights, means, strict=True):
        weight.assign(mean.astype(keras.backend.standardize_dtype(weight.dtype)))
    return found[0]

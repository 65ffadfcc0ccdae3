"""The Laplace approximation of a trained network."""

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn._core.protocols import Sampler
from tfp_ibnn.data.examples import labelled_batches
from tfp_ibnn.layers.heads import gaussian_nll
from tfp_ibnn.prediction.monte_carlo import MonteCarlo
from tfp_ibnn.weights.base import WeightSets
from tfp_ibnn.weights.features import LogitNetwork, check_network
from tfp_ibnn.weights.flat import FlatPosterior, double, places_of, split, triangular
from tfp_ibnn.weights.laplace.blocks import blocks_of
from tfp_ibnn.weights.laplace.curvature import collect
from tfp_ibnn.weights.laplace.evidence import Evidence
from tfp_ibnn.weights.laplace.guard import MARGIN, Reservoir, gain_along, guarded
from tfp_ibnn.weights.laplace.samplers import LinearizedSampler, NetworkSampler, ProbitSampler
from tfp_ibnn.weights.laplace.structures import STRUCTURES, check_side

_METHODS = ("marglik", "validation")
_PRIORS = ("guarded", *_METHODS)
GRID = np.logspace(-4, 4, 21)
"""The prior precisions that are compared on validation data."""

_FAR = 0.3
"""By how many nats per example a step may raise the log-likelihood of a trained network."""


# `priors.Laplace` has the other name.
@keras.saving.register_keras_serializable(package="tfp_ibnn", name="LaplacePosterior")
class Laplace(FlatPosterior):
    """A Gaussian posterior around the weights of a trained network, without training it again.

    N(w*, (f H + prior_precision I)^-1), where H is the generalised Gauss-Newton matrix (GGN) of
    minus the log-likelihood, summed over the training data, and f is 1 / (temperature * noise
    variance). The prior's mean is 0.

    A fit takes a backward pass for each output, and memory for W^2 numbers ("full", of W weights),
    W ("diag"), W times `rank` ("lowrank"), or inputs^2 + outputs^2 of each layer ("kron"). Batch
    normalization is as in inference; its scale and shift take a pattern to be uncertain.
    References: Immer et al., arXiv 2008.08400; Daxberger et al., Laplace Redux, arXiv 2106.14806.

    Args:
        model: a trained Functional or Sequential model with one output (N, K); it is not copied.
        subset_of_weights: which weights are uncertain: "last_layer", a Dense one; "all"; or a
            regular expression, which is searched for in `path` of each trainable weight.
        hessian_structure: "diag", "kron" (a Kronecker product for each layer: Dense layers, and
            convolutions by the expand rule), "full" or "lowrank".
        prior_precision: a number; "marglik", that of the largest marginal likelihood; "guarded"
            (the default), that one or, for classifiers and a `GaussianHead`, the next larger one
            at which the NLL of predictions exceeds that of the network by at most 0.01 nats per
            example, on up to 512 examples of the training data, or of `validation_data` if given;
            "validation", that of the least NLL on `validation_data`.
        noise_scale: of the targets of a plain regression: a number, or "marglik".
        temperature: multiplies the covariance that the data leaves; below 1 it is a cold posterior.
        pred_type: "glm", the network linearised in its weights, or "nn", sampled networks.
        link_approx: of "glm": "mc", draws; or "probit", one distribution in closed form, for
            classifiers, whose `epistemic` is 0.
        rank: of "lowrank", the number of eigenvectors.
        head, from_logits: what the output means, as for `MonteCarlo`.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> x, noise = np.random.default_rng(0).normal(size=(2, 50, 1)).astype("float32")
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> y = keras.ops.convert_to_numpy(model(x)) + noise
        >>> la = ibnn.Laplace(model, hessian_structure="full").fit(x, y, verbose=0)
        >>> sorted(ibnn.MonteCarlo(la, samples=8, seed=0).predict(x, verbose=0))
        ['aleatoric', 'epistemic', 'mean', 'total_variance']
    """

    def __init__(
        self,
        model: keras.Model,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        prior_precision: str | float = "guarded",
        noise_scale: str | float = "marglik",
        temperature: float = 1.0,
        pred_type: str = "glm",
        link_approx: str = "mc",
        rank: int = 50,
        head: str | None = None,
        from_logits: bool | None = None,
        **kwargs: Any,
    ) -> None:
        options = dict(locals())
        for name in ("self", "__class__", "model", "kwargs"):
            del options[name]
        structure = STRUCTURES[checks.one_of("hessian_structure", hessian_structure, [*STRUCTURES])]
        checks.one_of("pred_type", pred_type, ("glm", "nn"))
        checks.one_of("link_approx", link_approx, ("mc", "probit"))
        for name, words in {"prior_precision": _PRIORS, "noise_scale": ("marglik",)}.items():
            if isinstance(options[name], str):
                checks.one_of(name, options[name], words)
            else:
                checks.positive(name, options[name])
        check_network(model)
        blocks, left_out = blocks_of(model, subset_of_weights, head, from_logits)
        checks.positive("temperature", temperature)
        checks.positive_integer("rank", rank)
        chosen = {id(block.layer) for block in blocks}
        network = LogitNetwork(model, lambda x: id(x) in chosen, head, from_logits)
        if pred_type == "glm" and link_approx == "probit" and not network.likelihood.is_classifier:
            raise ValueError("link_approx='probit' is for classifiers; use 'mc' for a regression.")
        fit = kwargs.pop("fit", {})  # in a config
        uncertain = [v for block in blocks for v in block.variables]
        super().__init__(model, **{**kwargs, "places": places_of(model, uncertain)})
        self._options, self._fit = options, dict(fit)
        self._left_out, self.is_last_layer = left_out, subset_of_weights == "last_layer"
        self.logit_network = network
        self.structure = structure(blocks, rank=rank, is_last_layer=self.is_last_layer)
        shapes = self.structure.shapes()
        self.structure.variables = [self._add(name, shape) for name, shape in shapes.items()]
        self.prior_precision = self._add("prior_precision", (), 1.0)
        self.noise_scale = self._add("noise_scale", (), 1.0)

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        validation_data: Any = None,
        batch_size: int = 64,
        verbose: Any = "auto",
    ) -> "Laplace":
        """Find the posterior from the training data, and return it; the network stays as it is.

        `x` and `y` are arrays, or `x` is a `tf.data.Dataset` or `PyDataset` of batches (x, y), and
        so is `validation_data`, for prior_precision="validation" or "guarded".
        """
        wanted = self._options["prior_precision"]
        if wanted == "validation" and validation_data is None:
            raise ValueError("prior_precision='validation' needs `validation_data`, (x, y).")
        if self._left_out:
            fixed = f"The scale and shift of batch normalization {', '.join(self._left_out)}"
            remedy = "a pattern in `subset_of_weights` can include them, but not its statistics"
            warnings.warn(f"{fixed} stay as they are: {remedy}.", stacklevel=2)
        sample = Reservoir()
        data = x, y, batch_size, verbose
        found = collect(self.logit_network, self.structure, *data, watch=sample.add)
        least = max(2, self.logit_network.width)
        if found.examples < least:
            raise ValueError(f"`x` must hold at least {least} examples; got {found.examples}.")
        for variable, value in zip(self.structure.variables, found.values, strict=True):
            variable.assign(value)
        self._fit = {"examples": found.examples, "log_likelihood": found.log_likelihood}
        if wanted == "guarded":
            self._maximize_evidence(None)
            self._guard(sample, validation_data, batch_size)
        elif isinstance(wanted, str):
            self.optimize_prior_precision(wanted, validation_data, batch_size)
        else:
            self._maximize_evidence(wanted)
        gain = self._gain_of_a_step(found.gradient, sample, batch_size)
        if gain > _FAR:
            warnings.warn(
                "The network does not seem to be trained on these data, as it should be: a step "
                f"of its weights raises the log-likelihood by {gain:.2g} nats per example.",
                stacklevel=2,
            )
        return self

    def optimize_prior_precision(
        self, method: str = "marglik", validation_data: Any = None, batch_size: int = 64
    ) -> float:
        """Set and return the prior precision; the training data is not needed again.

        By "marglik", the marginal likelihood; or "validation", the NLL of predictions for new data,
        (x, y) or a dataset, the best of `GRID`. Both set a noise scale that was not given.
        """
        checks.one_of("method", method, _METHODS)
        prior = self._maximize_evidence(None)
        if method == "validation":
            try:
                losses = self._validation_losses(validation_data, batch_size)
            finally:
                self.prior_precision.assign(prior)
            self.prior_precision.assign(GRID[np.argmin(losses)])
        return float(self.prior_precision)

    def _maximize_evidence(self, prior: float | None) -> float:
        """Set noise scale and prior precision, the latter to a value if that is given."""
        scale = self._options["noise_scale"]
        found = self.evidence.maximize(prior, None if isinstance(scale, str) else scale)
        self.prior_precision.assign(found[0])
        self.noise_scale.assign(found[1])
        return found[0]

    @property
    def evidence(self) -> Evidence:
        """What the marginal likelihood depends on."""
        self._check_fitted()
        free = self.logit_network.likelihood.free_scale
        return Evidence(
            self.structure.eigenvalues(),
            float(sum(np.sum(np.square(ops.convert_to_numpy(v), dtype="f8")) for v in self.mean())),
            self._fit["log_likelihood"],
            self._fit["examples"] * self.logit_network.width if free else 0,
            self._options["temperature"],
        )

    @property
    def prior_scale(self) -> float:
        """The prior's standard deviation: where "guarded" narrowed it, that of "marglik"."""
        current = float(self.prior_precision)
        before, narrowed = self._fit.get("guarded", (current, current))
        return (before if current == narrowed else current) ** -0.5

    def log_marginal_likelihood(
        self, prior_precision: float | None = None, noise_scale: float | None = None
    ) -> float:
        """Return the logarithm of the evidence in nats, to compare models and priors by.

        The arguments take the place of those that were fitted, before "guarded" narrowed the prior;
        it costs a sum over the weights.
        """
        prior = self.prior_scale**-2 if prior_precision is None else prior_precision
        scale = float(self.noise_scale) if noise_scale is None else noise_scale
        checks.positive("prior_precision", prior)
        return self.evidence.log_prob(prior, checks.positive("noise_scale", scale))

    def scale(self, values: Tensor) -> Tensor:
        """Return the variances along eigenvectors of the Hessian with these eigenvalues."""
        prior, noise = (ops.cast(v, values.dtype) for v in (self.prior_precision, self.noise_scale))
        return 1 / (values / (self._options["temperature"] * ops.square(noise)) + prior)

    def deviation(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return how far set `number` is from the mean."""
        return split(self._step(key, number), self.sampled)

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives, (size,)."""
        return self.center() + self._step(key, number)

    def center(self) -> Tensor:
        """Return the trained weights."""
        parts = [ops.reshape(ops.cast(v, self.variable_dtype), (-1,)) for v in self.sampled]
        return ops.concatenate(parts)

    def _step(self, key: Tensor, number: int | Tensor) -> Tensor:
        noise = self._standard_normal(key, number)
        return self.structure.scaled(noise, lambda x: ops.sqrt(self.scale(x)))

    def distribution(self) -> Any:
        """Return the Gaussian over the uncertain weights, flat; W^2 numbers unless diagonal."""
        self._check_fitted()
        size, mean = self.size, self.center()
        if self._options["hessian_structure"] == "diag":
            (diagonal,) = self.structure.variables
            return tfd.MultivariateNormalDiag(mean, ops.sqrt(self.scale(diagonal.value)))
        check_side(size, f"the covariance of {size:,} weights")
        eye = ops.eye(size, dtype=self.logit_network.dtype)
        root = self.structure.scaled(eye, lambda x: ops.sqrt(self.scale(x)))
        lower = triangular(double(root).T)
        return tfd.MultivariateNormalTriL(mean, ops.cast(lower, mean.dtype))

    def materialize(self, *args: Any, **options: Any) -> WeightSets:
        """Draw weight sets of sampled networks; a linearised network has none, and is refused."""
        kind = self._options["pred_type"], self._options["link_approx"]
        if kind == ("glm", "probit") or (kind[0] == "glm" and not self.is_last_layer):
            raise ValueError(
                "`materialize` gives networks with sampled weights, which do not predict as "
                f"pred_type='glm' with link_approx={kind[1]!r} does: use MonteCarlo(posterior), or "
                "ibnn.Laplace(model, ..., pred_type='nn')."
            )
        return super().materialize(*args, **options)

    def sampler(self, samples: int, **options: Any) -> Sampler:
        """Return what runs draws of the linearised network, or networks with sampled weights."""
        self._check_fitted()
        self.check_options(options)
        if (self._options["pred_type"], self._options["link_approx"]) == ("glm", "probit"):
            return ProbitSampler(self, 1, 1)
        # A last layer is linear in its weights: the draws are the same.
        is_nn = self._options["pred_type"] == "nn" or self.is_last_layer
        chunk_size = options.get("chunk_size") or (4 if is_nn and not self.is_last_layer else 64)
        return (NetworkSampler if is_nn else LinearizedSampler)(self, samples, chunk_size)

    def get_config(self) -> dict[str, Any]:
        model = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "model": model, **self._options, "fit": self._fit}

    def _check_fitted(self) -> None:
        if not self._fit:
            raise ValueError("The Laplace approximation is not fitted: call fit(x, y) first.")

    def _guard(self, sample: Reservoir, validation_data: Any, batch_size: int) -> None:
        """Raise the prior precision until the posterior costs at most `MARGIN` nats."""
        if self.logit_network.likelihood.free_scale:
            return  # the network alone does not know how large its errors are
        if validation_data is not None:
            sample = Reservoir()
            for inputs, labels in self._validation_batches(validation_data, batch_size):
                sample.add(inputs, labels)
        data = *sample.examples(), batch_size
        options = {name: self._options[name] for name in ("head", "from_logits")}
        network = MonteCarlo(self.network, samples=1, seed=0, **options)
        limit = self._loss(network, *data) + MARGIN
        averaged = MonteCarlo(self, samples=32, seed=0, **options)
        prior = chosen = float(self.prior_precision)

        def loss(prior: float) -> float:
            self.prior_precision.assign(prior)
            return self._loss(averaged, *data)

        try:
            chosen = guarded(prior, loss, limit)
        finally:
            self.prior_precision.assign(chosen)
        self._fit["guarded"] = [prior, float(self.prior_precision)]

    def _gain_of_a_step(self, gradient: np.ndarray, sample: Reservoir, batch_size: int) -> float:
        """Return by how many nats per example a Newton step, or a part of it, helps the network."""
        factor = self._options["temperature"] * float(self.noise_scale) ** 2
        slope = ops.convert_to_tensor((gradient / factor).astype(self.logit_network.dtype))
        step = self.structure.scaled(slope, self.scale)
        promised = float(ops.sum(slope * step)) / 2 / self._fit["examples"]
        if promised <= _FAR:
            return promised
        # The quadratic promises more than there is where a prediction is confident and wrong.
        return gain_along(step, self, sample, batch_size)

    def _loss(self, averaged: MonteCarlo, x: Any, y: np.ndarray, batch_size: int) -> float:
        """Return the NLL of predictions, in nats per example."""
        found = averaged.predict(x, batch_size=batch_size, verbose=0)
        if self.logit_network.likelihood.free_scale:
            variance = found["total_variance"] + float(self.noise_scale) ** 2
            return float(ops.mean(gaussian_nll(y, found["mean"], variance)))
        return float(ops.mean(averaged.compute_loss(y=y, y_pred=found)))

    def _validation_batches(self, data: Any, batch_size: int) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield inputs and checked targets."""
        if data is None:
            raise ValueError("`validation_data` is missing: give (x, y) or a dataset.")
        x, y = data if isinstance(data, (tuple, list)) else (data, None)
        likelihood = self.logit_network.likelihood
        for inputs, labels in labelled_batches(x, y, batch_size):
            yield inputs, likelihood.targets(labels)

    def _validation_losses(self, data: Any, batch_size: int) -> list[float]:
        """Return the NLL for each prior precision of the grid."""
        parts = list(self._validation_batches(data, batch_size))
        x, y = keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)
        options = {name: self._options[name] for name in ("head", "from_logits")}
        averaged, losses = MonteCarlo(self, samples=32, seed=0, **options), []
        for prior in GRID:
            self.prior_precision.assign(prior)
            losses.append(self._loss(averaged, x, y, batch_size))
        return losses

"""The Laplace approximation of a trained network."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks
from tfp_ibnn._core.backend import Tensor, tfd
from tfp_ibnn._core.protocols import Sampler
from tfp_ibnn.weights.base import WeightSets
from tfp_ibnn.weights.features import LastLayer, LogitNetwork, check_network
from tfp_ibnn.weights.flat import FlatPosterior
from tfp_ibnn.weights.laplace.blocks import Block, blocks_of
from tfp_ibnn.weights.laplace.curvature import collect
from tfp_ibnn.weights.laplace.guard import FAR, Reservoir, newton_gain
from tfp_ibnn.weights.laplace.marginal import MarginalLikelihood
from tfp_ibnn.weights.laplace.options import METHODS, Options
from tfp_ibnn.weights.laplace.positions import OfPositions, draws_at_once, rows_of
from tfp_ibnn.weights.laplace.prior import best_of_grid, narrowed
from tfp_ibnn.weights.laplace.samplers import LinearizedSampler, NetworkSampler, ProbitSampler
from tfp_ibnn.weights.laplace.structure import Structure, check_side
from tfp_ibnn.weights.laplace.structures import STRUCTURES
from tfp_ibnn.weights.vectors import double, places_of, split, triangular


# `priors.Laplace` has the other name.
@keras.saving.register_keras_serializable(package="tfp_ibnn", name="LaplacePosterior")
class Laplace(OfPositions, MarginalLikelihood, FlatPosterior):
    """A Gaussian posterior around the weights of a trained network, without training it again.

    N(w*, (f H + prior_precision I)^-1), where H is the generalized Gauss-Newton matrix (GGN) of
    minus the log-likelihood, summed over the training data, and f is 1 / (temperature * noise
    variance). The prior's mean is 0.

    The last layer may give an output at each position (N, ..., K), such as a pixel or a time step:
    a Dense layer, in a `TimeDistributed` or not, or a convolution. Each position is then an example
    of its own; masked ones do not count. Of more than 100,000 positions a random sample is taken,
    and stands for all.

    A fit takes a backward pass for each output, and memory for W^2 numbers ("full", of W weights),
    W ("diag"), W times `rank` ("lowrank"), or inputs^2 + outputs^2 of each layer ("kron"). Batch
    normalization is as in inference; its scale and shift take a pattern to be uncertain.
    References: Immer et al., arXiv 2008.08400; Daxberger et al., Laplace Redux, arXiv 2106.14806.

    Args:
        model: a trained Functional or Sequential model with one output (N, K), or, for the last
            layer, (N, ..., K); it is not copied.
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
        pred_type: "glm", the network linearized in its weights, or "nn", sampled networks.
        link_approx: of "glm": "mc", draws; or "probit", one distribution in closed form, for
            classifiers, whose `epistemic` is 0.
        rank: of "lowrank", the number of eigenvectors.
        head: what the output means, as for `MonteCarlo`.
        from_logits: whether it is logits, as for `MonteCarlo`.
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
        options = Options(
            subset_of_weights,
            hessian_structure,
            prior_precision,
            noise_scale,
            temperature,
            pred_type,
            link_approx,
            rank,
            head,
            from_logits,
        )
        options.check()
        check_network(model)
        blocks, left_out = blocks_of(model, subset_of_weights, head, from_logits)
        is_last_layer = subset_of_weights == "last_layer"
        if is_last_layer:
            network = LastLayer(model, head, from_logits, positions=True)
        else:
            layers = {id(block.layer) for block in blocks}
            network = LogitNetwork(model, lambda x: id(x) in layers, head, from_logits)
        if options.is_probit and not network.likelihood.is_classifier:
            raise ValueError("link_approx='probit' is for classifiers; use 'mc' for a regression.")
        uncertain = [v for block in blocks for v in block.variables]
        kwargs["places"] = places_of(model, uncertain)
        statistics = kwargs.pop("fit", {})  # in a config
        super().__init__(model, **kwargs)
        self._options = options
        self._fit = dict(statistics)
        self._left_out = left_out
        self.is_last_layer = is_last_layer
        self.logit_network = network
        self._add_structure(STRUCTURES[hessian_structure], blocks, rank)
        self.prior_precision = self._add("prior_precision", (), 1.0)
        self.noise_scale = self._add("noise_scale", (), 1.0)

    def _add_structure(self, kind: type[Structure], blocks: list[Block], rank: int) -> None:
        """Add the Hessian, whose variables are NaN until `fit`."""
        self.structure = kind(blocks, rank=rank, is_last_layer=self.is_last_layer)
        variables = []
        for name, shape in self.structure.shapes().items():
            variables.append(self._add(name, shape))
        self.structure.variables = variables

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        validation_data: Any = None,
        batch_size: int = 64,
        verbose: Any = "auto",
    ) -> "Laplace":
        """Find the posterior from the training data; the network stays as it is.

        Args:
            x: training inputs, or a `tf.data.Dataset` or `PyDataset` of batches (x, y) or
                (x, y, sample_weight).
            y: training targets, (N, ...) at each position; None with a dataset.
            sample_weight: how often each example, or each of its positions, counts, for arrays.
            validation_data: (x, y) or such a dataset, for prior_precision="validation" or
                "guarded".
            batch_size: examples at a time, 64 by default.
            verbose: 0 shows no progress.

        Returns:
            Itself.

        Raises:
            ValueError: for data that do not fit the network, and fewer than two examples.
        """
        choice = self._options.prior_precision
        if choice == "validation" and validation_data is None:
            raise ValueError("prior_precision='validation' needs `validation_data`, (x, y).")
        if self._left_out:
            warnings.warn(
                f"The scale and shift of batch normalization {', '.join(self._left_out)} stay as "
                "they are: a pattern in `subset_of_weights` can include them, but not its "
                "statistics.",
                stacklevel=2,
            )
        if self.logit_network.has_positions:
            rows = rows_of(self, x, y, sample_weight, batch_size=batch_size, verbose=verbose)
            return self.fit_rows(rows, self.rows_of_pair(validation_data, batch_size))
        sample = Reservoir()
        gradient = self._fit_hessian(x, y, sample_weight, batch_size, verbose, sample)
        if choice == "guarded":
            self._maximize_evidence(None)
            self._guard(sample, validation_data, batch_size)
        elif isinstance(choice, str):
            self.optimize_prior_precision(choice, validation_data, batch_size)
        else:
            self._maximize_evidence(choice)
        slope = gradient / (self._options.temperature * float(self.noise_scale) ** 2)
        gain = newton_gain(self, slope, self._fit["examples"], sample, batch_size)
        if gain > FAR:
            warnings.warn(
                "The network does not seem to be trained on these data, as it should be: a step "
                f"of its weights raises the log-likelihood by {gain:.2g} nats per example.",
                stacklevel=2,
            )
        return self

    def _fit_hessian(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int,
        verbose: Any,
        sample: Reservoir,
    ) -> np.ndarray:
        """Set the Hessian, fill the sample, and return the gradient of the log-likelihood."""
        network = self.logit_network
        structure = self.structure
        sums = collect(
            network,
            structure,
            x,
            y,
            batch_size,
            verbose,
            watch=sample.add,
            sample_weight=sample_weight,
        )
        least = max(2, network.width)
        if sums.count < least:
            raise ValueError(f"`x` must hold at least {least} examples; got {sums.count}.")
        for variable, value in zip(structure.variables, sums.values, strict=True):
            variable.assign(value)
        self._fit = {"examples": sums.examples, "log_likelihood": sums.log_likelihood}
        return sums.gradient

    def optimize_prior_precision(
        self, method: str = "marglik", validation_data: Any = None, batch_size: int = 64
    ) -> float:
        """Set and return the prior precision; the training data is not needed again.

        It also sets a noise scale that was not given.

        Args:
            method: "marglik", by the marginal likelihood; or "validation", by the NLL of
                predictions for new data, the best of 21 from 1e-4 to 1e4.
            validation_data: (x, y) or a dataset, for "validation".
            batch_size: examples at a time, 64 by default.

        Returns:
            The prior precision.
        """
        checks.one_of("method", method, METHODS)
        if self.logit_network.has_positions and validation_data is not None:
            rows = self.rows_of_pair(validation_data, batch_size)
            return self.optimize_for_rows(method, rows)
        by_evidence = self._maximize_evidence(None)
        if method == "validation":
            best = by_evidence
            head = self._options.head, self._options.from_logits
            try:
                best = best_of_grid(self, validation_data, batch_size, *head)
            finally:
                self.prior_precision.assign(best)
        return float(self.prior_precision)

    def _maximize_evidence(self, prior: float | None) -> float:
        """Set noise scale and prior precision, the latter to a value if that is given."""
        prior, scale = self.evidence.maximize(prior, self._options.known_noise_scale)
        self.prior_precision.assign(prior)
        self.noise_scale.assign(scale)
        return prior

    def _guard(self, sample: Reservoir, validation_data: Any, batch_size: int) -> None:
        """Raise the prior precision until the posterior costs at most `MARGIN` nats."""
        if self.logit_network.likelihood.free_scale:
            return  # the network alone does not know how large its errors are
        by_evidence = float(self.prior_precision)
        chosen = by_evidence
        head = self._options.head, self._options.from_logits
        try:
            chosen = narrowed(self, sample, validation_data, batch_size, *head)
        finally:
            self.prior_precision.assign(chosen)
        self._fit["guarded"] = [by_evidence, float(self.prior_precision)]

    def scale(self, values: Tensor) -> Tensor:
        """Return the variances along eigenvectors of the Hessian with these eigenvalues."""
        dtype = values.dtype
        prior = ops.cast(self.prior_precision, dtype)
        noise_scale = ops.cast(self.noise_scale, dtype)
        factor = self._options.temperature * ops.square(noise_scale)
        return 1 / (values / factor + prior)

    def deviation(self, key: Tensor, number: int | Tensor) -> list[Tensor]:
        """Return how far a draw is from the mean.

        Args:
            key: two integers.
            number: number of the draw, from 0 on.

        Returns:
            A value for each uncertain weight.
        """
        return split(self._step(key, number), self.sampled)

    def draw(self, key: Tensor, number: int | Tensor) -> Tensor:
        """Return draw `number` of those a key gives.

        Args:
            key: two integers.
            number: number of the draw, from 0 on, or several (S,).

        Returns:
            A vector (size,), or several (S, size).
        """
        return self.center() + self._step(key, number)

    def center(self) -> Tensor:
        """Return the trained weights."""
        parts = []
        for variable in self.sampled:
            value = ops.cast(variable, self.variable_dtype)
            parts.append(ops.reshape(value, (-1,)))
        return ops.concatenate(parts)

    def _step(self, key: Tensor, number: int | Tensor) -> Tensor:
        noise = self._standard_normal(key, number)
        return self.structure.scaled(noise, self._deviations)

    def _deviations(self, values: Tensor) -> Tensor:
        """Return the standard deviations along eigenvectors with these eigenvalues."""
        return ops.sqrt(self.scale(values))

    def distribution(self) -> Any:
        """Return the Gaussian over the uncertain weights, flat; W^2 numbers unless diagonal."""
        self._check_fitted()
        mean = self.center()
        if self._options.hessian_structure == "diag":
            (diagonal,) = self.structure.variables
            return tfd.MultivariateNormalDiag(mean, self._deviations(diagonal.value))
        check_side(self.size, f"the covariance of {self.size:,} weights")
        identity = ops.eye(self.size, dtype=self.logit_network.dtype)
        root = self.structure.scaled(identity, self._deviations)
        lower = triangular(double(root).T)
        lower = ops.cast(lower, mean.dtype)
        return tfd.MultivariateNormalTriL(mean, lower)

    def materialize(self, *args: Any, **options: Any) -> WeightSets:
        """Draw weight sets of sampled networks; a linearized network has none, and is refused."""
        link = self._options.link_approx
        is_linearized = self._options.pred_type == "glm" and not self.is_last_layer
        if self._options.is_probit or is_linearized:
            raise ValueError(
                "`materialize` gives networks with sampled weights, which do not predict as "
                f"pred_type='glm' with link_approx={link!r} does: use MonteCarlo(posterior), or "
                "ibnn.Laplace(model, ..., pred_type='nn')."
            )
        return super().materialize(*args, **options)

    def sampler(self, samples: int, **options: Any) -> Sampler:
        """Return what runs draws of the linearized network, or networks with sampled weights.

        Args:
            samples: number of draws; "probit" has one distribution.
            **options: those of `MonteCarlo`, such as `chunk_size`.
        """
        self._check_fitted()
        self.check_options(options)
        if self._options.is_probit:
            return ProbitSampler(self, 1, 1)
        chunk_size = options.get("chunk_size")
        if self.is_last_layer:  # linear in its weights: the draws are the same
            return NetworkSampler(self, samples, chunk_size or draws_at_once(self.logit_network))
        if self._options.pred_type == "nn":
            return NetworkSampler(self, samples, chunk_size or 4)
        return LinearizedSampler(self, samples, chunk_size or 64)

    def get_config(self) -> dict[str, Any]:
        model = keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "model": model, **self._options._asdict(), "fit": self._fit}

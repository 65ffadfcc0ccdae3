"""IVON, an optimizer that learns a Gaussian over all weights; a callback that shows its mean."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.serialization import ConfiguredLayer
from tfp_ibnn.training.optimizers import Schedule
from tfp_ibnn.weights.flat import GaussianWeights
from tfp_ibnn.weights.sgmcmc import CHANGE_THE_TARGET, check_weights, noise_of_step
from tfp_ibnn.weights.vectors import double, places_of


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class IVON(ConfiguredLayer, keras.optimizers.Optimizer):
    """Improved variational online Newton: plain `fit` trains a Gaussian over all weights.

    It minimizes N E_q[u(w)] - T H[q] over q = N(m, sigma^2), independent weights, with
    u(w) = loss(w) + d |w|^2 / 2 and d = 1 / (N s^2): at T = 1 the negative ELBO with Keras's loss,
    the *mean* negative log-likelihood of N examples, and the prior N(0, s^2). In a step the network
    runs at a draw w = m + sigma eps, and with the gradient g of the loss there

        v  = g (w - m) / sigma^2                       an estimate of the Hessian's diagonal
        a <- beta_1 a + (1 - beta_1) g
        h <- beta_2 h + (1 - beta_2) v + (1 - beta_2)^2 (h - v)^2 / (2 (h + d))
        m <- m - rate (h_0 + d) (a / (1 - beta_1^t) + d m) / (h + d)
        sigma = 1 / sqrt((h + d) N / T)

    The second power keeps h + d positive. A step costs one gradient, as Adam's, and random numbers;
    memory is three times the weights.

    **What the weights of the model are.** During `fit` they are the draw, so the loss, metrics,
    validation and callbacks are of one network drawn from q; with `IVONMean()` those at the end of
    an epoch are of the mean. After `fit` they are the mean: `evaluate`, `predict` and `save` use
    it, and weights that you set are the new mean. Only after Ctrl-C on TensorFlow they remain a
    draw: call `optimizer.finalize_variable_values(model.trainable_variables)`.

    The first step of each `fit` without `IVONMean` is at the mean, and leaves h as it is.

    **What to choose.** h starts at h_0, so that sigma starts at 1 / sqrt(N h_0 / T) for all weights
    and the rate at that of SGD with momentum; after k steps a share beta_2^k of h is still h_0.
    With the paper's 0.99999 that is nearly all in a short training, which is robust: sigma is then
    what you chose. To learn it, let 1 - beta_2 be about 5 divided by the number of steps, and h_0
    as small as h will be (0.01, say), since the rate grows as h_0 / h; minibatches of B examples
    give h a relative error of about sqrt((1 - beta_2) N / (2 B)). Learned at T = 1, sigma is that
    of the ELBO, with which large networks underfit.

    N counts answers as in `SGLD`. All noise is a function of seed, step, weight and backend.
    Gradients that are accumulated are of one draw. Clipping, Keras's weight decay, averages,
    constraints and weights in half precision are refused; mixed precision works. Reference: Shen
    et al., Variational Learning is Effective for Large Deep Networks, arXiv 2402.17641.

    Args:
        learning_rate: a number or a schedule.
        train_size: N, the number of training examples, times the answers in each.
        prior_scale: s, of every trained weight; None is a flat prior, for models that have the
            prior as a regularizer in their loss. For the paper's weight decay d it is
            1 / sqrt(N d).
        initial_hessian: h_0, above 0; higher is more cautious.
        beta_1: decay of the gradients' average a for each step.
        beta_2: decay of h for each step.
        clip_radius: the largest size of a weight's step divided by its rate; None is any.
        temperature: T; less than 1 is a "cold" posterior. The paper's lambda is N / T.
        seed: of the draws.
        **kwargs: those of `keras.optimizers.Optimizer`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> optimizer = ibnn.IVON(0.1, train_size=8, prior_scale=1.0, beta_2=0.9)
        >>> model.compile(optimizer, loss)
        >>> x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
        >>> log = model.fit(x, y, batch_size=4, epochs=10, verbose=0)
        >>> mc = ibnn.MonteCarlo(optimizer.posterior(model), samples=16)
    """

    _ids: frozenset[int] = frozenset()
    """Of the variables that it was built with."""

    def __init__(
        self,
        learning_rate: float | Schedule,
        train_size: int,
        prior_scale: float | None,
        *,
        initial_hessian: float = 1.0,
        beta_1: float = 0.9,
        beta_2: float = 0.99999,
        clip_radius: float | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        for name in filter(kwargs.get, CHANGE_THE_TARGET):
            raise ValueError(
                f"`{name}` changes the distribution that is learned: leave it out (for weight "
                "decay there is `prior_scale`, for clipping `clip_radius`)."
            )
        super().__init__(learning_rate, **kwargs)
        if prior_scale is not None:
            prior_scale = checks.positive("prior_scale", prior_scale)
        if clip_radius is not None:
            clip_radius = checks.positive("clip_radius", clip_radius)
        self.train_size = checks.positive_integer("train_size", train_size)
        self.prior_scale = prior_scale
        self.initial_hessian = checks.positive("initial_hessian", initial_hessian)
        self.beta_1 = checks.fraction("beta_1", beta_1)
        self.beta_2 = checks.fraction("beta_2", beta_2)
        self.clip_radius = clip_radius
        self.temperature = checks.positive("temperature", temperature)
        self.seed = checks.whole("seed", seed)
        self._decay = 0.0  # d
        if prior_scale is not None:
            self._decay = 1 / (self.train_size * prior_scale**2)
        self._start = self.initial_hessian + self._decay

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        check_weights(variables, self.prior_scale)
        _check_freedom(variables)
        super().build(variables)
        self._ids = frozenset(map(id, variables))
        start = keras.initializers.Constant(self._start)
        self._means = [self._mean_of(variable) for variable in variables]
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        # h + d, which stays positive without rounding errors.
        self._precisions = self.add_optimizer_variables(variables, "precision", start)
        # The step before which the weights are the mean, and not a draw.
        self._step_at_mean = self.add_variable((), dtype="int", name="step_at_mean")

    def _mean_of(self, variable: keras.Variable) -> keras.Variable:
        """Return a new variable for the mean, which starts where the weight is."""

        def value(*_: Any, **__: Any) -> Tensor:
            return _copy_of(variable)

        return self.add_variable_from_reference(variable, "mean", initializer=value)

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Any) -> None:
        """Update what is kept of a variable, and give it the next draw.

        Args:
            gradient: of the loss; that of an embedding may have some rows only.
            variable: one of those that the optimizer was built with.
            learning_rate: of this step.
        """
        dtype = keras.backend.standardize_dtype(variable.dtype)
        index = keras_internals.index_in(self, variable)
        weight = ops.convert_to_tensor(variable)
        # By a function, not an operator, which a gradient of some rows does not have.
        gradient = ops.add(ops.zeros_like(weight), ops.cast(gradient, dtype))
        # Weights that are not a draw have the last word about the mean.
        previous = ops.convert_to_tensor(self._means[index])
        mean = ops.where(self._is_at_mean(), weight, previous)
        distance = weight - mean
        precision = self._next_precision(index, gradient * distance)
        momentum = self._next_momentum(index, gradient)
        slope = momentum + self._decay * mean
        rate = self._start * ops.cast(learning_rate, dtype)
        mean = mean - rate * self._clipped(slope / precision)
        self.assign(self._means[index], mean)
        self.assign(self._precisions[index], precision)
        next_step = self.iterations + 1
        draw = self._draw(index, mean, precision, next_step)
        self.assign(variable, draw)

    def _clipped(self, step: Tensor) -> Tensor:
        """Return a step that is not longer than `clip_radius` for any weight."""
        if self.clip_radius is None:
            return step
        return ops.clip(step, -self.clip_radius, self.clip_radius)

    def _is_at_mean(self) -> Tensor:
        """Return whether the weights are the mean, and not a draw."""
        return ops.equal(self.iterations, self._step_at_mean)

    def _next_precision(self, index: int, product: Tensor) -> Tensor:
        """Return the new h + d of a variable.

        Args:
            index: its place.
            product: its gradient times its distance from the mean.
        """
        # With p = h + d the paper's update is p (1 - x + x^2 / 2), x = (1 - beta_2) (h - v) / p.
        precision = ops.convert_to_tensor(self._precisions[index])
        examples = self.train_size / self.temperature
        excess = 1 - self._decay / precision - examples * product
        change = (1 - self.beta_2) * excess
        factor = 1 - change + ops.square(change) / 2
        return ops.where(self._is_at_mean(), precision, factor * precision)

    def _next_momentum(self, index: int, gradient: Tensor) -> Tensor:
        """Count a gradient in, and return the average without the part of its start at 0."""
        previous = self._momentums[index]
        momentum = self.beta_1 * previous + (1 - self.beta_1) * gradient
        self.assign(previous, momentum)
        steps = ops.cast(self.iterations, gradient.dtype) + 1
        beta = ops.convert_to_tensor(self.beta_1, gradient.dtype)
        share_of_start = ops.power(beta, steps)
        return momentum / (1 - share_of_start)

    def _draw(self, index: int, mean: Any, precision: Any, step: Any) -> Tensor:
        """Return the draw of a variable for a step."""
        mean = ops.convert_to_tensor(mean)
        dtype = keras.backend.standardize_dtype(mean.dtype)
        noise = noise_of_step(self.seed, step, index, tuple(mean.shape), dtype)
        return mean + self._scale(precision) * noise

    def _scale(self, precision: Any) -> Tensor:
        """Return sigma."""
        examples = self.train_size / self.temperature
        return ops.rsqrt(examples * ops.convert_to_tensor(precision))

    def finalize_variable_values(self, var_list: list[keras.Variable]) -> None:
        """Give the weights their mean; Keras does this at the end of `fit`.

        Args:
            var_list: trained variables of the model.
        """
        if not self.built or self._has_mean_in_place():
            return
        for variable in var_list:
            mean = self._means[keras_internals.index_in(self, variable)]
            variable.assign(_copy_of(mean))
        self._step_at_mean.assign(_copy_of(self.iterations))

    def draw(self, variables: list[keras.Variable]) -> None:
        """Give the weights the draw at which the next gradient is to be taken.

        This is for training loops of your own, after `finalize_variable_values`.

        Args:
            variables: all trained variables that the optimizer was built with.
        """
        is_at_mean = self._has_mean_in_place()
        for variable in variables:
            index = keras_internals.index_in(self, variable)
            mean = self._means[index]
            if is_at_mean:
                mean.assign(_copy_of(variable))
            draw = self._draw(index, mean, self._precisions[index], self.iterations)
            variable.assign(draw)
        self._step_at_mean.assign(-1)

    def own(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        """Return those of some variables that the optimizer was built with."""
        return [variable for variable in variables if id(variable) in self._ids]

    def _has_mean_in_place(self) -> bool:
        return bool(ops.convert_to_numpy(self._is_at_mean()))

    def posterior(self, model: keras.Model) -> GaussianWeights:
        """Return the Gaussian over the trained weights: the mean, and sigma of each.

        It holds copies of the values. With batch normalization, use
        `optimizer.posterior(model).materialize(16, x_train)`.

        Args:
            model: the model that was trained; its other weights stay those that it has.

        Returns:
            A posterior for `MonteCarlo`, `WeightMixture` and export.

        Raises:
            ValueError: if no step was taken at a draw, or for another model.
        """
        places = self._places_in(model)
        posterior = GaussianWeights(model, 0, places)
        is_at_mean = self._has_mean_in_place()
        locs = []
        precisions = []
        for variable in posterior.sampled:
            index = keras_internals.index_in(self, variable)
            mean = variable if is_at_mean else self._means[index]
            locs.append(double(mean.value).ravel())
            precisions.append(double(self._precisions[index].value).ravel())
        precision = np.concatenate(precisions)
        if np.allclose(precision, self._start, rtol=1e-7, atol=0):
            raise ValueError(
                "No step has been taken at a draw, so the scales are not learned: the first step "
                "of each `fit` is at the mean. Train longer, or pass callbacks=[ibnn.IVONMean()]."
            )
        scale = np.sqrt(self.temperature / (self.train_size * precision))
        factor = np.zeros((0, posterior.size))
        posterior.assign(np.concatenate(locs), scale, factor)
        return posterior

    def _places_in(self, model: keras.Model) -> list[int]:
        """Return the positions of the trained weights among `model.weights`, or raise."""
        places = places_of(model, self.own(model.weights))
        if not places:
            raise ValueError(
                f"The optimizer has not trained {model.name!r}: compile the model with it, and "
                "call `fit`."
            )
        return places


def _copy_of(value: Any) -> Tensor:
    """Return a copy of a variable's or tensor's value: on JAX no two variables may share one."""
    if isinstance(value, keras.Variable):
        value = keras_internals.uncast(value)
    return ops.copy(value)


def _check_freedom(variables: list[keras.Variable]) -> None:
    """Raise if weights are constrained, or part of another posterior."""
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            raise ValueError(
                f"{variable.path} has a constraint, which draws from a Gaussian break: leave it "
                "out."
            )
        if getattr(variable, "of_posterior", False):
            raise ValueError(
                f"{variable.path} belongs to a stochastic layer, which learns a posterior of its "
                "own: train a plain model with IVON, or the other one with Adam."
            )


class IVONMean(keras.callbacks.Callback):
    """Let validation, and callbacks at the end of an epoch, see the mean of `IVON`.

    Without it they see one draw. The mean is in the model from validation to the beginning of the
    next epoch; the training then continues from the same draw. List it before callbacks that save
    or restore weights, such as ModelCheckpoint and EarlyStopping, and after `ibnn.Checkpoint`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(ibnn.IVON(0.1, train_size=8, prior_scale=1.0), "mse")
        >>> x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
        >>> options = {"validation_data": (x, y), "callbacks": [ibnn.IVONMean()]}
        >>> history = model.fit(x, y, epochs=2, verbose=0, **options).history
        >>> bool(np.isclose(history["val_loss"][-1], model.evaluate(x, y, verbose=0)))
        True
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        model = self.model
        if model.built and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        found = list(_ivons(model.optimizer))
        if not found:
            raise ValueError(
                "IVONMean needs a model that is compiled with ibnn.IVON(...); got "
                f"{type(model.optimizer).__name__}."
            )
        for optimizer in found:
            if optimizer.built:  # else its first step is at the mean
                optimizer.draw(optimizer.own(model.trainable_variables))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._show_mean()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._show_mean()

    def _show_mean(self) -> None:
        model = self.model
        model.optimizer.finalize_variable_values(model.trainable_variables)


def _ivons(optimizer: Any) -> Iterator[IVON]:
    """Yield the IVON optimizers that an optimizer is or holds."""
    if isinstance(optimizer, IVON):
        yield optimizer
    # One that scales losses holds one, Keras's MultiOptimizer holds several.
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [inner] if inner is not None else getattr(optimizer, "optimizers", [])
    for part in parts:
        yield from _ivons(part)

"""Stochastic-gradient MCMC as Keras optimizers: plain `fit` draws samples of the weights."""

import math
from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks, keras_internals
from tfp_ibnn._core.backend import Tensor, normal
from tfp_ibnn._core.serialization import Configured, ConfiguredLayer
from tfp_ibnn.noise import counter
from tfp_ibnn.training.optimizers import Schedule

CHANGE_THE_TARGET = ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay", "use_ema")
"""Arguments of Keras's optimizers that change which distribution is found."""


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class CosineCycles(Configured, Schedule):
    """A learning rate in cycles: the first part of each explores, the last part samples.

        rate(step) = initial / 2 (cos(pi r) + 1),    r = (step mod cycle) / cycle

    `SGLD` and `SGHMC` add noise where r >= exploration only, and `Snapshots` collects there only.
    Reference: Zhang et al., Cyclical Stochastic Gradient MCMC, arXiv 1902.03932.

    Args:
        initial: learning rate at the start of each cycle.
        cycle: number of steps in a cycle.
        exploration: share of a cycle without noise, at least 0 and below 1.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> cycles = ibnn.CosineCycles(0.1, cycle=100)
        >>> [round(float(cycles(step)), 3) for step in (0, 50, 100)]
        [0.1, 0.05, 0.1]
        >>> optimizer = ibnn.SGHMC(cycles, train_size=50_000, prior_scale=0.1)
    """

    def __init__(self, initial: float, cycle: int, exploration: float = 0.8) -> None:
        self.initial = checks.positive("initial", initial)
        self.cycle = checks.positive_integer("cycle", cycle)
        self.exploration = checks.fraction("exploration", exploration)

    def __call__(self, step: Any) -> Tensor:
        angle = math.pi * self._place(step)
        return self.initial / 2 * (ops.cos(angle) + 1)

    def is_sampling(self, step: Any) -> Tensor:
        """Whether a step adds noise."""
        return self._place(step) >= self.exploration

    def _place(self, step: Any) -> Tensor:
        """Return the share of its cycle that has passed at a step, r."""
        step_in_cycle = ops.cast(step, "int32") % self.cycle
        return ops.cast(step_in_cycle, "float32") / self.cycle


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SGLD(ConfiguredLayer, keras.optimizers.Optimizer):
    """Stochastic-gradient Langevin dynamics: gradient descent whose noise makes it a sampler.

        w <- w - learning_rate * grad u(w) + sqrt(2 learning_rate T / N) xi,    xi ~ N(0, 1)

    u(w) = loss(w) + |w|^2 / (2 N s^2), with Keras's loss, the *mean* negative log-likelihood of N
    examples, and s the scale of the prior N(0, s^2): exp(-N u / T) is the posterior at temperature
    T. Where the loss averages over P answers of an example (pixels, time steps, the labels of a
    binary crossentropy), N is P times the number of examples; for "mse" on D numbers with noise of
    standard deviation sigma it is D / (2 sigma^2) times that number.

    A finite rate has a bias: where u has the curvature c, the variance is
    T / (N c) / (1 - c learning_rate / 2). Minibatches add noise of their own. Use small or falling
    rates, or `CosineCycles`; `Snapshots` keeps the samples.

    With `preconditioner="rmsprop"` each weight's rate is divided by epsilon + the root mean square
    of its loss gradients, in the noise too. While that divisor changes with the weights the chain
    has a bias (the term that corrects it is left out, as usual); after `adaptation` steps it stays.
    The noise is a function of seed, step, weight and backend: a run resumed from a `Checkpoint`
    draws the same samples. References: Welling and Teh, ICML 2011; Li et al., Preconditioned
    Stochastic Gradient Langevin Dynamics, arXiv 1512.07666.

    Args:
        learning_rate: a number or a schedule.
        train_size: N, the number of training examples, times the answers in each.
        prior_scale: s, of every trained weight; None is a flat prior, for models that have the
            prior as a regularizer in their loss.
        temperature: T; 1 samples the posterior, less a "cold" one, 0 is plain gradient descent.
        preconditioner: None or "rmsprop".
        adaptation: number of steps after which the preconditioner stays as it is; None never.
        rho: decay of the mean square for each step.
        epsilon: added to its root.
        seed: of the noise; each chain needs its own.
        **kwargs: those of `keras.optimizers.Optimizer`.

    Example:
        >>> import keras, numpy as np, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> model.compile(ibnn.SGLD(0.1, train_size=8, prior_scale=1.0), loss)
        >>> x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
        >>> samples = ibnn.Snapshots(every=2, start=4)
        >>> log = model.fit(x, y, epochs=10, verbose=0, callbacks=[samples])
        >>> mc = ibnn.MonteCarlo(samples.posterior())
    """

    momentum = 0.0

    def __init__(
        self,
        learning_rate: float | Schedule,
        train_size: int,
        prior_scale: float | None,
        *,
        temperature: float = 1.0,
        preconditioner: str | None = None,
        adaptation: int | None = None,
        rho: float = 0.99,
        epsilon: float = 1e-3,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        for name in filter(kwargs.get, CHANGE_THE_TARGET):
            raise ValueError(
                f"`{name}` changes the distribution that is sampled: leave it out (what decays "
                "the weights is the prior: see `prior_scale`)."
            )
        super().__init__(learning_rate, **kwargs)
        if prior_scale is not None:
            prior_scale = checks.positive("prior_scale", prior_scale)
        if adaptation is not None:
            adaptation = checks.positive_integer("adaptation", adaptation)
        self.train_size = checks.positive_integer("train_size", train_size)
        self.prior_scale = prior_scale
        self.temperature = checks.non_negative("temperature", temperature)
        self.preconditioner = checks.one_of("preconditioner", preconditioner, (None, "rmsprop"))
        self.adaptation = adaptation
        self.rho = checks.fraction("rho", rho)
        self.epsilon = checks.positive("epsilon", epsilon)
        self.seed = checks.whole("seed", seed)

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        check_weights(variables, self.prior_scale)
        super().build(variables)
        if self.momentum:
            self._momentums = self.add_optimizer_variables(variables, "momentum")
        if self.preconditioner:
            self._squares = self.add_optimizer_variables(variables, "square")

    def is_sampling(self, step: Any) -> Any:
        """Whether a step adds noise: all do, but for the exploration of `CosineCycles`."""
        schedule = keras_internals.learning_rate_of(self)
        if isinstance(schedule, CosineCycles):
            return schedule.is_sampling(step)
        return True

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Any) -> None:
        """Move a variable, and update what is kept of it.

        Args:
            gradient: of the loss; that of an embedding may have some rows only.
            variable: one of those that the optimizer was built with.
            learning_rate: of this step.
        """
        dtype = keras.backend.standardize_dtype(variable.dtype)
        index = keras_internals.index_in(self, variable)
        rate = ops.cast(learning_rate, dtype)
        gradient = ops.cast(gradient, dtype)
        if self.preconditioner:
            divisor = self.epsilon + self._root_mean_square(index, gradient)
            rate = rate / divisor
        # By functions, not operators, which a gradient of some rows does not have.
        gradient = ops.add(self._prior_gradient(variable, dtype), gradient)
        shape = tuple(variable.shape)
        noise = noise_of_step(self.seed, self.iterations, index, shape, dtype)
        scale = ops.sqrt(self._variance(rate, dtype))
        change = scale * noise - rate * gradient
        if self.momentum:
            momentum = self._momentums[index]
            change = self.momentum * momentum + change
            self.assign(momentum, change)
        self.assign_add(variable, change)

    def _prior_gradient(self, variable: Any, dtype: str) -> Tensor:
        """Return the gradient of |w|^2 / (2 N s^2)."""
        precision = 0.0
        if self.prior_scale is not None:
            precision = 1 / self.prior_scale**2
        return precision / self.train_size * ops.cast(variable, dtype)

    def _variance(self, rate: Tensor, dtype: str) -> Tensor:
        """Return the variance of the noise, 0 where a schedule explores."""
        friction = 1 - self.momentum
        variance = 2 * friction * self.temperature / self.train_size * rate
        is_sampling = self.is_sampling(self.iterations)
        return variance * ops.cast(is_sampling, dtype)

    def _root_mean_square(self, index: int, gradient: Tensor) -> Tensor:
        """Return the root mean square of a variable's gradients, and count one in."""
        previous = self._squares[index]
        steps = ops.cast(self.iterations, gradient.dtype) + 1
        squares = ops.multiply(1 - self.rho, ops.square(gradient))
        mean = ops.add(self.rho * previous, squares)
        dtype = mean.dtype
        if self.adaptation is not None:
            is_over = steps > self.adaptation
            mean = ops.where(is_over, ops.cast(previous, dtype), mean)
            steps = ops.minimum(steps, self.adaptation)
        self.assign(previous, mean)
        # The first value is 0, and takes a part that vanishes.
        rho = ops.cast(self.rho, dtype)
        share_of_first = ops.power(rho, steps)
        return ops.sqrt(mean / (1 - share_of_first))


def check_weights(variables: list[keras.Variable], prior_scale: float | None) -> None:
    """Raise if weights are of half precision, and warn if they have a second prior.

    Args:
        variables: the weights that are trained.
        prior_scale: of their prior; None if they have none.
    """
    for variable in variables:
        if variable.dtype in ("float16", "bfloat16"):
            raise ValueError(
                f"The noise is lost in weights of half precision: {variable.path}. Use the policy "
                "'mixed_bfloat16' or 'mixed_float16'."
            )
    penalized = [v for v in variables if getattr(v, "regularizer", None) is not None]
    if penalized and prior_scale is not None:
        owner, _, name = penalized[0].path.rpartition("/")
        remedy = "give prior_scale=None to take it for the prior"
        checks.warn_of_regularizer(f"Layer {owner!r}", f"{name}_regularizer", remedy)


def noise_of_step(seed: int, step: Any, index: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return standard normal noise, a function of seed, step and variable alone.

    Args:
        seed: of the optimizer.
        step: its number of steps so far.
        index: the place of the variable among those of the optimizer.
        shape: of the variable.
        dtype: of the variable.
    """
    # The key has a bit left for the step.
    first, second = (int(word) >> 1 for word in counter.key_from_seed(seed))
    step = ops.cast(step, "int32")
    word_of_variable = ops.cast(second + index, "int32")
    key = ops.stack([first + step, word_of_variable])
    return normal(shape, dtype, key)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SGHMC(SGLD):
    """Stochastic-gradient Hamiltonian Monte Carlo: SGD with momentum, and noise.

        m <- momentum * m - learning_rate * grad u(w) + sqrt(2 a learning_rate T / N) xi
        w <- w + m,    a = 1 - momentum

    with u, N and T as in `SGLD`, which this is at momentum 0, and the same stationary distribution
    up to the bias of a finite rate. Takes memory for m, as large as the weights. Reference: Chen et
    al., Stochastic Gradient Hamiltonian Monte Carlo, arXiv 1402.4102.

    Args:
        learning_rate: a number or a schedule.
        train_size: N, the number of training examples, times the answers in each.
        prior_scale: s, of every trained weight; None is a flat prior.
        momentum: at least 0 and below 1.
        **kwargs: further arguments of `SGLD`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> model.compile(ibnn.SGHMC(0.1, train_size=50_000, prior_scale=1.0), "mse")
        >>> model.optimizer.momentum
        0.9
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        train_size: int,
        prior_scale: float | None,
        momentum: float = 0.9,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, train_size, prior_scale, **kwargs)
        self.momentum = checks.fraction("momentum", momentum)

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

_REFUSED = ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay", "use_ema")


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
        return self.initial / 2 * (ops.cos(math.pi * self._place(step)) + 1)

    def is_sampling(self, step: Any) -> Tensor:
        """Whether a step adds noise."""
        return self._place(step) >= self.exploration

    def _place(self, step: Any) -> Tensor:
        return ops.cast(ops.cast(step, "int32") % self.cycle, "float32") / self.cycle


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
        for name in filter(kwargs.get, _REFUSED):
            remedy = "leave it out (what decays the weights is the prior: see `prior_scale`)"
            raise ValueError(f"`{name}` changes the distribution that is sampled: {remedy}.")
        super().__init__(learning_rate, **kwargs)
        self.train_size = checks.positive_integer("train_size", train_size)
        given = prior_scale is not None
        self.prior_scale = checks.positive("prior_scale", prior_scale) if given else None
        self.temperature = checks.non_negative("temperature", temperature)
        self.preconditioner = checks.one_of("preconditioner", preconditioner, (None, "rmsprop"))
        given = adaptation is not None
        self.adaptation = checks.positive_integer("adaptation", adaptation) if given else None
        self.rho, self.epsilon = checks.fraction("rho", rho), checks.positive("epsilon", epsilon)
        self.seed = checks.whole("seed", seed)

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        half = [v.path for v in variables if v.dtype in ("float16", "bfloat16")]
        if half:
            remedy = "Use the policy 'mixed_bfloat16' or 'mixed_float16'."
            raise ValueError(f"The noise is lost in weights of half precision: {half[0]}. {remedy}")
        penalized = [v for v in variables if getattr(v, "regularizer", None) is not None]
        if penalized and self.prior_scale is not None:
            owner, _, name = penalized[0].path.rpartition("/")
            remedy = "give prior_scale=None to take it for the prior"
            checks.warn_of_regularizer(f"Layer {owner!r}", f"{name}_regularizer", remedy)
        super().build(variables)
        if self.momentum:
            self._momentums = self.add_optimizer_variables(variables, "momentum")
        if self.preconditioner:
            self._squares = self.add_optimizer_variables(variables, "square")

    def is_sampling(self, step: Any) -> Any:
        """Whether a step adds noise: all do, but for the exploration of `CosineCycles`."""
        schedule = keras_internals.learning_rate_of(self)
        return schedule.is_sampling(step) if isinstance(schedule, CosineCycles) else True

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Any) -> None:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        index = keras_internals.index_in(self, variable)
        step, rate = self.iterations, ops.cast(learning_rate, dtype)
        # By functions, not operators: the gradient of an embedding may have some rows only.
        gradient = ops.cast(gradient, dtype)
        if self.preconditioner:
            rate = rate / (self.epsilon + self._root_mean_square(index, gradient))
        precision = 0.0 if self.prior_scale is None else 1 / self.prior_scale**2
        gradient = ops.add(precision / self.train_size * ops.cast(variable, dtype), gradient)
        variance = 2 * (1 - self.momentum) * self.temperature / self.train_size * rate
        variance = variance * ops.cast(self.is_sampling(step), dtype)
        # A function of seed, step and variable alone; the key has a bit left for the step.
        first, second = (int(word) >> 1 for word in counter.key_from_seed(self.seed))
        key = ops.stack([first + ops.cast(step, "int32"), ops.cast(second + index, "int32")])
        noise = normal(tuple(variable.shape), dtype, key)
        change = ops.sqrt(variance) * noise - rate * gradient
        if self.momentum:
            change = self.momentum * self._momentums[index] + change
            self.assign(self._momentums[index], change)
        self.assign_add(variable, change)

    def _root_mean_square(self, index: int, gradient: Tensor) -> Tensor:
        """Return the root mean square of a variable's gradients, and count one in."""
        old, counted = self._squares[index], ops.cast(self.iterations, gradient.dtype) + 1
        new = ops.add(self.rho * old, ops.multiply(1 - self.rho, ops.square(gradient)))
        if self.adaptation is not None:
            new = ops.where(counted > self.adaptation, ops.cast(old, new.dtype), new)
            counted = ops.minimum(counted, self.adaptation)
        self.assign(old, new)
        # The first value is 0, and takes a part that vanishes.
        return ops.sqrt(new / (1 - ops.power(ops.cast(self.rho, new.dtype), counted)))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class SGHMC(SGLD):
    """Stochastic-gradient Hamiltonian Monte Carlo: SGD with momentum, and noise.

        m <- momentum * m - learning_rate * grad u(w) + sqrt(2 a learning_rate T / N) xi
        w <- w + m,    a = 1 - momentum

    with u, N and T as in `SGLD`, which this is at momentum 0, and the same stationary distribution
    up to the bias of a finite rate. Takes memory for m, as large as the weights. Reference: Chen et
    al., Stochastic Gradient Hamiltonian Monte Carlo, arXiv 1402.4102.

    Args:
        learning_rate, train_size, prior_scale, **kwargs: those of `SGLD`.
        momentum: at least 0 and below 1.
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

"""Two learning rates: one for the posteriors, one for all other weights."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import checks, keras_internals, keras_optimizers
from tfp_ibnn._core.serialization import Configured

_PARTS = ("deterministic", "stochastic")
Schedule = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ScaledSchedule(Configured, Schedule):
    """A learning-rate schedule times a constant.

    Args:
        schedule: any of Keras's.
        factor: what each of its rates is multiplied by.
    """

    def __init__(self, schedule: Schedule, factor: float) -> None:
        self.schedule = schedule
        self.factor = factor

    def __call__(self, step: Any) -> Any:
        return self.factor * self.schedule(step)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class TwoSpeed(keras_optimizers.GroupedOptimizer):
    """One optimizer for the posteriors, another for all other weights; made by `two_speed`.

    `learning_rate` is that of the other weights; setting it keeps the ratio of the two. Gradients
    are clipped by the global norm of all weights, accumulated and averaged as `deterministic` says.

    Args:
        deterministic: the optimizer of all weights but the posteriors'.
        stochastic: the optimizer of the posteriors' weights.
        **kwargs: `loss_scale_factor` and `name`, as of any Keras optimizer.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> optimizer = ibnn.TwoSpeed(keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.25))
        >>> optimizer.learning_rate = 1.0
        >>> float(optimizer.stochastic.learning_rate)
        0.5
    """

    _ratio = 1.0  # stochastic to deterministic rate, kept while the rates are 0

    def __init__(
        self,
        deterministic: keras.optimizers.Optimizer,
        stochastic: keras.optimizers.Optimizer,
        **kwargs: Any,
    ) -> None:
        super().__init__([deterministic, stochastic], **kwargs)

    def part_of(self, variable: keras.Variable) -> keras.optimizers.Optimizer:
        """Return the optimizer of a variable, by whether a stochastic layer's posterior owns it."""
        return self.stochastic if getattr(variable, "of_posterior", False) else self.deterministic

    @property
    def deterministic(self) -> keras.optimizers.Optimizer:
        """The optimizer of all weights but the posteriors'."""
        return self.part(0)

    @property
    def stochastic(self) -> keras.optimizers.Optimizer:
        """The optimizer of the posteriors' weights."""
        return self.part(1)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the deterministic part."""
        return self.deterministic.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if isinstance(keras_internals.learning_rate_of(self.deterministic), Schedule):
            self.deterministic.learning_rate = value  # raises, and says why
        deterministic_rate = _number(self.deterministic.learning_rate)
        if deterministic_rate > 0:
            self._ratio = _number(self.stochastic.learning_rate) / deterministic_rate
        self.deterministic.learning_rate = value
        self.stochastic.learning_rate = ops.convert_to_numpy(value) * self._ratio

    def get_config(self) -> dict[str, Any]:
        config = {"name": self.name, "loss_scale_factor": self.loss_scale_factor}
        for name in _PARTS:
            config[name] = keras.optimizers.serialize(getattr(self, name))
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "TwoSpeed":
        config = dict(config)
        if "optimizer_map" in config:  # the form of files that were written before this one
            optimizers = config.pop("optimizer_map")["config"]
            (stochastic,) = optimizers["optimizer_map"].values()
            config["deterministic"] = optimizers["default_optimizer"]
            config["stochastic"] = stochastic
        for name in _PARTS:
            config[name] = keras.optimizers.deserialize(config[name], custom_objects)
        return cls(**config)


def two_speed(
    optimizer: str | keras.optimizers.Optimizer, stochastic_lr: float | Schedule
) -> TwoSpeed:
    """Return an optimizer that trains the posteriors at a learning rate of their own.

    The posteriors get a second optimizer of the same kind, without weight decay. Both rates follow
    Keras's callbacks, keeping their ratio, and a schedule, of which that of the posteriors is
    scaled so that it starts at `stochastic_lr`. What an optimizer does with all weights together
    (`global_clipnorm`, `use_ema`, `gradient_accumulation_steps`) includes both kinds.

    Args:
        optimizer: for all weights that do not belong to a posterior, or its name, such as "adam".
        stochastic_lr: learning rate of the posteriors' weights, or a schedule for it.

    Returns:
        An optimizer for `compile`, of both.

    Raises:
        ValueError: If `optimizer` is not one plain optimizer, or its schedule starts at 0 and
            `stochastic_lr` is a number.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> optimizer = ibnn.two_speed(keras.optimizers.SGD(0.1, momentum=0.9), stochastic_lr=0.02)
        >>> round(float(optimizer.stochastic.learning_rate), 3)
        0.02
    """
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not _is_plain(optimizer):
        raise ValueError(
            "`optimizer` must be one plain optimizer such as keras.optimizers.Adam(1e-3), or its "
            f"name, as 'adam'; got {optimizer!r}."
        )
    config = optimizer.get_config()
    config["learning_rate"] = _stochastic_rate(optimizer, stochastic_lr)
    config["name"] = f"{config['name']}_stochastic"
    if config.get("weight_decay") is not None:
        config["weight_decay"] = 0.0
    return TwoSpeed(optimizer, type(optimizer).from_config(config))


def _is_plain(optimizer: Any) -> bool:
    """Whether an argument is an optimizer that passes the weights on to no other."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return False
    scales_losses = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return not scales_losses and not keras_optimizers.has_many_parts(optimizer)


def _stochastic_rate(
    optimizer: keras.optimizers.Optimizer, stochastic_lr: float | Schedule
) -> float | Schedule:
    """Return the posteriors' learning rate; a number scales the optimizer's schedule, if any."""
    if isinstance(stochastic_lr, Schedule):
        return stochastic_lr
    rate = checks.positive("stochastic_lr", stochastic_lr)
    schedule = keras_internals.learning_rate_of(optimizer)
    if not isinstance(schedule, Schedule):
        return rate
    start = _number(schedule(0))
    if start == 0:
        raise ValueError(
            f"The optimizer's schedule starts at 0, so a `stochastic_lr` of {rate!r} cannot scale "
            "it: give a schedule there too."
        )
    return ScaledSchedule(schedule, rate / start)


def _number(scalar: Any) -> float:
    """Return a scalar tensor or variable as a float."""
    return float(ops.convert_to_numpy(scalar))

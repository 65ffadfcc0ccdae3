"""An optimizer of several parts, which stands on private names of Keras's optimizers."""

from typing import Any

import keras
from keras.src.utils.tracking import DotNotTrackScope

from tfp_ibnn._core.keras_internals import index_in


def has_many_parts(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer passes the weights on to several others."""
    multi_optimizer = getattr(keras.optimizers, "MultiOptimizer", GroupedOptimizer)
    return isinstance(optimizer, (GroupedOptimizer, multi_optimizer))


class GroupedOptimizer(keras.optimizers.Optimizer):
    """One optimizer for all weights, in which each group of weights is updated by its own part.

    Loss scaling, accumulation, clipping and moving averages act on all weights together, so the
    parts must agree in them; `loss_scale_factor` replaces theirs. A subclass defines `part_of`.
    """

    _JOINT = (
        *("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps"),
        *("use_ema", "ema_momentum", "ema_overwrite_frequency", "loss_scale_factor"),
    )

    def __init__(
        self,
        parts: list[keras.optimizers.Optimizer],
        loss_scale_factor: float | None = None,
        name: str | None = None,
    ) -> None:
        joint = {setting: getattr(parts[0], setting) for setting in self._JOINT}
        for setting, value in joint.items():
            values = [getattr(part, setting) for part in parts]
            if any(other != value for other in values):
                cause = "which acts on all weights together"
                raise ValueError(
                    f"The optimizers must agree in `{setting}`, {cause}; got {values}."
                )
        if loss_scale_factor is not None:
            joint["loss_scale_factor"] = loss_scale_factor
        super().__init__(learning_rate=0.0, name=name, **joint)
        # Under this name, and in this order, files of version 0.1.0 have the parts.
        self._inner_optimizers = parts[::-1]

    def part(self, number: int) -> keras.optimizers.Optimizer:
        """Return one of the parts."""
        return self._inner_optimizers[::-1][number]

    def part_of(self, variable: keras.Variable) -> keras.optimizers.Optimizer:
        """Return the optimizer of a variable."""
        raise NotImplementedError(f"{type(self).__name__} must define `part_of`.")

    def build(self, variables: list[keras.Variable]) -> None:
        """Build the parts, which hold all state of the weights, averages and sums included."""
        if self.built:
            return
        owners = [self.part_of(variable) for variable in variables]
        for part in self._inner_optimizers:
            own = [v for v, owner in zip(variables, owners, strict=True) if owner is part]
            if own:
                part.build(own)
        places = [index_in(part, v) for v, part in zip(variables, owners, strict=True)]
        with DotNotTrackScope():  # these variables are the parts'
            self._trainable_variables = list(variables)
            self._trainable_variables_indices = {
                self._var_key(v): i for i, v in enumerate(variables)
            }
            for name in ("_model_variables_moving_average", "_accumulated_gradients"):
                if all(hasattr(part, name) for part in owners):
                    stores = [getattr(part, name) for part in owners]
                    chosen = [store[i] for store, i in zip(stores, places, strict=True)]
                    setattr(self, name, chosen)
        self.built = True

    @property
    def variables(self) -> list[keras.Variable]:
        inner = [variable for part in self._inner_optimizers for variable in part.variables]
        return [*self._variables, *inner]

    def set_weights(self, weights: list[Any]) -> None:
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        for part in self._inner_optimizers:
            if len(grads) and part.built:
                part._iterations.assign_add(1)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        for part in self._inner_optimizers:
            part.exclude_from_weight_decay(*args, **kwargs)

    def _apply_weight_decay(self, variables: list[keras.Variable]) -> None:
        for part in self._inner_optimizers:
            part._apply_weight_decay([v for v in variables if self.part_of(v) is part])

    def _backend_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        for part in self._inner_optimizers:
            pairs = zip(grads, variables, strict=True)
            own = [(gradient, v) for gradient, v in pairs if self.part_of(v) is part]
            if own:
                part._backend_update_step(*map(list, zip(*own, strict=True)), part.learning_rate)

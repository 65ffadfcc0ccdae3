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

    Keras's optimizer does these in its public `apply`, and leaves the updates themselves to private
    methods: this one passes those on to the parts, and shares their state under Keras's names.

    Args:
        parts: an optimizer for each group.
        loss_scale_factor: what the loss is multiplied by, for float16; None takes the parts'.
        name: of the optimizer.
    """

    _JOINT = (
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "gradient_accumulation_steps",
        "use_ema",
        "ema_momentum",
        "ema_overwrite_frequency",
        "loss_scale_factor",
    )

    _SHARED = ("_model_variables_moving_average", "_accumulated_gradients")
    """Keras's lists with an entry for each weight, which the parts have if they need them."""

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
                raise ValueError(
                    f"The optimizers must agree in `{setting}`, which acts on all weights "
                    f"together; got {values}."
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
        for part in self._inner_optimizers:
            group = [variable for variable in variables if self.part_of(variable) is part]
            if group:
                part.build(group)
        indices = {self._var_key(variable): index for index, variable in enumerate(variables)}
        with DotNotTrackScope():  # these variables are the parts'
            self._trainable_variables = list(variables)
            self._trainable_variables_indices = indices
            for name in self._SHARED:
                self._share(name, variables)
        self.built = True

    def _share(self, name: str, variables: list[keras.Variable]) -> None:
        """Keep one of the parts' lists as one list for all weights, if all parts have it."""
        entries = []
        for variable in variables:
            part = self.part_of(variable)
            if not hasattr(part, name):
                return
            entries.append(getattr(part, name)[index_in(part, variable)])
        setattr(self, name, entries)

    @property
    def variables(self) -> list[keras.Variable]:
        """All state: its own, and then that of each part."""
        variables = list(self._variables)
        for part in self._inner_optimizers:
            variables += part.variables
        return variables

    def set_weights(self, weights: list[Any]) -> None:
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        for part in self._inner_optimizers:
            if len(grads) and part.built:
                part._iterations.assign_add(1)  # by which schedules and Adam's corrections go

    def finalize_variable_values(self, var_list: list[keras.Variable]) -> None:
        for part in self._inner_optimizers:
            group = [variable for variable in var_list if self.part_of(variable) is part]
            if group:
                part.finalize_variable_values(group)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        for part in self._inner_optimizers:
            part.exclude_from_weight_decay(*args, **kwargs)

    def _apply_weight_decay(self, variables: list[keras.Variable]) -> None:
        for part in self._inner_optimizers:
            group = [variable for variable in variables if self.part_of(variable) is part]
            part._apply_weight_decay(group)

    def _backend_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        for part in self._inner_optimizers:
            part_gradients = []
            part_variables = []
            for gradient, variable in zip(grads, variables, strict=True):
                if self.part_of(variable) is part:
                    part_gradients.append(gradient)
                    part_variables.append(variable)
            if part_variables:
                part._backend_update_step(part_gradients, part_variables, part.learning_rate)

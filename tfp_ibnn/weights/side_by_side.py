"""Several networks through the same batches, each step of all of them compiled as one."""

from typing import Any

import keras
from keras import ops

from tfp_ibnn._core import backend
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.weights.architecture import difference


class SideBySide:
    """Lets `fit` of the first model take each step of all models; on JAX only.

    Call `fit` of the first model with `callback()` among its callbacks, then `finish()`.

    Args:
        models: compiled models that differ in the values of their weights only; their optimizers
            are built.

    Raises:
        ValueError: if they differ in more, or have stochastic layers.
    """

    def __init__(self, models: list[keras.Model]) -> None:
        _check(models)
        self._first = models[0]
        self._count = len(models)
        self._optimizers = [model.optimizer for model in models]
        self._owned = []
        for model in models:
            model.optimizer.build(model.trainable_variables)
            trainable = model.trainable_variables
            fixed = model.non_trainable_variables
            self._owned.append([trainable, fixed, model.optimizer.variables])
        # What `train_step` takes and returns, each value with a leading axis for the models.
        self._states = keras.tree.map_structure(_stacked, *self._owned)
        self._logs: dict[str, Any] = {}
        self._run = backend.compiled(self._step, [])
        self._first.train_function = self._train_function

    def callback(self) -> keras.callbacks.Callback:
        """Return what `fit` of the first model must call."""
        return keras.callbacks.LambdaCallback(on_epoch_end=self._end_epoch)

    def finish(self) -> list[float]:
        """Give each model the values that it has learned, and return their last losses."""
        for number, variables in enumerate(self._owned):
            for group, values in zip(variables, self._states, strict=True):
                for variable, value in zip(group, values, strict=True):
                    variable.assign(value[number])
            trainable, *_ = variables
            self._optimizers[number].finalize_variable_values(trainable)
        return ops.convert_to_numpy(self._logs["loss"]).tolist()

    def _train_function(self, state: Any, iterator: Any) -> tuple[Any, Any]:
        """Take a step of all models, and return logs and state of the first."""
        if len(self._states) == 3:  # an epoch begins, with metrics that `fit` has reset
            metrics = [ops.stack([x] * self._count) for x in state[3]]
            self._states = (*self._states, metrics)
        data = next(iterator)
        self._logs, self._states, of_first = self._run(self._states, data)
        return of_first

    def _step(self, states: Any, data: Any) -> tuple[Any, Any, Any]:
        def step_of_one(state: Any) -> tuple[Any, Any]:
            return self._first.train_step(state, data)

        logs, states = ops.vectorized_map(step_of_one, states)
        of_first = keras.tree.map_structure(lambda x: x[0], (logs, states))
        return logs, states, of_first

    def _end_epoch(self, *_: Any) -> None:
        self._states = self._states[:3]  # without the metrics


def _stacked(*variables: keras.Variable) -> Any:
    return ops.stack([v.value for v in variables])


def _check(models: list[keras.Model]) -> None:
    """Raise for models that cannot train by the step of the first."""
    first = models[0]
    for model in models[1:]:
        where = difference(first, model, training=True)
        if where:
            raise ValueError(
                "`build` must return models that differ only in the values of their weights, to "
                f"train side by side; they differ in {where}. Leave `side_by_side` out."
            )
    configs = [{**model.optimizer.get_config(), "name": ""} for model in models]
    if stochastic_layers(first) or any(config != configs[0] for config in configs):
        raise ValueError(
            "`build` must return plain models with one optimizer, to train side by side; got "
            "stochastic layers, or optimizers that differ."
        )

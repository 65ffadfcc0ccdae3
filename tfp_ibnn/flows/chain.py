"""Flows one after another, and the flows that are made of another."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, tfb
from tfp_ibnn._core.checks import missing_attribute, positive_integer
from tfp_ibnn.flows.flow import Flow, FlowBijector, mapped


def copied(
    flows: Any, dtype: str, argument: str = "flows", condition_size: Any = None, ndims: int = 1
) -> list[Flow]:
    """Return copies of flows, or raise. A condition they get makes neighbours of a kind a stack."""
    if isinstance(flows, Sequence):
        make = keras.saving.deserialize_keras_object
        flows = [make(flow) if isinstance(flow, dict) else flow for flow in flows]
    if not isinstance(flows, list) or not all(isinstance(flow, Flow) for flow in flows):
        raise ValueError(f"`{argument}` must be a list of flows: [flows.Planar()]; got {flows!r}.")
    copies: list[Flow] = []
    for _, group in itertools.groupby(flows, lambda f: _kind(f) if condition_size else object()):
        flow, *others = group
        if flow.condition_size not in (None, condition_size) or flow.event_ndims > ndims:
            wanted = f"must have condition_size={condition_size} and event_ndims={ndims}"
            got = f"condition_size={flow.condition_size} and event_ndims={flow.event_ndims}"
            raise ValueError(f"`{argument}` {wanted}; got {type(flow).__name__} with {got}.")
        flow = Stack(flow, 1 + len(others)) if others else flow
        name = f"{type(flow).__name__.lower()}_{len(copies)}"
        config = {**flow.get_config(), "dtype": dtype, "name": name}
        config["condition_size"] = condition_size
        copies.append(type(flow).from_config(config))
    return copies


def _kind(flow: Flow) -> Any:
    """Return what flows that can be a stack have in common; of any other, what no other has."""
    kind = type(flow), repr({**flow.get_config(), "name": None})
    return kind if _is_stackable(flow) else object()


def _is_stackable(flow: Flow) -> bool:
    # Of a flow of one's own it is not known what else it holds, so a list stays a list.
    return (
        type(flow).__module__.startswith("tfp_ibnn.flows.") and type(flow).bijector is Flow.bijector
    )


def through(
    flows: Sequence[Flow], x: Tensor, condition: Any, way: str, ndims: int = 1, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return x mapped "forward" or by the "inverse", and log-determinants by `ndims` last axes."""
    log_det = ops.zeros_like(x[(..., *(0,) * ndims)])
    for flow in flows if way == "forward" else reversed(flows):
        x, change = getattr(flow, f"{way}_and_log_det")(x, condition=condition, **options)
        change = change + ops.zeros_like(x[(..., *(0,) * flow.event_ndims)])  # if it is constant
        log_det = log_det + ops.sum(change, axis=tuple(range(flow.event_ndims - ndims, 0)))
    return x, log_det


class FlowOfFlow(Flow):
    """A flow made of another, which it copies, with new weights, its condition and its type."""

    def __init__(self, flow: Flow, **kwargs: Any) -> None:
        if isinstance(flow, dict):  # of a config
            flow = keras.saving.deserialize_keras_object(flow)
        if not isinstance(flow, Flow):
            raise ValueError(f"`flow` must be a flow, such as flows.Planar(); got {flow!r}.")
        given = {name: kwargs[name] for name in ("condition_size", "dtype") if kwargs.get(name)}
        flow = type(flow).from_config({**flow.get_config(), **given, "name": "flow"})
        super().__init__(**{**kwargs, "condition_size": flow.condition_size, "dtype": flow.dtype})
        self.flow = flow
        self.event_ndims, self.min_channels = flow.event_ndims, flow.min_channels
        self.exact_log_det = flow.exact_log_det

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "flow": keras.saving.serialize_keras_object(self.flow)}


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Stack(FlowOfFlow):
    """A number of flows of one kind, each with its own weights, one after another.

    It is the same map as that of a list of them. But Keras has one weight for all where the list
    has one in each, so compilation and training steps are shorter where there are many. Flows with
    a condition, as in a `VAE`, are stacked by themselves.

    Args:
        flow: `Affine`, `Planar`, `Radial` or `Sylvester`.
        number: how many.
        **kwargs: those of a flow; a `condition_size` and a `dtype` are given on to the copies.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Stack(ibnn.flows.Planar(), 10)
        >>> flow(keras.ops.ones((2, 3))).shape[-1], tuple(flow.w.shape)
        (3, (10, 3))
    """

    def __init__(self, flow: Flow, number: int, **kwargs: Any) -> None:
        super().__init__(flow, **kwargs)
        self.number = positive_integer("number", number)
        if not _is_stackable(self.flow):
            wanted = "must be an Affine, Planar, Radial or Sylvester flow"
            raise ValueError(f"`flow` {wanted}; got {type(self.flow).__name__}.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        config = self.flow.get_config()
        flows = [type(self.flow).from_config(config) for _ in range(self.number)]
        for flow in flows:
            flow.build(input_shape)
        for name, weight in flows[0]._parameters.items():
            first = np.stack([ops.convert_to_numpy(flow._parameters[name]) for flow in flows])
            start = keras.initializers.Constant(first)
            options = {"trainable": weight.trainable, "conditional": name in flows[0]._linear_maps}
            setattr(self, name, self.add_parameter(name, first.shape, start, **options))
        self._bijector_of = flows[0].bijector_of  # a method, so that Keras does not see its weights

    def bijector(self, condition: Tensor | None = None) -> tfb.Chain:
        """Return the maps, chained; a chain applies its last element first."""
        return tfb.Chain(self._parts(condition)[::-1])

    def _parts(self, condition: Tensor | None) -> list[FlowBijector]:
        if not self.built:
            missing_attribute(self, "bijector")
        made = self._bijector_of(**self.parameters(condition))
        parts = [dict(made.parameters) for _ in range(self.number)]
        for name, ndims in made.parameter_ndims.items():
            # The gradient of a split is one concatenation, that of each index a padded tensor.
            values = ops.split(ops.moveaxis(getattr(made, name), -ndims - 1, 0), self.number)
            for part, value in zip(parts, values, strict=True):
                part[name] = ops.squeeze(value, 0)
        return [type(made)(**part) for part in parts]

    def _through(self, x: Tensor, condition: Tensor | None, way: str) -> tuple[Tensor, Tensor]:
        x, log_det = ops.convert_to_tensor(x, dtype=self.dtype), 0.0
        parts = self._parts(self.checked_condition(condition))
        for part in parts if way == "forward" else reversed(parts):
            x, change = mapped(part, x, self.event_ndims, way)
            log_det = log_det + change
        return x, log_det

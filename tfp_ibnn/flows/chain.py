"""Flows one after another, and the flows that are made of another."""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core.backend import Tensor, tfb
from tfp_ibnn._core.checks import missing_attribute, positive_integer
from tfp_ibnn.flows.bijector import FlowBijector, map_with_log_det
from tfp_ibnn.flows.flow import Flow


def copied(
    flows: Any,
    dtype: str,
    argument: str = "flows",
    condition_size: int | None = None,
    ndims: int = 1,
) -> list[Flow]:
    """Return copies of flows, with new weights.

    With a condition, neighbors that are alike become one `Stack`, if they are stackable.

    Args:
        flows: list of flows, or of their configs.
        dtype: str, the type of the copies.
        argument: str, the name of the argument for errors. Defaults to "flows".
        condition_size: int or None, the size of the condition that the copies get; None, the
            default, for none.
        ndims: int, the most axes that an event of a flow may have. Defaults to 1.

    Returns:
        List of unbuilt flows, named by their class and place.

    Raises:
        ValueError: `flows` is not a list of flows, or one of them has another condition or larger
            events.
    """
    flows = _checked_flows(flows, argument)
    for flow in flows:
        if flow.condition_size not in (None, condition_size) or flow.event_ndims > ndims:
            raise ValueError(
                f"`{argument}` must have condition_size={condition_size} and event_ndims={ndims}; "
                f"got {type(flow).__name__} with condition_size={flow.condition_size} and "
                f"event_ndims={flow.event_ndims}."
            )
    if condition_size is not None:
        flows = _stack_neighbors(flows)
    copies = []
    for position, flow in enumerate(flows):
        config = flow.get_config()
        config["dtype"] = dtype
        config["name"] = f"{type(flow).__name__.lower()}_{position}"
        config["condition_size"] = condition_size
        copies.append(type(flow).from_config(config))
    return copies


def _checked_flows(flows: Any, argument: str) -> list[Flow]:
    """Return a list of flows, made of their configs where these are given, or raise."""
    if isinstance(flows, Sequence):
        flows = [_from_config(flow) for flow in flows]
    if not isinstance(flows, list) or not all(isinstance(flow, Flow) for flow in flows):
        raise ValueError(f"`{argument}` must be a list of flows: [flows.Planar()]; got {flows!r}.")
    return flows


def _from_config(flow: Any) -> Any:
    """Return the flow of a config; what is not a config as it is."""
    if isinstance(flow, dict):
        return keras.saving.deserialize_keras_object(flow)
    return flow


def _stack_neighbors(flows: list[Flow]) -> list[Flow]:
    stacked = []
    for _, group in itertools.groupby(flows, _stacking_key):
        neighbors = list(group)
        if len(neighbors) == 1:
            stacked.append(neighbors[0])
        else:
            stacked.append(Stack(neighbors[0], len(neighbors)))
    return stacked


def _stacking_key(flow: Flow) -> Hashable:
    """Return what flows that can be one stack have in common; for others, what no other has."""
    if not flow.stackable:
        return object()
    config = flow.get_config()
    config["name"] = None
    return type(flow), repr(config)


def through(
    flows: Sequence[Flow],
    x: Tensor,
    condition: Any,
    direction: str,
    ndims: int = 1,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Map draws by flows, one after another.

    Args:
        flows: sequence of flows, in the order of the forward map.
        x: tensor (..., *event), with an event of `ndims` axes.
        condition: tensor (..., condition_size), or None.
        direction: "forward" or "inverse".
        ndims: int, over how many of the last axes log-determinants are summed. Defaults to 1.
        **options: further arguments of the flows' methods, such as `training`.

    Returns:
        The mapped draws, and the log-determinants (...,) of the whole map.
    """
    log_det = ops.zeros_like(_one_of_each_event(x, ndims))
    for flow in _in_order(flows, direction):
        if direction == "forward":
            x, change = flow.forward_and_log_det(x, condition=condition, **options)
        else:
            x, change = flow.inverse_and_log_det(x, condition=condition, **options)
        # A constant log-determinant is one number for all events.
        one_of_each = _one_of_each_event(x, flow.event_ndims)
        change = change + ops.zeros_like(one_of_each)
        outer_axes = tuple(range(flow.event_ndims - ndims, 0))
        change = ops.sum(change, axis=outer_axes)
        log_det = log_det + change
    return x, log_det


def _in_order(maps: Sequence[Any], direction: str) -> Iterable[Any]:
    if direction == "forward":
        return maps
    return reversed(maps)


def _one_of_each_event(x: Tensor, ndims: int) -> Tensor:
    """Return the first number of each event, (...,), which has the shape of a log-determinant."""
    first = (0,) * ndims
    return x[(..., *first)]


class FlowOfFlow(Flow):
    """A flow made of another, which it copies, with new weights, its condition and its type.

    Args:
        flow: Flow, or its config.
        **kwargs: arguments of `Flow`; `condition_size` and `dtype` are passed on to the copy.

    Raises:
        ValueError: `flow` is not a flow.
    """

    def __init__(self, flow: Flow, **kwargs: Any) -> None:
        flow = _from_config(flow)
        if not isinstance(flow, Flow):
            raise ValueError(f"`flow` must be a flow, such as flows.Planar(); got {flow!r}.")
        config = flow.get_config()
        config["name"] = "flow"
        for name in ("condition_size", "dtype"):
            if kwargs.get(name):
                config[name] = kwargs[name]
        flow = type(flow).from_config(config)
        kwargs["condition_size"] = flow.condition_size
        kwargs["dtype"] = flow.dtype
        super().__init__(**kwargs)
        self.flow = flow
        self.event_ndims = flow.event_ndims
        self.min_channels = flow.min_channels
        self.exact_log_det = flow.exact_log_det

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["flow"] = keras.saving.serialize_keras_object(self.flow)
        return config


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class Stack(FlowOfFlow):
    """A number of flows of one class, each with its own weights, one after another.

    It is the same map as that of a list of them. But Keras has one weight for all where the list
    has one in each, so compilation and training steps are shorter where there are many. Flows with
    a condition, as in a `VAE`, are stacked by themselves.

    Args:
        flow: `Affine`, `Planar`, `Radial` or `Sylvester`, or a flow of your own whose class
            declares `stackable = True`; it is copied, with new weights.
        number: positive int, how many.
        **kwargs: arguments of `Flow`; `condition_size` and `dtype` are passed on to the copies.

    Raises:
        ValueError: `flow` is not stackable, or `number` is not a positive whole number.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> flow = ibnn.flows.Stack(ibnn.flows.Planar(), 10)
        >>> flow(keras.ops.ones((2, 3))).shape[-1], tuple(flow.w.shape)
        (3, (10, 3))
    """

    def __init__(self, flow: Flow, number: int, **kwargs: Any) -> None:
        super().__init__(flow, **kwargs)
        self.number = positive_integer("number", number)
        if not self.flow.stackable:
            raise ValueError(
                "`flow` must be an Affine, Planar, Radial or Sylvester flow; got "
                f"{type(self.flow).__name__}, whose class does not declare `stackable = True`."
            )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.flow.built = True  # of no weights, which its copies have; `quantize` asks for it
        flows = [self._built_flow(input_shape) for _ in range(self.number)]
        first, *_ = flows
        for name, weight in first._parameters.items():
            values = [ops.convert_to_numpy(flow._parameters[name]) for flow in flows]
            stacked = self.add_parameter(
                name,
                (self.number, *weight.shape),
                keras.initializers.Constant(np.stack(values)),
                conditional=name in first._linear_maps,
                trainable=weight.trainable,
            )
            setattr(self, name, stacked)
        self._bijector_of = first.bijector_of  # a method, so that Keras does not see its weights

    def _built_flow(self, input_shape: tuple[int | None, ...]) -> Flow:
        flow = type(self.flow).from_config(self.flow.get_config())
        flow.build(input_shape)
        return flow

    def bijector(self, condition: Tensor | None = None) -> tfb.Chain:
        """Return the maps, chained; a chain applies its last element first."""
        return tfb.Chain(self._bijectors(condition)[::-1])

    def _bijectors(self, condition: Tensor | None) -> list[FlowBijector]:
        """Return a bijector for each flow of the stack."""
        if not self.built:
            missing_attribute(self, "bijector")
        parameters = self.parameters(condition)
        stacked = self._bijector_of(**parameters)
        parameters_of_each = [dict(stacked.parameters) for _ in range(self.number)]
        for name, ndims in stacked.parameter_ndims.items():
            tensor = getattr(stacked, name)
            tensor = ops.moveaxis(tensor, -ndims - 1, 0)
            # The gradient of a split is one concatenation, that of each index a padded tensor.
            slices = ops.split(tensor, self.number)
            for tensors, value in zip(parameters_of_each, slices, strict=True):
                tensors[name] = ops.squeeze(value, 0)
        return [type(stacked)(**tensors) for tensors in parameters_of_each]

    def _map(self, x: Tensor, condition: Tensor | None, direction: str) -> tuple[Tensor, Tensor]:
        x = ops.convert_to_tensor(x, dtype=self.dtype)
        log_det = 0.0
        bijectors = self._bijectors(self.checked_condition(condition))
        for bijector in _in_order(bijectors, direction):
            x, change = map_with_log_det(bijector, x, self.event_ndims, direction)
            log_det = log_det + change
        return x, log_det

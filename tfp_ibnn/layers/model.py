"""The Keras models that `to_stochastic` returns."""

import inspect
import warnings
from typing import Any

import keras

from tfp_ibnn._core import keras_internals, serialization
from tfp_ibnn._core.keras_losses import output_spec
from tfp_ibnn.layers import inside
from tfp_ibnn.layers.carried import carrying, own_methods
from tfp_ibnn.layers.noise_model import NoiseModel


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticModel(NoiseModel, keras.Model):
    """A Functional Keras model with stochastic layers.

    It reports the likelihood part of the loss as `nll` and the KL divergence of all layers, in
    nats, as `kl`; loss = nll + kl_scale * beta * kl / train_size where nothing else adds to it, and
    `kl_scale`, an argument of `compile`, is 1 for one class per example. It draws `train_samples`
    samples of z for each training example and averages their log-likelihoods.

    Args:
        *args: inputs and outputs, as for `keras.Model`.
        train_samples: samples for each example in training.
        **kwargs: those of `keras.Model`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> inputs = keras.Input((4,))
        >>> outputs = ibnn.StochasticDense(3, train_size=100)(inputs)
        >>> model = ibnn.StochasticModel(inputs, outputs)
        >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    """

    def _run(self, inputs: Any, training: bool | None, mask: Any) -> Any:
        return super(NoiseModel, self).call(inputs, training=training, mask=mask)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        if self.carried is not None:
            config["carried"] = keras.saving.get_registered_name(self.carried)
        return config

    @classmethod
    @serialization.naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "StochasticModel":
        config = dict(config)
        name = config.pop("carried", None)
        if name is not None and cls is StochasticModel:
            # The file names a class of the user's.
            users_class = keras.saving.get_registered_object(name, custom_objects)
            if users_class is not None:
                kind = carrying(cls, users_class, is_around=False)
                return kind.from_config(config, custom_objects)
            warnings.warn(
                f"The class {name!r} is not known, so the model trains and evaluates as Keras's "
                "do: give load_model(..., custom_objects={...}), or register the class with "
                "keras.saving.register_keras_serializable().",
                stacklevel=3,  # behind the decorator
            )
        return super().from_config(config, custom_objects)


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class StochasticSubclass(NoiseModel, keras.Model):
    """A model with a `call` of its own, in which `to_stochastic` has made layers stochastic.

    It trains as a `StochasticModel` does, or as your class does where it defines, say,
    `train_step`. `model` is the copy of yours, of your class.

    Args:
        model: a built Keras model, or its config.
        **kwargs: `train_samples`, as of `StochasticModel`, and those of `keras.Model`.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(**{"autocast": False, **kwargs})
        if isinstance(model, dict):  # a config
            model = keras.saving.deserialize_keras_object(model)
        self.model = model
        inside.bind(self)
        self.built = True

    def _symbolic_outputs(self) -> Any:
        try:
            if keras_internals.is_functional(self.model):
                inputs = self.model.input
            else:
                inputs = keras.KerasTensor(self.model.get_build_config()["input_shape"])
            outputs = output_spec(self.model, inputs)
        except Exception:  # `call` is the user's
            return None
        # Masks are lost on the way; outputs without positions have none.
        flat = keras.tree.flatten(outputs)
        return outputs if all(len(output.shape) <= 2 for output in flat) else None

    def _run(self, inputs: Any, training: bool | None, mask: Any) -> Any:
        options = {"training": training}
        if "mask" in inspect.signature(self.model.call).parameters:
            options["mask"] = mask
        return self.model(inputs, **options)

    def get_config(self) -> dict[str, Any]:
        model = keras.saving.serialize_keras_object(self.model)
        return {**super().get_config(), "model": model}

    @classmethod
    @serialization.naming_unknown_classes()
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "StochasticSubclass":
        config = keras_internals.readable(config)
        if isinstance(config["model"], dict):
            model = keras.saving.deserialize_keras_object(config["model"], custom_objects)
            config["model"] = model
        kind = class_around(config["model"]) if cls is StochasticSubclass else cls
        if kind is not cls:
            return kind.from_config(config, custom_objects)
        return super().from_config(config, custom_objects)


def class_around(model: keras.Model) -> type[StochasticSubclass]:
    """Return the class of the stochastic model around another one, with its methods if it can."""
    own = type(model)
    has_graph = keras_internals.is_functional(model) or isinstance(model, keras.Sequential)
    if has_graph or not own_methods(own):
        return StochasticSubclass
    return carrying(StochasticSubclass, own, is_around=True)

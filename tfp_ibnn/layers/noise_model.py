"""What a Keras model needs to train with noise."""

import functools
import inspect
import warnings
from typing import Any

import keras
from keras import ops

from tfp_ibnn import noise
from tfp_ibnn._core import checks, keras_internals, serialization
from tfp_ibnn._core.backend import Tensor, replica_count
from tfp_ibnn._core.keras_losses import output_losses
from tfp_ibnn._core.progress import FirstBatch
from tfp_ibnn._core.text import TakesStrings, refuse_single_strings, with_strings
from tfp_ibnn.layers import inside, loss_scale, rows
from tfp_ibnn.layers.carried import own_methods
from tfp_ibnn.layers.control import stochastic_layers
from tfp_ibnn.layers.tracking import LossPart, TrainSizeCheck, first_bad

_EXACT = 2**24
"""Up to this number float32, in which Keras's metrics count, has all whole numbers."""


class NoiseModel(TakesStrings):
    """What a model needs to train with noise; mix it in first. A subclass has `_run`."""

    carried: type[keras.Model] | None = None
    """The user's class whose methods for training and evaluation the model has."""

    def __init__(self, *args: Any, train_samples: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_samples = checks.positive_integer("train_samples", train_samples)
        self._nll_tracker = LossPart(name="nll")
        self._kl_tracker = LossPart(name="kl")
        # On JAX the loss is computed outside the call; a variable carries the KL across.
        fixed = {"initializer": "zeros", "trainable": False}
        self._last_kl = self.add_weight((), autocast=False, name="last_kl", **fixed)
        self._first_fault = self.add_weight((), dtype="int", name="first_fault", **fixed)
        self._warned_of_train_size = False
        self._warned_of_losses = False
        self._losses_were_read = False
        inside.bind(self)

    def compile(
        self,
        *args: Any,
        jit_compile: bool | str = "auto",
        noise_scale: float | None = None,
        kl_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Compile as Keras does, and weigh the KL so that `beta=1` makes the loss the ELBO.

        Args:
            *args: those of `keras.Model.compile`.
            jit_compile: as in Keras; "auto" is decided again where a file is loaded.
            noise_scale: standard deviation of the targets' noise, for losses such as "mse" that
                leave it open. None is 1, with a warning.
            kl_scale: the loss divided by the negative log-likelihood of one example, which
                multiplies the KL. None derives it from the loss and the shape of the output; where
                it depends on the data (masks, lengths that vary, ignored classes) or the loss is
                not Keras's, `fit` measures it on one batch.
            **kwargs: those of `keras.Model.compile`.
        """
        self._jit_is_open = jit_compile == "auto"
        if not self._jit_is_open:  # a user's `compile` need not take it
            kwargs["jit_compile"] = jit_compile
        super().compile(*args, **kwargs)
        if noise_scale is not None:
            noise_scale = checks.scale("noise_scale", noise_scale)
        self._noise_scale = noise_scale
        if kl_scale is not None:
            self._weigh_kl(checks.positive("kl_scale", kl_scale))
        else:
            self._weigh_kl(None)
            outputs = self._symbolic_outputs()
            if outputs is not None:
                self._weigh_kl(self._derived_kl_scale(outputs, outputs))
        self._warn_of_weight_decay()

    def _warn_of_weight_decay(self) -> None:
        """Warn if the optimizer pulls at weights that have a prior."""
        # A loss-scaling optimizer wraps it.
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        optimizer = getattr(optimizer, "deterministic", optimizer)
        for layer in stochastic_layers(self):
            if not layer.prior_on_weights:
                continue
            weights = layer.layer.trainable_weights
            if any(keras_internals.decays(optimizer, weight) for weight in weights):
                warnings.warn(
                    f"The optimizer's `weight_decay` on layer {layer.name!r} counts the prior of "
                    "its weights twice: leave it out.",
                    stacklevel=3,
                )
                return

    def get_compile_config(self) -> dict[str, Any]:
        """Return the arguments of `compile`, with the weight of the KL."""
        config = super().get_compile_config()
        if not config:
            return config
        jit = {"jit_compile": "auto"} if self._jit_is_open else {}
        return {**config, **jit, "noise_scale": self._noise_scale, "kl_scale": self._kl_scale}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with the arguments that `get_compile_config` gave."""
        if "compile" in own_methods(type(self)):
            super().compile_from_config(config)
            return
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**{"kl_scale": 1.0, **config})  # files of 0.1.0 have none
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train the model; the arguments are Keras's.

        Warns once, after the first epoch, if that had another number of examples than `train_size`,
        by more than a batch; not if `steps_per_epoch` is given, since epochs are then not passes
        over the data.
        """
        if self.built:
            rows.check_rows(self)
        args, kwargs = with_strings((args, kwargs))
        bound = inspect.signature(super().fit).bind(*args, **kwargs)
        refuse_single_strings(bound.arguments.get("x"), "x")
        callbacks = _holder(bound, "callbacks").get("callbacks")
        is_ready = isinstance(callbacks, keras.callbacks.CallbackList)
        is_whole_epoch = _holder(bound, "steps_per_epoch").get("steps_per_epoch") is None
        if is_whole_epoch and not is_ready and not self._warned_of_train_size:
            # First, so that no other callback has touched the metrics.
            callbacks = [TrainSizeCheck(), *keras.tree.flatten(callbacks or [])]
        notice = FirstBatch(self.train_function)
        if not is_ready:
            callbacks = [notice, *keras.tree.flatten(callbacks or [])]
        _holder(bound, "callbacks")["callbacks"] = callbacks
        if self.compiled and self._kl_scale is None:
            data = {name: _holder(bound, name).get(name) for name in ("x", "y", "batch_size")}
            self._measure_kl_scale(data)
            if data["x"] is not None:
                _holder(bound, "x")["x"] = data["x"]
        with notice:
            return super().fit(*bound.args, **bound.kwargs)

    def _symbolic_outputs(self) -> Any:
        """Return the outputs as symbolic tensors with their masks, or None if these are unknown."""
        return self.output

    def _derived_kl_scale(self, y_true: Any, y_pred: Any) -> float | None:
        """Return the loss divided by the negative log-likelihood of an example, if that is known.

        Args:
            y_true: targets, or the symbolic outputs in their place.
            y_pred: outputs, symbolic or of a batch.

        Returns:
            The factor of the KL; None if it depends on the values of a batch.
        """
        parts = output_losses(self, y_true, y_pred)
        return loss_scale.kl_scale(parts, self._noise_scale, self.train_samples)

    def _measure_kl_scale(self, arguments: dict[str, Any]) -> None:
        """Weigh the KL by a batch of what `fit` was given.

        Args:
            arguments: of `fit`, by name. A generator in it is replaced, so that it loses no batch.
        """
        try:
            batch = loss_scale.first_batch(arguments)
            x, y = keras.tree.map_structure(ops.convert_to_tensor, batch)
        except (TypeError, ValueError):  # no targets, or a distributed dataset
            return
        with noise.scope(off=True):
            y_pred = self(x, training=False)
        self._weigh_kl(self._derived_kl_scale(y, y_pred))
        self.train_function = self.test_function = None  # those traced with another weight

    def _weigh_kl(self, scale: float | None) -> None:
        """Let all layers multiply their KL by a number; None, if it is not known yet, is 1."""
        self._kl_scale = scale
        for layer in stochastic_layers(self):
            layer.kl_scale = 1.0 if scale is None else scale

    def _check_train_size(self, steps: int) -> None:
        """Warn if `train_size` is not the number of examples that the metrics have counted."""
        count = round(float(ops.convert_to_numpy(self._nll_tracker.count)))
        examples = count // self.train_samples
        sizes = {layer.train_size for layer in stochastic_layers(self)}
        wrong = [size for size in sizes if abs(size - examples) > examples / steps]
        # A `train_step` of a subclass may count none.
        if not wrong or not examples or count > _EXACT:
            return
        self._warned_of_train_size = True
        size = wrong[0]
        warnings.warn(
            f"`train_size` is {size}, but the first epoch had {examples} training examples: the KL "
            f"counts {examples / size:.3g} times as much as in the ELBO. Write "
            f"train_size={examples}. "
            "(len() of a tf.data.Dataset or a PyDataset is its number of batches.)",
            stacklevel=2,
        )

    def train_step(self, *args: Any) -> Any:
        """Take a training step on `train_samples` copies of each example, each with its own z."""
        if self._kl_scale is None:
            warnings.warn(
                "The KL is weighted for one answer per example, since it is unknown how many "
                "answers the loss averages over: write compile(..., kl_scale=1 / number).",
                stacklevel=2,
            )
        # The backends disagree on what comes before the data (nothing, or the state on JAX).
        *state, data = args
        if self.train_samples > 1:
            data = keras.tree.map_structure(
                lambda x: None if x is None else ops.repeat(x, self.train_samples, axis=0), data
            )
        self._losses_were_read = False
        results = super().train_step(*state, data)
        if not self._losses_were_read and not self._warned_of_losses:
            self._warned_of_losses = True
            warnings.warn(
                f"The `train_step` of {self.name!r} trains without the KL divergence: it does not "
                "use `self.losses`, whose sum is part of the loss. Let `self.compute_loss` add it; "
                "on JAX take it from `stateless_call(..., return_losses=True)`.",
                stacklevel=2,
            )
        return results

    @property
    def losses(self) -> list[Tensor]:
        """What layers add to the loss: the KL terms and regularizers."""
        losses = super().losses
        self._losses_were_read |= bool(losses)
        return losses

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Run the model and keep the KL of the pass.

        Args:
            inputs: those of the model.
            training: whether this is a training step.
            mask: that of the inputs.

        Returns:
            The outputs of the model.
        """
        forward_pass = noise.current()
        first_input = keras.tree.flatten(inputs)[0]
        batch = ops.shape(first_input)[0]
        if self._may_move_examples and forward_pass.examples is None:
            forward_pass.examples = batch
        looped = inside.called_inside(self)
        inside.draw_ahead(looped, forward_pass, batch, bool(training))
        outputs = self._run(inputs, training, mask)
        if forward_pass.losses:
            forward_pass.restore_losses()
            self._last_kl.assign(ops.cast(forward_pass.kl, self._last_kl.dtype))
            if training:
                self._note_fault(first_bad(forward_pass, stochastic_layers(self)))
        return outputs

    @functools.cached_property
    def _may_move_examples(self) -> bool:
        """Whether a layer may see the examples in another order, or in several rows each."""
        return rows.may_move_examples(self)

    def _note_fault(self, place: Tensor) -> None:
        """Keep a place in the list of `fault` if it is the first since `clear_fault`."""
        known = ops.convert_to_tensor(self._first_fault)
        place = ops.cast(place, known.dtype)
        first = ops.where(known == 0, place, known)
        self._first_fault.assign(first)

    def clear_fault(self) -> None:
        """Forget the fault that `fault` returns."""
        self._first_fault.assign(0)

    @property
    def fault(self) -> str | None:
        """What was the first to become NaN or infinite in training; None if nothing did."""
        names = [layer.name for layer in stochastic_layers(self)]
        parts = [f"{part} of layer {name!r}" for name in names for part in ("z", "the KL")]
        faults = [None, *parts, "the loss, while every z and KL was finite"]
        number = ops.convert_to_numpy(self._first_fault)
        return faults[int(number)]

    def save_own_variables(self, store: Any) -> None:
        """Save what the layers inside do not save themselves: the random state of Keras layers."""
        super().save_own_variables(store)
        serialization.save(store, self._random_states_of_keras())

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` saved."""
        states = self._random_states_of_keras()
        super().load_own_variables(serialization.load(store, states, self.name))

    def _random_states_of_keras(self) -> list[keras.Variable]:
        layers = keras_internals.nested_layers(self, include_self=False)
        own = serialization.SavesRandomState
        return serialization.states_of(x for x in layers if not isinstance(x, own))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Tensor:
        """Compute the loss as Keras, or the user's class, does, and record its two parts.

        Args:
            x: inputs of the batch.
            y: targets.
            y_pred: outputs.
            sample_weight: weights of the examples.
            training: whether this is a training step.

        Returns:
            The loss, with the KL.
        """
        plain = super().compute_loss
        takes_training = "training" in inspect.signature(plain).parameters
        options = {"training": training} if takes_training else {}
        self._losses_were_read = False
        loss = plain(x, y, y_pred, sample_weight, **options)
        is_in_loss = self._losses_were_read
        added = keras_internals.added_loss(self)
        if not is_in_loss:  # a user's `compute_loss` left it out
            loss = loss + added
        if not keras_internals.has_value(self._last_kl):  # called outside of Keras's own functions
            return loss
        first_input = keras.tree.flatten(x)[0]
        examples = ops.shape(first_input)[0]
        # Keras divides each replica's loss by their number; the metric undoes it.
        nll = (loss - added) * replica_count()
        self._nll_tracker.record(nll, examples)
        self._kl_tracker.record(self._last_kl, examples)
        if training:
            self._note_fault(ops.where(ops.isfinite(loss), 0, -1))  # the last one in its list
        return loss

    def get_config(self) -> dict[str, Any]:
        """Return the config of the model, and those of stochastic layers inside of other layers."""
        own = {"train_samples": self.train_samples, "inside": inside.configs(self)}
        return {**super().get_config(), **own}

    @classmethod
    @serialization.naming_unknown_classes()
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "NoiseModel":
        """Return a model of a config.

        Args:
            config: what `get_config` gave.
            custom_objects: classes and functions by the names that the config has for them.

        Returns:
            A model with new weights.
        """
        config = keras_internals.readable(config)
        saved = config.pop("inside", ())
        model = super().from_config(config, custom_objects)
        inside.restore(model, saved)
        return model


def _holder(bound: inspect.BoundArguments, name: str) -> dict[str, Any]:
    """Return the dict in which a call has an argument, or would have it.

    A user's `fit` may take what it does not name in its `**kwargs`.
    """
    parameters = bound.signature.parameters
    if name not in parameters:
        for parameter in parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                return bound.arguments.setdefault(parameter.name, {})
    return bound.arguments

"""Ensembles of trained models; mixtures of posteriors over weights, and one at a temperature."""

import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfp_ibnn._core import backend, checks, protocols
from tfp_ibnn._core.backend import Tensor
from tfp_ibnn._core.progress import Heartbeat, printer
from tfp_ibnn._core.protocols import Chunks, Sampler
from tfp_ibnn._core.serialization import ConfiguredLayer, storable
from tfp_ibnn._core.text import with_strings
from tfp_ibnn.conversion.graph import functional_graph
from tfp_ibnn.layers import stochastic_layers
from tfp_ibnn.prediction.samplers import MixtureSampler
from tfp_ibnn.training import Interrupts
from tfp_ibnn.weights.architecture import difference
from tfp_ibnn.weights.base import WeightPosterior, WeightSets


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class DeepEnsemble(WeightSets):
    """Several trainings of one network, from different starts; `MonteCarlo` averages them.

    Members with stochastic layers make a mixture of posteriors: draw s is of member s mod n, with
    noise of its own, and `MonteCarlo` rounds `samples` up to a multiple of n. The first network
    runs with the weights of each: models that differ in more (layers, connections, functions,
    attributes, what `Normalization` adapted to), and posteriors over weights such as SWAG's, make a
    `WeightMixture`. Reference: Lakshminarayanan et al., arXiv 1612.01474.

    Args:
        models: built Keras models of one architecture. The first says what the output means:
            compile it with its loss, or give `MonteCarlo` a `head`.
        **kwargs: those of `keras.layers.Layer`.

    Example:
        >>> import keras, tfp_ibnn as ibnn
        >>> layers = [[keras.Input([3]), keras.layers.Dense(2)] for _ in range(4)]
        >>> ensemble = ibnn.DeepEnsemble([keras.Sequential(each) for each in layers])
        >>> ibnn.MonteCarlo(ensemble, head="softmax", from_logits=True).samples
        4
    """

    @classmethod
    def train(
        cls,
        build: Callable[..., keras.Model],
        n: int,
        x: Any,
        y: Any = None,
        *,
        seed: int = 0,
        callbacks: Any = None,
        side_by_side: bool = False,
        verbose: int = 1,
        **fit: Any,
    ) -> "DeepEnsemble":
        """Train n members, each from a seed of its own; one after the other, if not told else.

        Member i is built and trained after `keras.utils.set_random_seed(seed + i)`, so equal calls
        give equal ensembles. A member that is not finite is left out, and after an interrupt
        (Ctrl-C) those that are finished are returned, both with a warning.

        Args:
            build: a function that returns a compiled model; it may take the member's seed.
            n: number of members.
            x: training inputs, or a dataset, as for `fit`.
            y: training targets.
            seed: of the first member; the others follow.
            callbacks: for `fit`; or a function that returns new ones, which may take that seed.
            side_by_side: take all members through the same batches, in the order of `x`, without
                `callbacks`: on JAX all of them in one compiled step, which an interrupt loses, on
                TensorFlow one after the other. What they learn is the same up to rounding.
            verbose: 1 prints a line for each member, and every ten seconds; 2 the epochs too; 0
                nothing.
            **fit: other arguments of `fit`, such as `epochs`.
        """
        n, seed = checks.positive_integer("n", n), checks.whole("seed", seed)
        seeds, first, sets, together = list(range(seed, seed + n)), None, [], []
        if side_by_side and callbacks is not None:
            raise ValueError("`callbacks` must be None if members train side by side.")
        if n > 1 and isinstance(x, Iterator):
            raise ValueError(
                f"`x` is a {type(x).__name__}, which the first of {n} members would use up: give "
                "arrays, a tf.data.Dataset or a PyDataset."
            )
        x = with_strings(x)
        options = {"verbose": 2 if verbose > 1 else 0, **fit}
        options |= {"shuffle": False} if side_by_side else {}
        start = time.monotonic()
        if side_by_side and backend.SCANS_EPOCHS:
            models = [_built(build, number) for number in seeds]
            together = list(zip(models, _fit_all(models, x, y, options), strict=True))
        for number in seeds:
            try:
                if together:
                    model, loss = together[number - seed]
                else:
                    start, model = time.monotonic(), _built(build, number)
                    _check_alike(first or model, model, number)
                    own = _called(callbacks, number) if callable(callbacks) else callbacks
                    with Heartbeat(f"Member {number - seed + 1} of {n}", printer(verbose == 1)):
                        loss = _fit(model, x, y, options, own or ())
            except KeyboardInterrupt:
                if not sets:
                    raise
                done = f"{len(sets)} of {n} members are finished"
                warnings.warn(f"Interrupted: {done}, and make the ensemble.", stacklevel=2)
                break
            values = [storable(w) for w in model.weights]
            if not np.isfinite(loss) or not all(np.isfinite(v).all() for v in values):
                problem = f"The member of seed {number} diverged (its loss is {loss:g})"
                warnings.warn(f"{problem}: it is left out.", stacklevel=2)
                continue
            first = model if first is None else first
            _check_alike(first, model, number)
            sets.append(values)
            if verbose:
                took = f"{time.monotonic() - start:.0f} s, loss {loss:.4g}"
                print(f"Member {number - seed + 1} of {n} (seed {number}): {took}.")
        if not sets:
            raise ArithmeticError(f"All members diverged: those of the seeds {seeds}.")
        return cls.of(first, sets)


def _called(function: Callable[..., Any], seed: int) -> Any:
    """Return what a user's function makes, which need not take the seed."""
    parameters = inspect.signature(function).parameters.values()
    takes_seed = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    return function(seed) if takes_seed else function()


def _built(build: Callable[..., keras.Model], seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = _called(build, seed)
    if not isinstance(model, keras.Model) or not model.compiled:
        raise ValueError(f"`build({seed})` must return a compiled Keras model; got {model!r}.")
    return model


def _check_alike(first: keras.Model, model: keras.Model, seed: int) -> None:
    if model is not first and (where := difference(first, model)):
        raise ValueError(
            f"`build({seed})` must return a model that differs from the first one only in the "
            f"values of its weights; it differs in {where}. Train such models by `fit`, and use "
            "ibnn.WeightMixture(models)."
        )


def _fit(model: keras.Model, x: Any, y: Any, options: dict[str, Any], callbacks: Any) -> float:
    with Interrupts() as interrupts:
        log = model.fit(x, y, callbacks=[*callbacks, interrupts], **options)
    return log.history.get("loss", [0.0])[-1]


def _fit_all(models: list[keras.Model], x: Any, y: Any, options: dict[str, Any]) -> list[float]:
    """Let `fit` of the first model take each step of all models, on JAX; return their losses."""
    first = models[0]
    for model in models[1:]:
        if where := difference(first, model, training=True):
            raise ValueError(
                "`build` must return models that differ only in the values of their weights, to "
                f"train side by side; they differ in {where}. Leave `side_by_side` out."
            )
    configs = [{**model.optimizer.get_config(), "name": ""} for model in models]
    if stochastic_layers(first) or any(x != configs[0] for x in configs):
        want = "`build` must return plain models with one optimizer, to train side by side"
        raise ValueError(f"{want}; got stochastic layers, or optimizers that differ.")
    for model in models:
        model.optimizer.build(model.trainable_variables)
    owned = [
        [model.trainable_variables, model.non_trainable_variables, model.optimizer.variables]
        for model in models
    ]
    states = keras.tree.map_structure(lambda *v: ops.stack([x.value for x in v]), *owned)
    logs = {}

    def step(states: Any, data: Any) -> Any:
        logs, states = ops.vectorized_map(lambda state: first.train_step(state, data), states)
        return logs, states, keras.tree.map_structure(lambda x: x[0], (logs, states))

    run = backend.compiled(step, [])

    def train_function(state: Any, iterator: Any) -> tuple[Any, Any]:
        nonlocal states, logs
        if len(states) == 3:  # an epoch begins, with metrics that `fit` has reset
            repeated = [ops.stack([x] * len(models)) for x in state[3]]
            states = (*states, repeated)
        logs, states, of_first = run(states, next(iterator))
        return of_first

    def end_epoch(*_: Any) -> None:
        nonlocal states
        states = states[:3]

    first.train_function = train_function
    _fit(first, x, y, options, [keras.callbacks.LambdaCallback(on_epoch_end=end_epoch)])
    for i, parts in enumerate(owned):
        keras.tree.map_structure(lambda v, x, i=i: v.assign(x[i]), parts, list(states))
    return ops.convert_to_numpy(logs["loss"]).tolist()


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class WeightMixture(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """Several posteriors over weights, all equally likely: MultiSWAG, ensembles of anything.

    Draw s is draw s // n of member s mod n; `MonteCarlo` rounds `samples` up to a multiple of n, so
    that each member is drawn as often. The networks may be of any architecture, with the same
    inputs and outputs; of one architecture, a `DeepEnsemble` is smaller, since it holds one only.
    MultiSWAG (arXiv 2002.08791) is `ibnn.WeightMixture([swag.posterior() for swag in swags])`.

    Args:
        members: posteriors over weights, or built Keras models, stochastic ones too. The network of
            the first says what the output means.
        **kwargs: those of `keras.layers.Layer`.
    """

    count = None

    def __init__(
        self, members: Sequence[protocols.WeightPosterior | keras.Model], **kwargs: Any
    ) -> None:
        if not isinstance(members, Sequence) or not members:
            want = "a list of posteriors over weights, or of built Keras models"
            raise ValueError(f"`members` must be {want}; got {members!r}.")
        is_posterior = protocols.WeightPosterior
        members = [x if isinstance(x, is_posterior) else WeightSets([x]) for x in members]
        shapes = [getattr(x.network, "output_shape", None) for x in members]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"The outputs of `members` must be of one shape; got {shapes}.")
        super().__init__(**kwargs)
        self.members, self.network = members, members[0].network
        self.built = True

    @property
    def modes(self) -> int:
        return sum(member.modes for member in self.members)

    def mean_network(self) -> keras.Model:
        return self.members[0].mean_network()

    def materialize(
        self, number: int, data: Any = None, *, seed: int = 0, **options: Any
    ) -> "WeightMixture":
        """Return the mixture of finite sets, `number` of each member that has more."""
        numbered = enumerate(self.members, seed)
        made = [x.materialize(number, data, seed=own, **options) for own, x in numbered]
        return WeightMixture(made)

    def sampler(self, samples: int, **options: Any) -> MixtureSampler:
        samplers = [x.sampler(samples, **options) for x in self.members]
        return MixtureSampler(samplers, samples, options.get("chunk_size"))


@keras.saving.register_keras_serializable(package="tfp_ibnn")
class ScaledPosterior(ConfiguredLayer, WeightPosterior, keras.layers.Layer):
    """A posterior over weights with each draw's output at a temperature, or with a scale.

    `posterior` is over the weights of a Functional or Sequential model, of any kind; `scaling`, a
    built Functional model, takes the outputs (N, K) of that network.
    """

    def __init__(self, posterior: WeightPosterior, scaling: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.posterior, self.scaling, self.count = posterior, scaling, posterior.count
        self.built = True

    @functools.cached_property
    def network(self) -> keras.Model:
        """The network with the scaling behind it."""
        inner = functional_graph(self.posterior.network)
        return keras.Model(inner.input, self.scaling(inner.outputs[0]), name=inner.name)

    @property
    def modes(self) -> int:
        return self.posterior.modes

    def mean_network(self) -> keras.Model:
        """Return the network behind the scaling, which changes no features."""
        return self.posterior.mean_network()

    def materialize(self, *args: Any, **options: Any) -> "ScaledPosterior":
        return ScaledPosterior(self.posterior.materialize(*args, **options), self.scaling)

    def sampler(self, samples: int, **options: Any) -> Sampler:
        return _ScaledSampler(self.posterior.sampler(samples, **options), self.scaling)


class _ScaledSampler(Sampler):
    def __init__(self, sampler: Sampler, scaling: keras.Model) -> None:
        self._sampler, self._scaling, self.samples = sampler, scaling, sampler.samples

    def chunks(self, inputs: Any, key: Tensor) -> Chunks:
        chunks = self._sampler.chunks(inputs, key)
        return chunks._replace(run=lambda first: self._scaled(chunks.run(first)))

    def draw(self, inputs: Any, key: Tensor, number: Tensor) -> Tensor:
        return self._scaled(self._sampler.draw(inputs, key, number))

    def at_mean(self, inputs: Any) -> Tensor:
        return self._scaled(self._sampler.at_mean(inputs))

    def _scaled(self, outputs: Tensor) -> Tensor:
        """Return outputs (draws, batch, width) scaled."""
        rows = self._scaling(ops.reshape(outputs, (-1, outputs.shape[-1])))
        return ops.reshape(rows, (*ops.shape(outputs)[:2], rows.shape[-1]))

"""What the package relies on in Keras though nobody promised it: a contract for each name."""

import ast
import contextlib
import inspect
import operator
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.flows.tools import numpy
from tfp_ibnn._core import keras_internals, keras_layers, keras_losses, keras_optimizers

ON_JAX = keras.backend.backend() == "jax"
ROOT = Path(__file__).parents[2]
MODULE = ROOT / "tfp_ibnn" / "_core" / "keras_internals.py"
MODULES = (MODULE, *(MODULE.with_name(f"keras_{x}.py") for x in ("layers", "losses", "optimizers")))


@contextlib.contextmanager
def contract(function: str, advice: str) -> Iterator[None]:
    """Turn any failure inside into what is to be done about it."""
    try:
        yield
    except Exception as error:
        pytest.fail(
            f"Keras {keras.__version__} breaks what keras_internals.{function} promises "
            f"({type(error).__name__}: {error}). {advice} Change that function alone, so that its "
            "docstring holds, and then TESTED_VERSIONS and pyproject.toml. Until then the package "
            "does not work with this version of Keras."
        )


class Probe(layers.Layer):
    """Notes which call it belongs to, and calls another layer, if it has one."""

    def __init__(self, note, inner=None):
        super().__init__()
        self.note, self.inner = note, inner

    def build(self, shape):
        self.built = True

    def call(self, inputs):
        self.note(keras_internals.find_call())
        return inputs if self.inner is None else self.inner(inputs)


def probes():
    """A model that calls one layer twice, the second time inside of another, and what they see."""
    seen, x = [], keras.Input((3,))
    inner = Probe(seen.append)
    model = keras.Model(x, Probe(seen.append, inner)(inner(x)))
    seen.clear()  # what symbolic calls saw
    return model, seen


# ------------------------------------------------------------------------------------------- calls


def test_find_call_in_a_plain_call():
    model, seen = probes()
    with contract(
        "find_call",
        "Find the object that Layer.__call__ makes for an outermost call and drops at its end "
        "(keras/src/layers/layer.py, step 5, `_get_call_context`), and return it.",
    ):
        for _ in range(2):
            model(np.ones((2, 3), "float32"))
        assert len(seen) == 6
        assert all(call is not None for call in seen)
        assert len({id(call) for call in seen}) == 2
        assert len({id(call) for call in seen[:3]}) == 1
        assert keras_internals.find_call() is None
        with keras.StatelessScope():
            assert keras_internals.find_call() is None


def test_find_call_in_a_stateless_call():
    model, seen = probes()
    x = np.ones((2, 3), "float32")
    with contract(
        "find_call",
        "Layer.stateless_call runs `call` without a call context, inside of a StatelessScope that "
        "it opens as its local variable `scope`; find what now lives as long as that call.",
    ):
        with keras.StatelessScope():
            model.stateless_call([], [], x)
            model.stateless_call([], [], x)
        assert all(isinstance(call, keras.StatelessScope) for call in seen)
        assert len({id(call) for call in seen}) == 2
        assert len({id(call) for call in seen[:3]}) == 1


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_find_call_in_a_trainer(method):
    model, seen = probes()
    x = np.ones((2, 3), "float32")
    model.compile(None if method == "predict" else "sgd", "mse", run_eagerly=True)
    with contract(
        "find_call",
        "Look at how the trainer of this backend calls the model (keras/src/backend/*/trainer.py): "
        "all layers must see one call in each step.",
    ):
        getattr(model, method)(*([x] if method == "predict" else [x, x]), verbose=0)
        assert None not in seen
        assert len({id(call) for call in seen[-3:]}) == 1


def test_find_call_while_shapes_are_inferred():
    seen = []
    x = keras.KerasTensor((None, 3))
    with contract(
        "find_call",
        "Find out when Keras only infers shapes (a SymbolicScope is open): a tensor of one such "
        "inference must not reach another.",
    ):
        for _ in range(2):
            Probe(seen.append).compute_output_spec(x)
        assert all(isinstance(call, keras.StatelessScope) for call in seen)
        assert len({id(call) for call in seen}) == 2


def test_own_losses():
    class Adds(layers.Layer):
        def call(self, inputs):
            self.add_loss(ops.sum(inputs))
            return inputs

    inner, other = Adds(), Adds()
    model = keras.Sequential([keras.Input((3,)), inner, other])
    with contract("own_losses", "See how Layer.losses collects what add_loss has added."):
        model(np.ones((2, 3), "float32"))
        (loss,) = keras_internals.own_losses(inner)
        np.testing.assert_allclose(float(loss), 6.0)
        assert keras_internals.own_losses(model) == []


def test_added_loss():
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")]
    )
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    model.compile("sgd", "mse")
    with contract("added_loss", "See what Trainer.compute_loss adds to the compiled loss."):
        predicted = model(x)
        added = keras_internals.added_loss(model)
        np.testing.assert_allclose(float(added), sum(map(float, model.losses)), rtol=1e-6)
        likelihood = float(ops.mean(ops.square(predicted)))
        loss = model.compute_loss(x=x, y=y, y_pred=predicted)
        np.testing.assert_allclose(float(loss), likelihood + float(added), rtol=1e-5)


# ------------------------------------------------------------------------------- layers and weights


@pytest.mark.parametrize("kind", ["one", "list", "dict"])
@pytest.mark.parametrize("symbolic", [True, False])
def test_output_losses(kind, symbolic):
    x = keras.Input((3,))
    a, b = layers.Dense(2, name="a")(x), layers.Dense(4, name="b")(x)
    outputs = {"one": a, "list": [a, b], "dict": {"a": a, "b": b}}[kind]
    loss = {"one": "mse", "list": ["mse", "mae"], "dict": {"b": "mae", "a": "mse"}}[kind]
    weights = {"one": None, "list": [1.0, 2.0], "dict": {"a": 1.0, "b": 2.0}}[kind]
    model = keras.Model(x, outputs)
    model.compile("sgd", loss, loss_weights=weights)
    y_pred = outputs if symbolic else model(np.ones((5, 3), "float32"))
    with contract(
        "output_losses",
        "Find how Keras pairs losses and loss weights with outputs "
        "(keras/src/trainers/compile_utils.py, `CompileLoss`); it must compute no loss.",
    ):
        found = keras_losses.output_losses(model, y_pred, y_pred)
        found = {part.y_pred.shape[-1]: (part.place, part.loss.fn, part.weight) for part in found}
        places = {"one": (None,), "list": (0, 1), "dict": ("a", "b")}[kind]
        wanted = (keras.losses.mean_squared_error, 1.0), (keras.losses.mean_absolute_error, 2.0)
        pairs = zip(places, wanted, (2, 4), strict=False)
        assert found == {units: (place, *each) for place, each, units in pairs}
        model = keras.Model(x, outputs)
        model.compile("sgd")
        assert keras_losses.output_losses(model, y_pred, y_pred) == []


def test_output_spec():
    with contract("output_spec", "Find how Keras runs a function on symbolic tensors."):
        found = keras_losses.output_spec(ops.square, keras.KerasTensor((None, 3)))
        assert tuple(found.shape) == (None, 3)


def test_nested_layers():
    shared = layers.Dense(3)
    inner = keras.Sequential([keras.Input((3,)), shared])
    x = keras.Input((3,))
    model = keras.Model(x, inner(shared(x)))
    advice = "Walk through the layers that Layer itself tracks, to any depth."
    with contract("nested_layers", advice):
        found = keras_internals.nested_layers(model)
        assert found[0] is model
        assert found.count(shared) == 1
        assert inner in found
        assert keras_internals.nested_layers(model, include_self=False) == found[1:]
        assert keras_internals.nested_layers(shared, include_self=False) == []


class Nest(layers.Layer):
    """Keeps layers in every way, one of them out of sight."""

    def __init__(self):
        super().__init__()
        self.plain = layers.Dense(3)
        self.again = self.plain
        self.parts = [layers.Dense(3), (layers.Dense(3), {"b": layers.Dense(3)})]
        self.pair = (layers.Dense(3), layers.Dropout(0.5))
        self.odd = {1: "unlike", "keys": 2}
        hidden = layers.Dense(3)
        self.last = hidden
        vars(self).pop("last")
        self.hide = lambda: hidden

    def layers_in_order(self):
        first, (second, others) = self.parts
        return [self.plain, first, second, others["b"], *self.pair, self.hide()]

    def build(self, shape):
        for layer in self.layers_in_order():
            layer.build(shape)

    def call(self, x):
        for layer in self.layers_in_order():
            x = layer(x)
        return self.again(x)


def test_sublayers_and_swaps():
    nest = Nest()
    nest.build((None, 3))
    advice = "Find where Layer keeps the sublayers it tracks, and where Functional keeps its nodes."
    with contract("sublayers", advice):
        found = keras_layers.sublayers(nest)
        assert list(found.values()) == nest.layers_in_order()
        names = ["plain", "parts", "parts", "parts", "pair", "pair", keras_layers.HIDDEN]
        assert [name for name, _ in found] == names
    x = np.ones((2, 3), "float32")
    before, parts = nest.layers_in_order(), nest.pair[0]
    double = layers.Lambda(lambda x: 2 * x)
    swaps = {id(nest.plain): double, id(parts): double}
    with contract("swap_sublayers", advice):
        keras_layers.swap_sublayers(nest, swaps)
        assert nest.plain is nest.again is nest.pair[0] is double
        expected = numpy(2 * x)
        for layer in before[1:4]:
            expected = numpy(layer(expected))
        np.testing.assert_allclose(2 * numpy(before[6](2 * expected)), numpy(nest(x)), rtol=1e-5)
        assert not any(parts.kernel is weight for weight in nest.weights)
        assert len(nest.weights) == 8
    for make in (keras.Sequential, lambda layers: keras.Sequential(layers)._functional):
        model = make([keras.Input((3,)), layers.Dense(3), layers.Dense(3), layers.Dense(2)])
        old, new = model.layers[-2], layers.Dense(3)
        new.build((None, 3))
        with contract("_swap_in_graph", advice):
            keras_layers.swap_sublayers(model, {id(old): new})
            first, _, last = model.layers[-3:]
            np.testing.assert_allclose(numpy(model(x)), numpy(last(new(first(x)))), rtol=1e-5)
            rebuilt = keras.Model(model.inputs, model.outputs)
            assert rebuilt.layers[-2] is new
            again = keras.Model.from_config(rebuilt.get_config())
            again.set_weights(model.get_weights())
            np.testing.assert_allclose(numpy(again(x)), numpy(model(x)), rtol=1e-5)
    with contract("_in_attributes", advice):
        names = [name for name, _, _ in keras_layers._in_attributes(nest)]
        assert "pair" in names
        assert "_layers" not in names
    with contract("_swap_in_attributes", advice):
        keras_layers._swap_in_attributes(nest, {id(double): before[0]})
        assert nest.plain is nest.again is nest.pair[0] is before[0]


def test_deep_copy():
    nest = Nest()
    symbol = keras.Input((3,))
    nest(symbol)
    x = np.ones((2, 3), "float32")
    with contract("deep_copy", "Find which attributes of Layer belong to one object alone."):
        copy = keras_layers.deep_copy(nest)
        copy.hide = lambda hidden=copy._layers[-1]: hidden  # what a function holds is not copied
        np.testing.assert_array_equal(numpy(copy(x)), numpy(nest(x)))
        own, others = ({id(v) for v in y.variables} for y in (nest, copy))
        assert len(own) == len(others)
        assert not own & others
        assert copy.plain is copy.again
        copy.plain.kernel.assign(0 * copy.plain.kernel)
        assert np.any(numpy(nest.plain.kernel))
        assert keras.Model(symbol, copy(symbol)).layers[-1] is copy
        other = Nest()
        other.plain = keras.Sequential([layers.Dense(2)], name="model")
        with pytest.raises(TypeError, match="model 'model' is inside"):
            keras_layers.deep_copy(other)
    kernel, dense = nest.plain.kernel, layers.Dense(2, use_bias=False)
    with contract("_copy_variable", "Find which attributes of Variable hold its value."):
        kernel.overwrite_with_gradient = True
        copied = keras_layers._copy_variable(kernel)
        np.testing.assert_array_equal(numpy(copied), numpy(kernel))
        assert copied.path == kernel.path
        assert copied.overwrite_with_gradient
        copied.assign(0 * copied)
        assert np.any(numpy(kernel))
    with contract("_copy_attributes", "Find what Layer.__new__ sets, and what its tracker keeps."):
        other = layers.Dense.__new__(layers.Dense)
        memo = {id(keras_internals.backend): keras_internals.backend}
        keras_layers._copy_attributes(dense, other, memo)
        other.build((None, 3))
        assert (other.units, other.use_bias, len(other.weights)) == (2, False, 1)
        assert not dense.weights


def test_own_trainable_variables():
    wrapper = layers.TimeDistributed(layers.Dense(3))
    weight = wrapper.add_weight(shape=(2,))
    wrapper.build((None, 4, 2))
    with contract("own_trainable_variables", "Find where Layer.add_weight keeps its variables."):
        assert keras_internals.own_trainable_variables(wrapper) == [weight]
        assert wrapper.layer.kernel in keras_internals.own_trainable_variables(wrapper.layer)


def test_own_metrics():
    model = keras.Sequential([layers.Dense(1)])
    model.extra = keras.metrics.Mean(name="extra")
    with contract("own_metrics", "Find the list of metrics that a layer has as attributes."):
        assert keras_internals.own_metrics(model) == [model.extra]


def test_seed_generators():
    dropout = layers.Dropout(0.5)
    with contract("seed_generators", "Find where Layer keeps the SeedGenerators it tracks."):
        assert keras_internals.seed_generators(dropout) == [dropout.seed_generator]
        model = keras.Sequential([keras.Input((3,)), dropout])
        assert keras_internals.seed_generators(model) == []


@pytest.mark.skipif(ON_JAX, reason="the tables are TensorFlow's")
def test_copy_vocabulary():
    layer = keras.layers.IntegerLookup()
    layer.adapt(np.array([[7], [8], [8]]))
    copied, empty = (keras.layers.IntegerLookup() for _ in range(2))
    with contract("copy_vocabulary", "Find how a lookup layer gives and takes its vocabulary."):
        keras_internals.copy_vocabulary(empty, copied)  # as before a file is loaded
        keras_internals.copy_vocabulary(layer, copied)
        assert copied.get_vocabulary() == layer.get_vocabulary() == [-1, 8, 7]


@pytest.mark.skipif(ON_JAX, reason="the tables are TensorFlow's")
def test_lookup_tables():
    model = keras.Sequential(
        [keras.Input((1,), dtype="string"), layers.StringLookup(vocabulary=["a", "b"])]
    )
    with contract("lookup_tables", "Find where StringLookup keeps its TensorFlow table."):
        (table,) = keras_internals.lookup_tables(model)
        assert int(table.size()) == 2


def test_readable(monkeypatch):
    inner = keras.saving.serialize_keras_object(layers.Dense(2))
    config = {"name": "outer", "mask": None, "layers": [inner, {"shape": (2, None)}]}
    advice = "Find which arguments that Keras writes as None this version does not take."
    with contract("readable", advice):
        kept = keras_internals.readable(config)
        assert kept["layers"][1] == {"shape": (2, None)}
        assert kept["mask"] is None
        assert layers.deserialize(kept["layers"][0]).units == 2
        later = {"input_axes": None, "output_axes": None, "quantization_config": None}
        inner["config"] |= {"quantization_config": None}
        inner["config"]["kernel_initializer"]["config"] |= {"input_axes": None, "output_axes": None}
        assert layers.deserialize(keras_internals.readable(config)["layers"][0]).units == 2
        monkeypatch.setattr(keras_internals, "_UNKNOWN", set(later))
        assert keras_internals.readable([{**later, "name": None}]) == [{"name": None}]
        assert keras_internals.readable({"input_axes": [1]}) == {"input_axes": [1]}


def test_output_shape():
    einsum, dense = layers.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d"), layers.Dense(3)
    advice = "See how EinsumDense.build finds the shape of its outputs."
    with contract("output_shape", advice):
        for layer in (einsum, dense):
            for _ in range(2):
                assert keras_internals.output_shape(layer, (None, 5, 4)) == (None, 5, 3)
                layer(np.ones((2, 5, 4), "float32"))


def test_has_value():
    variable = keras.Variable(1.0)
    advice = "See what JAXTrainer does to variables before a step, in `_purge_model_variables`."
    with contract("has_value", advice):
        assert keras_internals.has_value(variable)
        if ON_JAX:
            variable._value = None
            assert not keras_internals.has_value(variable)
            with keras.StatelessScope(state_mapping=[(variable, ops.ones(()))]):
                assert keras_internals.has_value(variable)


def test_values_kept():
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    advice = (
        "The JAX trainer takes the arrays out of variables while it runs (`_purge_model_variables` "
        "in keras/src/backend/jax/trainer.py); do what undoes that."
    )
    with contract("values_kept", advice):
        with contextlib.suppress(RuntimeError), keras_internals.values_kept(variables):
            variables[1].assign([4.0])
            if ON_JAX:
                variables[0]._value = None
            raise RuntimeError
        np.testing.assert_array_equal(numpy(variables[0]), [1, 2])
        np.testing.assert_array_equal(numpy(variables[1]), [4])


def test_values_in_place():
    inner, outer = keras.Variable(1.0), keras.Variable(2.0)
    advice = (
        "A StatelessScope keeps its values in `state_mapping`, and the scope around it in "
        "`original_scope` once it is entered (keras/src/backend/common/stateless_scope.py)."
    )
    with contract("values_in_place", advice):
        with keras.StatelessScope(state_mapping=[(outer, keras.ops.convert_to_tensor(20.0))]):
            with keras_internals.values_in_place([(inner, keras.ops.convert_to_tensor(10.0))]):
                assert (float(inner.value), float(outer.value)) == (10, 20)
            assert (float(inner.value), float(outer.value)) == (1, 20)
        with keras_internals.values_in_place([(inner, keras.ops.convert_to_tensor(10.0))]):
            assert (float(inner.value), float(outer.value)) == (10, 2)
        assert float(inner.value) == 1


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("mixed_bfloat16", "float32"), ("float64", "float64"), ("bfloat16", "bfloat16")],
)
def test_uncast(policy, dtype):
    layer = layers.Dense(2, dtype=policy)
    layer.build((None, 3))
    seen = []
    layer.activation = lambda x: seen.append(keras_internals.uncast(layer.kernel).dtype) or x
    with contract("uncast", "Find how Variable.value casts (keras/src/backend/common/variables)."):
        layer(np.ones((1, 3), "float32"))
        assert keras.backend.standardize_dtype(seen[0]) == dtype


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.Dense(2), (3,)),
        (layers.EinsumDense("abc,cd->abd", (2, 3), bias_axes="d"), (2, 2)),
        (layers.Conv1D(2, 2, padding="causal"), (3, 2)),
        (layers.Conv2D(2, 2), (3, 3, 2)),
        (layers.Conv3D(2, 2), (2, 2, 2, 1)),
        (layers.DepthwiseConv1D(2), (3, 2)),
        (layers.DepthwiseConv2D(2), (3, 3, 2)),
        (layers.SeparableConv1D(2, 2), (3, 2)),
        (layers.SeparableConv2D(2, 2), (3, 3, 2)),
        (layers.Conv1DTranspose(2, 2), (3, 2)),
        (layers.Conv2DTranspose(2, 2), (3, 3, 2)),
        (layers.Conv3DTranspose(1, 2), (2, 2, 2, 1)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_call_with(layer, shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *shape)).astype("float32")
    layer.activation = keras.activations.tanh
    before = numpy(layer(x))
    weights = layer.get_weights()
    values = [rng.normal(0, 0.3, w.shape).astype("float32") for w in weights]
    layer.set_weights(values)
    expected = np.arctanh(numpy(layer(x)))
    layer.set_weights(weights)
    own = dict(zip([weight.name for weight in layer.weights], values, strict=True))
    bias = own.pop("bias")
    advice = (
        "Find which attributes of the layer its `call` reads: kernels (`kernel` or `_kernel`, "
        "`depthwise_kernel`, `pointwise_kernel`), `bias`, `use_bias` and `activation`."
    )
    with contract("call_with", advice):
        got = keras_internals.call_with(layer, x, **own, bias=bias, activation=None)
        np.testing.assert_allclose(numpy(got), expected, rtol=2e-2, atol=1e-4)
        alone = keras_internals.call_with(
            layer, x, **own, bias=None, use_bias=False, activation=None
        )
        shift = numpy(got) - numpy(alone)
        np.testing.assert_allclose(shift, np.broadcast_to(bias, shift.shape), atol=1e-4)
        np.testing.assert_array_equal(numpy(layer(x)), before)


def test_call_with_takes_options_and_the_type_of_the_inputs():
    class Product(layers.Layer):
        def build(self, shape):
            self.factor, self.shift = self.add_weight(shape[1:]), self.add_weight(shape[1:])

        def call(self, inputs, sign=1):
            return sign * inputs * (self.factor + self.shift)

    layer = Product(dtype="mixed_bfloat16")
    layer.build((2, 3))
    with contract("call_with", "Find how Layer.__call__ casts weights on access: AutocastScope."):
        got = keras_internals.call_with(
            layer, ops.ones((2, 3)), options={"sign": -1}, factor=np.full(3, 0.1, "float32")
        )
        assert keras.backend.standardize_dtype(got.dtype) == "float32"
        expected = -(0.1 + numpy(layer.shift))
        np.testing.assert_allclose(numpy(got), np.tile(expected, (2, 1)), rtol=1e-6)


def test_mask_of_and_set_mask():
    x = layers.Masking()(np.array([[[0.0], [1.0]]], "float32"))
    with contract("mask_of", "Find how Layer.__call__ reads the mask of its input."):
        np.testing.assert_array_equal(numpy(keras_internals.mask_of(x)), [[False, True]])
        assert keras_internals.mask_of(ops.ones((1, 2, 1))) is None
    with contract("set_mask", "Find how Layer.__call__ hands a mask on to its output."):
        x = ops.convert_to_tensor([[[1.0], [3.0]]])
        keras_internals.set_mask(x, ops.convert_to_tensor([[True, False]]))
        np.testing.assert_allclose(numpy(layers.GlobalAveragePooling1D()(x)), [[1.0]])


# -------------------------------------------------------------------------------------- optimizers


def test_decays():
    kernel, bias = keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    with contract("decays", "Find how Optimizer._apply_weight_decay leaves variables out."):
        assert keras_internals.decays(optimizer, bias)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        assert keras_internals.decays(optimizer, kernel)
        assert not keras_internals.decays(optimizer, bias)
        assert not keras_internals.decays(keras.optimizers.Adam(), kernel)


def test_index_in():
    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    optimizer = keras.optimizers.SGD()
    optimizer.build(variables)
    with contract("index_in", "Find how Optimizer.update_step finds the momentum of a variable."):
        assert [keras_internals.index_in(optimizer, v) for v in variables] == [0, 1]


def test_learning_rate_of():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    advice = "Find the schedule: `optimizer.learning_rate` only gives its present value."
    with contract("learning_rate_of", advice):
        assert keras_internals.learning_rate_of(keras.optimizers.SGD(schedule)) is schedule
        rate = keras_internals.learning_rate_of(keras.optimizers.SGD(0.25))
        assert float(ops.convert_to_numpy(rate)) == 0.25


class Halves(keras_optimizers.GroupedOptimizer):
    def part_of(self, variable):
        return self.part(int(variable.shape[0] == 2))


def test_has_many_parts():
    one, other = keras.optimizers.SGD(), keras.optimizers.SGD()
    with contract("has_many_parts", "Find Keras's optimizers that pass the weights on to others."):
        assert not keras_optimizers.has_many_parts(one)
        assert keras_optimizers.has_many_parts(Halves([one, other]))
        if hasattr(keras.optimizers, "MultiOptimizer"):  # since Keras 3.15
            groups = keras.optimizers.OptimizerMap(one)
            assert keras_optimizers.has_many_parts(keras.optimizers.MultiOptimizer(groups))


@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.5, "momentum": 0.9},
        {"global_clipnorm": 0.5, "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "loss_scale_factor": 4.0, "weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3, "clipnorm": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_grouped_optimizer(options):
    """With parts that are alike it does what one of them does for all weights."""
    generator = np.random.default_rng(0)
    steps = [[generator.normal(size=n).astype("float32") for n in (2, 3, 2)] for _ in range(6)]

    def run(optimizer):
        weights = [keras.Variable(np.ones(n, "float32")) for n in (2, 3, 2)]
        optimizer.build(weights)
        for gradients in steps:
            optimizer.apply([ops.convert_to_tensor(x) for x in gradients], weights)
        before = [numpy(w.value) for w in weights]
        optimizer.finalize_variable_values(weights)
        return [*before, *(numpy(w.value) for w in weights)]

    with contract(
        "GroupedOptimizer",
        "Find what Optimizer.apply calls for weight decay and for the update, and where it keeps "
        "averages and sums of gradients (keras/src/optimizers/base_optimizer.py).",
    ):
        parts = [keras.optimizers.SGD(0.1, **options) for _ in range(2)]
        one, grouped = keras.optimizers.SGD(0.1, **options), Halves(parts)
        for expected, found in zip(run(one), run(grouped), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert [int(part.iterations) for part in parts] == [int(one.iterations)] * 2
        assert float(grouped.scale_loss(1.0)) == options.get("loss_scale_factor", 1.0)


# ------------------------------------------------------------------------------------------ graphs


class Own(keras.Model):
    def call(self, inputs):
        return inputs


class Kept(keras.Model):
    def train_step(self, *args):
        raise NotImplementedError


def test_is_functional():
    class Subclass(keras.Model):
        pass

    x = keras.Input((3,))
    y = layers.Identity()(x)
    with contract("is_functional", "Find the class that Keras gives a Model(inputs, outputs)."):
        assert keras_internals.is_functional(keras.Model(x, y))
        assert keras_internals.is_functional(Kept(x, y))
        assert keras_internals.is_functional(Own(x, y))
        assert not keras_internals.is_functional(Subclass())
        assert not keras_internals.is_functional(layers.Dense(1))


def test_is_plain_graph():
    class Own(keras.Model):
        pass

    x = keras.Input((3,))
    y = layers.Dense(2)(x)
    with contract("is_plain_graph", "Find the class that Keras gives a Model(inputs, outputs)."):
        plain = [keras.Model(x, y), keras.Sequential([layers.Dense(2)]), Own(x, y), layers.Dense(2)]
        assert [keras_internals.is_plain_graph(z) for z in plain] == [True, True, False, False]


def test_has_plain_call():
    class OwnDunder(keras.Sequential):
        def __call__(self, inputs):
            return 2 * super().__call__(inputs)

    x = keras.Input((3,))
    y = layers.Identity()(x)
    advice = "Say when the class of a model overrides `call` or `__call__` of Keras's own."
    with contract("has_plain_call", advice):
        for model in (keras.Model(x, y), Kept(x, y), keras.Sequential()):
            assert keras_internals.has_plain_call(model)
        for model in (Own(x, y), OwnDunder()):
            assert not keras_internals.has_plain_call(model)
        assert keras_internals.has_plain_call(Own(x, y), Own)


def test_functional_behind():
    model = keras.Sequential([layers.Dense(2)])
    with contract("functional_behind", "Find the Functional model that Sequential.build makes."):
        assert keras_internals.functional_behind(model) is None
        model.build((None, 3))
        graph = keras_internals.functional_behind(model)
        assert keras_internals.is_functional(graph)
        assert model.layers[0] in graph.layers


def test_nodes_in_order_and_fill_in():
    x, dense = keras.Input((3,)), layers.Dense(3)
    y = layers.Add()([dense(dense(x)), x])
    model = keras.Model(x, y)
    advice = "See how Function._run_through_graph goes through the nodes of a model."
    with contract("nodes_in_order", advice):
        nodes = list(keras_internals.nodes_in_order(model))
        assert [node.operation for node in nodes] == [dense, dense, model.layers[-1]]
        assert nodes[0].input_tensors[0] is model.inputs[0]
        assert nodes[1].input_tensors[0] is nodes[0].outputs[0]
        assert len(nodes[0].arguments.args) == 1
        assert not nodes[0].arguments.kwargs
        values = {id(tensor): k for k, tensor in enumerate(nodes[2].input_tensors)}
        args, kwargs = nodes[2].arguments.fill_in(values)
        assert (tuple(args), kwargs) == (([0, 1],), {})


def test_graph_inputs():
    a, b = keras.Input((3,), name="a"), keras.Input((1,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Concatenate()([a, b]))
    given = {"b": np.ones((2,), "float32"), "a": np.zeros((2, 3), "float32")}
    with contract("graph_inputs", "See what Functional does to its inputs before it runs."):
        shapes = [tuple(x.shape) for x in keras_internals.graph_inputs(model, given)]
        assert shapes == [tuple([2, *x.shape[1:]]) for x in model.inputs]
    with pytest.raises(ValueError):  # noqa: PT011
        keras_internals.graph_inputs(model, {"a": np.zeros((2, 5), "float32"), "b": given["b"]})


def test_origin():
    x, dense = keras.Input((3,), name="first"), layers.Dense(3)
    y = dense(dense(x))
    with contract("origin", "Find which layer, and which of its calls, made a symbolic tensor."):
        operation, node = keras_internals.origin(y)
        assert operation is dense
        assert keras_internals.origin(node.input_tensors[0])[1].input_tensors[0] is x
        assert keras_internals.origin(x)[0].name == "first"


# ------------------------------------------------------------------------------------- one place


def test_bookkeeping():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    with contract("bookkeeping", "Find the attributes that `compile` and `fit` add to a model."):
        assert set(vars(model)) <= keras_internals.bookkeeping()
        own = set(vars(model.layers[0])) - keras_internals.bookkeeping()
        assert {"units", "activation"} <= own


@pytest.mark.once
def test_compile_arguments():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with contract("compile_arguments", "Find where Trainer.compile keeps its arguments."):
        assert keras_internals.compile_arguments(model) == {}
        model.compile("sgd", "mse", loss_weights=[2.0])
        assert keras_internals.compile_arguments(model) == {"loss": "mse", "loss_weights": [2.0]}


@pytest.mark.once
def test_graph_of():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    graph = keras.Model(model.inputs, model.outputs)
    with contract("graph_of", "Find the Functional model that Sequential.build makes."):
        assert keras_internals.graph_of(graph) is graph
        assert keras_internals.graph_of(model).inputs == model.inputs
        assert keras_internals.graph_of(model.layers[0]) is None


@pytest.mark.once
def test_chosen_name():
    inputs = keras.Input((2,), name="table")
    outputs = [layers.Dense(1)(inputs), layers.LayerNormalization(name="last")(inputs)]
    with contract("chosen_name", "Find how Keras names a layer that the user has not named."):
        names = [keras_internals.chosen_name(x) for x in (inputs, *outputs, keras.Input((1,)))]
        assert names == ["table", None, "last", None]


@pytest.mark.once
@pytest.mark.skipif(ON_JAX, reason="the converter is TensorFlow's")
def test_tf2onnx():
    pytest.importorskip("tf2onnx")
    with contract("tf2onnx", "Find the repairs by which Keras exports to ONNX under NumPy 2."):
        assert callable(keras_internals.tf2onnx().convert.from_graph_def)


def test_every_function_has_its_contract():
    text = Path(__file__).read_text()
    modules = (keras_internals, keras_layers, keras_optimizers)
    functions = [x for module in modules for x in vars(module).values() if inspect.isfunction(x)]
    own = [module.__name__ for module in modules]
    names = [x.__name__ for x in functions if x.__module__ in own]
    names += ["output_losses", "output_spec"]
    getters = (operator.attrgetter, operator.methodcaller)
    names += [name for name, x in vars(keras_internals).items() if isinstance(x, getters)]
    assert len(names) > 25
    for name in (*names, "mask_of", "set_mask"):
        assert f'contract(\n        "{name}"' in text or f'contract("{name}"' in text, name


def test_the_tested_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"keras{keras_internals.TESTED_VERSIONS}" in project["dependencies"]
    low, high = re.findall(r"[\d.]+", keras_internals.TESTED_VERSIONS)
    version = tuple(map(int, keras.__version__.split(".")[:2]))
    assert tuple(map(int, low.split("."))) <= version < tuple(map(int, high.split(".")))


def parse(path):
    return list(ast.walk(ast.parse(path.read_text())))


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(nodes):
    """The private names that a file defines: functions, attributes, variables, fields."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


ACCESSORS = {"getattr": 2, "hasattr": 2, "attrgetter": 1, "methodcaller": 1}
"""Which argument of each is a name."""


def used(nodes):
    """The private names that a file reads from objects, with the line and the object."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno, ast.unparse(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSORS:
            *owner, name = node.args[: ACCESSORS[ast.unparse(node.func)]]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield name.value, node.lineno, ast.unparse(owner[0]) if owner else ""


OF_OTHERS = {
    ("_exit", "os"),
    ("_experimental_calibrate_only", "converter"),
    ("_func_map", "back_to_back_optimizer"),
    ("_mapie_classifier", "made"),
}
"""Private names of Python, of two converters, and of a library to compare with.

Tests of exported files fail when those of the converters change.
"""

OF_NAMED_TUPLES = {"_asdict", "_replace"}
"""Methods that Python documents."""


def violations(files):
    """Uses of Keras's private names outside of the one module for them."""
    keras_names = {name for module in MODULES for name, *_ in used(parse(module))}
    trees = {path: parse(path) for path in files if path not in MODULES}
    own = {name for nodes in trees.values() for name in defined(nodes)}
    for path, nodes in trees.items():
        place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        if "keras.src" in path.read_text():
            yield f"{place}: keras.src"
        for name, line, owner in used(nodes):
            foreign = name not in own or (name in keras_names and owner not in ("self", "super()"))
            if foreign and (name, owner) not in OF_OTHERS and name not in OF_NAMED_TUPLES:
                yield f"{place}:{line}: {owner}.{name}"


def test_no_other_file_uses_a_private_name_of_keras(tmp_path):
    files = [path for folder in ("tfp_ibnn", "scripts") for path in (ROOT / folder).rglob("*.py")]
    found = list(violations(files))
    assert not found, (
        f"Private names of Keras outside of tfp_ibnn/_core/keras_*.py: {found}. Give each "
        "a function there, with a contract test here, or use a public name."
    )
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from keras.src import backend\n"
        "class Mine:\n    def __init__(self): self._value = self._functional = 1\n"
        "def f(x, layer): return x._value, layer._flatten_layers(), getattr(layer, '_functional')\n"
        "def g(layer): return layer._call_context_args\n"
        "h = attrgetter('_seed_generators')\n"
    )
    names = {message.rpartition(".")[2] for message in violations([bad])}
    others = {"_flatten_layers", "_functional", "_call_context_args", "_seed_generators"}
    assert names == {"src", "_value", *others}


def test_the_module_imports_nothing_of_ours():
    assert "import tfp_ibnn" not in MODULE.read_text()
    assert "from tfp_ibnn" not in MODULE.read_text()

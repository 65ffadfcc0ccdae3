"""The noise of a pass: which draws reach which layer, and what is left behind."""

import gc
import threading

import keras
import numpy as np
import pytest
from keras import ops
from scipy.stats import norm

import tfp_ibnn as ibnn
from tests.flows.tools import close, numpy
from tfp_ibnn import noise
from tfp_ibnn.noise import forward_pass

ON_JAX = keras.backend.backend() == "jax"
JIT = ON_JAX  # XLA compiles slowly, and JAX cannot do without


def bare(channels=3, posterior=None, **kwargs):
    """A layer whose output for ones is z; by default z is the standard normal noise itself."""
    posterior = posterior or ibnn.NormalAffine(prior_loc=0.0, initial_scale=1.0)
    kwargs.setdefault("train_size", 10)
    layer = ibnn.Stochastic(keras.layers.Identity(), posterior, **kwargs)
    layer.build((None, channels))
    return layer


def z_of(layer, count, **options):
    """The z of each example in a pass with the given options."""
    with noise.scope(**options):
        return numpy(layer(ops.ones((count, layer.posterior.channels))))


def normals(count, shape=(1,), generator_seed=0, **options):
    generator = keras.random.SeedGenerator(generator_seed)
    return numpy(noise.Pass(**options).source.normal(count, shape, "float64", generator))


class Scoped(keras.Model):
    """A model that opens a pass in its call."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def call(self, inputs):
        with noise.scope(**self.options):
            return self.inner(inputs)


def distinct_rows(z):
    return len(np.unique(z.reshape(len(z), -1), axis=0))


# ----------------------------------------------------------------------------------------- groups


def test_every_example_has_its_own_z():
    layer = bare()
    assert distinct_rows(numpy(layer(ops.ones((6, 3))))) == 6
    assert distinct_rows(z_of(layer, 6)) == 6


def test_one_group_is_one_z_for_the_batch():
    z = z_of(bare(), 6, groups=1)
    assert distinct_rows(z) == 1
    assert len(np.unique(z)) == 3


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_groups_are_consecutive_blocks(groups):
    z = z_of(bare(), 6, groups=groups)
    assert distinct_rows(z) == groups
    np.testing.assert_array_equal(z, np.repeat(z[:: 6 // groups], 6 // groups, axis=0))


@pytest.mark.parametrize("kind", ["channel", "position"])
def test_groups_of_images(kind):
    layer = ibnn.Stochastic(keras.layers.Identity(), ibnn.NormalAffine(), 10, noise=kind)
    with noise.scope(groups=2):
        z = numpy(layer(ops.ones((4, 2, 3, 5))))
    np.testing.assert_array_equal(z[0], z[1])
    np.testing.assert_array_equal(z[2], z[3])
    assert np.all(z[0] != z[2])
    places = z[0].reshape(6, 5)
    assert distinct_rows(places) == (1 if kind == "channel" else 6)


def test_groups_must_divide_the_batch():
    with pytest.raises(ValueError, match="4 draws.*batch of 6"):
        z_of(bare(), 6, groups=4)


@pytest.mark.parametrize(
    ("argument", "value"), [("groups", 0), ("groups", 1.5), ("groups", "2"), ("sampling", "sobol")]
)
def test_bad_options_are_refused_by_name_and_value(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}`") as caught:
        noise.Pass(**{argument: value})
    assert repr(value) in str(caught.value)


# ---------------------------------------------------------------------------------------- sampling


@pytest.mark.once
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("count", [1, 5, 6])
def test_antithetic_draws_mirror_each_other_in_pairs(count, seed):
    z = z_of(bare(), count, groups=count, sampling="antithetic", seed=seed)
    assert z.shape == (count, 3)
    np.testing.assert_allclose(z[1::2], -z[: count - count % 2 : 2], rtol=1e-5)
    assert distinct_rows(np.round(np.abs(z), 4)) == (count + 1) // 2


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("sampling", noise.SAMPLINGS)
def test_draws_are_standard_normal(sampling, seed):
    z = normals(4096, (3,), sampling=sampling, seed=seed)
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=0.06)
    np.testing.assert_allclose(z.std(axis=0), 1, atol=0.06)
    np.testing.assert_allclose(np.mean(z**4, axis=0), 3, atol=0.5)
    close(np.corrcoef(z.T), np.eye(3), 0.06)


@pytest.mark.parametrize("seed", [None, 3])
def test_qmc_has_uniform_marginals(seed):
    z = normals(1024, (4,), sampling="qmc", seed=seed)
    for column in norm.cdf(z).T:
        counts = np.histogram(column, 64, (0, 1))[0]
        assert np.all(counts == 16)


@pytest.mark.once
@pytest.mark.parametrize("fixed", [False, True])
def test_qmc_beats_iid_on_a_smooth_integrand(fixed):
    def error(sampling, seed):
        seeds = {"seed": seed} if fixed else {"generator_seed": seed}
        z = normals(1024, (3,), sampling=sampling, **seeds)
        return np.exp(0.3 * z.sum(axis=1)).mean() - np.exp(0.5 * 3 * 0.09)

    size = {s: np.sqrt(np.mean([error(s, k) ** 2 for k in range(12)])) for s in ("iid", "qmc")}
    assert size["qmc"] < size["iid"] / 3


def test_qmc_draws_are_fresh_and_seeded_ones_are_not():
    assert np.all(normals(8, (2,), 1, sampling="qmc") != normals(8, (2,), 2, sampling="qmc"))
    repeated = [normals(8, (2,), k, sampling="qmc", seed=5) for k in (1, 2)]
    np.testing.assert_array_equal(*repeated)


def boxes_hit(first, second, cells=32):
    places = [np.floor(norm.cdf(z) * cells).astype(int) for z in (first, second)]
    return len(set(zip(*places, strict=True)))


def test_qmc_is_joint_over_layers(float64):
    layers = [bare(1), bare(1)]
    x = ops.ones((1024, 1))
    with noise.scope(groups=1024, sampling="qmc", seed=3):
        first, second = (numpy(layer(x))[:, 0] for layer in layers)
    # The first two Sobol dimensions put one point into each box of 1/32 by 1/32.
    assert boxes_hit(first, second) == 1024
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    with noise.scope(groups=1024, sampling="qmc"):
        first, second = (numpy(layer(x))[:, 0] for layer in layers)
    assert boxes_hit(first, second) == 1024
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


def test_unknown_sizes_are_refused_by_quasi_random_draws():
    here, generator = noise.Pass(sampling="qmc"), keras.random.SeedGenerator(0)
    with pytest.raises(ValueError, match="sizes that are known ahead"):
        here.source.normal(2, (ops.convert_to_tensor(3), 2), "float32", generator)


def test_seeded_draws_of_unknown_size():
    shapes = [(3, 2), (ops.convert_to_tensor(3), 2)]
    fixed, unknown = (normals(4, shape, seed=1) for shape in shapes)
    np.testing.assert_array_equal(fixed, unknown)


# ------------------------------------------------------------------------------------------- seeds


def test_seeded_noise_is_the_same_for_ever(float64):
    # To 1e-6, since Keras rounds the constants of the affine map.
    z = z_of(bare(2), 2, groups=2, seed=7)
    close(z, [[0.57815012, 0.12270763], [0.32931138, -0.99029368]], 1e-6)
    z = z_of(bare(2), 2, groups=2, seed=7, sampling="qmc")
    close(z, [[-1.8098978, -2.54859097], [1.02247371, 1.42327888]], 1e-6)


@pytest.mark.parametrize("sampling", noise.SAMPLINGS)
def test_a_draw_does_not_depend_on_its_company(sampling):
    """Sample 5 is the same among all, by itself, and in a stream of its own."""
    everything = normals(8, (3,), sampling=sampling, seed=1)
    for sample in ([5], [7, 5, 2]):
        part = normals(
            len(sample), (3,), sampling=sampling, seed=1, sample=ops.convert_to_tensor(sample)
        )
        np.testing.assert_allclose(part, everything[sample], atol=1e-12)
    stream = ops.convert_to_tensor([0, 1])
    both = ops.convert_to_tensor([5, 5])
    z = normals(2, (3,), sampling=sampling, seed=1, sample=both, stream=stream)
    np.testing.assert_allclose(z[0], everything[5], atol=1e-12)
    assert np.all(z[1] != z[0])


def test_a_key_may_be_a_tensor():
    key = ops.convert_to_tensor([3, 4], dtype="int32")
    assert np.all(normals(4, seed=key) == normals(4, seed=key))
    assert np.all(normals(4, seed=key) != normals(4, seed=key + 1))


def test_requests_of_a_pass_are_independent():
    here, generator = noise.Pass(seed=1), keras.random.SeedGenerator(0)
    first, second = (numpy(here.source.normal(512, (1,), "float64", generator)) for _ in range(2))
    assert abs(np.corrcoef(first[:, 0], second[:, 0])[0, 1]) < 0.15
    skipped = normals(512, seed=1, skip=1)
    np.testing.assert_array_equal(skipped, second)


@pytest.mark.parametrize(("sampling", "steps"), [("iid", 1), ("antithetic", 2), ("qmc", 2)])
def test_seeded_passes_repeat_eager_and_compiled(sampling, steps):
    inner = keras.Sequential([keras.Input((3,)), bare(), bare()])
    model = Scoped(inner, groups=4, seed=3, sampling=sampling)
    x = np.ones((32, 3), "float32")
    model.compile(steps_per_execution=steps, jit_compile=JIT)
    first = model.predict(x, batch_size=8, verbose=0)
    assert distinct_rows(np.round(first, 4)) == (2 if sampling == "antithetic" else 4)
    np.testing.assert_array_equal(first, np.tile(first[:8], (4, 1)))
    np.testing.assert_array_equal(model.predict(x, batch_size=8, verbose=0), first)
    np.testing.assert_allclose(numpy(model(x[:8])), first[:8], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"sampling": "qmc", "groups": 2}])
def test_unseeded_passes_differ(options):
    model = Scoped(keras.Sequential([keras.Input((3,)), bare()]), **options)
    model.compile(steps_per_execution=2, jit_compile=JIT)
    x = np.ones((16, 3), "float32")
    first, second = (model.predict(x, batch_size=4, verbose=0) for _ in range(2))
    assert np.all(first != second)
    batches = first.reshape(4, 4, 3)
    assert distinct_rows(batches) == 4
    assert np.all(numpy(model(x[:4])) != numpy(model(x[:4])))


# ------------------------------------------------------------------------------------ off and given


@pytest.mark.parametrize("posterior", [ibnn.NormalAffine(), ibnn.NormalPlanar1d()])
def test_off_uses_the_mean_and_adds_no_kl(posterior):
    layer = bare(posterior=posterior)
    layer.posterior.affine.shift.assign([1.0, 2.0, 3.0])
    with noise.scope(off=True) as here:
        z = numpy(layer(ops.ones((4, 3))))
        assert float(here.kl) == 0
    np.testing.assert_allclose(z, np.tile([1.0, 2.0, 3.0], (4, 1)), rtol=1e-6)
    assert layer.losses == []


def test_given_draws_are_used():
    given, other = bare(), bare()
    z = np.arange(6, dtype="float32").reshape(2, 3)
    with noise.scope(groups=2, draws={given: ops.convert_to_tensor(z)}):
        found = numpy(given(ops.ones((4, 3))))
        drawn = numpy(other(ops.ones((4, 3))))
    np.testing.assert_array_equal(found, np.repeat(z, 2, axis=0))
    assert given.losses == []
    assert len(other.losses) == 1
    assert distinct_rows(drawn) == 2


# -------------------------------------------------------------------------------------- components


def indexed(shared=True, components=3):
    """A layer whose z is about 100 times its component's index, and each component's offset."""
    posterior = (
        ibnn.MixturePosterior(components, initial_scale=0.01, scale_spread=0.0)
        if shared
        else ibnn.FlowPosterior(components=components, initial_scale=0.5)
    )
    layer = bare(2, posterior)
    loc = 100.0 * np.arange(components)[:, None] * np.ones((1, 2))
    if shared:
        layer.posterior.loc.assign(loc)
    else:
        layer.posterior.base_loc.assign(2 * loc)  # the affine map halves it
    return layer


def index_of(z):
    return np.round(z[..., 0] / 100).astype(int)


@pytest.mark.parametrize(("count", "training"), [(1, True), (8, False)])
def test_components_go_round_from_a_random_start_alike_in_all_layers(count, training):
    layers, starts, x = [indexed(), indexed()], set(), ops.ones((count, 2))
    for _ in range(12):
        with noise.scope():
            first, second = (index_of(numpy(layer(x, training=training))) for layer in layers)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, (np.arange(count) + first[0]) % 3)
        starts.add(int(first[0]))
    assert starts == {0, 1, 2}


def test_components_of_a_seeded_pass_start_at_the_first():
    with noise.scope(groups=8, seed=5):
        z = numpy(indexed()(ops.ones((8, 2))))
    np.testing.assert_array_equal(index_of(z), np.arange(8) % 3)


def test_layers_of_other_component_counts_have_an_index_of_their_own():
    layers = [indexed(components=3), indexed(components=4)]
    with noise.scope():
        found = [index_of(numpy(layer(ops.ones((8, 2)), training=True))) for layer in layers]
    for index, components in zip(found, (3, 4), strict=True):
        np.testing.assert_array_equal(index, (np.arange(8) + index[0]) % components)


@pytest.mark.once
@pytest.mark.parametrize("training", [False, True])
def test_own_components_are_independent(training):
    layers = [indexed(shared=False), indexed(shared=False)]
    with noise.scope():
        first, second = (
            index_of(numpy(layer(ops.ones((900, 2)), training=training)) - 0.5) for layer in layers
        )
    assert np.all(np.bincount(first, minlength=3) > 230)
    assert 200 < np.sum(first == second) < 400
    assert 200 < np.sum(first == np.arange(900) % 3) < 400


@pytest.mark.once
def test_own_components_of_a_seeded_pass_repeat():
    layer = indexed(shared=False)
    found = []
    for _ in range(2):
        with noise.scope(groups=900, seed=5):
            found.append(index_of(numpy(layer(ops.ones((900, 2)))) - 0.5))
    np.testing.assert_array_equal(*found)
    assert np.all(np.bincount(found[0], minlength=3) > 230)


@pytest.mark.once
def test_components_of_streams_go_round_apart():
    sample, stream = (
        ops.convert_to_tensor([0, 1, 2, 0, 1, 2]),
        ops.convert_to_tensor([0] * 3 + [1] * 3),
    )
    with noise.scope(seed=5, sample=sample, stream=stream):
        z = numpy(indexed()(ops.ones((6, 2))))
    np.testing.assert_array_equal(index_of(z), [0, 1, 2, 1, 2, 0])


class Reshaped(keras.Model):
    """Two layers with shared components and a reshape between them; returns both layers' z."""

    def __init__(self, first, then):
        super().__init__()
        self.layers_in_order = [indexed(), indexed()]
        self.shapes = first, then

    def call(self, inputs):
        one, two = self.layers_in_order
        first, then = (ops.reshape(ops.ones_like(inputs), shape) for shape in self.shapes)
        return one(first), two(then)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_an_example_have_its_component(compiled):
    model, x = Reshaped((-1, 3, 2), (-1, 2)), np.ones((8, 3, 2), "float32")
    model.compile()
    first, second = map(index_of, map(numpy, model.predict(x, verbose=0) if compiled else model(x)))
    np.testing.assert_array_equal(second.reshape(8, 3), first)
    np.testing.assert_array_equal(first[:, 0], (np.arange(8) + first[0, 0]) % 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_examples_that_are_merged_cannot_share_a_component(compiled):
    model, x = Reshaped((-1, 2), (-1, 3, 2)), np.ones((8, 3, 2), "float32")
    model.compile()
    # TensorFlow's compiled functions learn the size of a batch only when they run.
    with pytest.raises(Exception, match="but not merge examples|[Rr]eshape"):
        model.predict(x, verbose=0) if compiled else model(x)


def test_component_reaches_every_position():
    layer = ibnn.Stochastic(keras.layers.Identity(), ibnn.MixturePosterior(3), 10, noise="position")
    layer.build((None, 2, 2, 2))
    layer.posterior.loc.assign(100.0 * np.arange(3)[:, None] * np.ones((1, 2)))
    z = numpy(layer(ops.ones((6, 2, 2, 2)), training=True))
    index = index_of(z)
    expected = (np.arange(6) + index[0, 0, 0]) % 3
    np.testing.assert_array_equal(index, np.broadcast_to(expected[:, None, None], (6, 2, 2)))
    assert distinct_rows(z[0].reshape(4, 2)) == 4


# ----------------------------------------------------------------------------- a layer called twice


def flat_model():
    x, layer = keras.Input((3,)), bare(posterior=ibnn.NormalAffine(initial_scale=0.2))
    return keras.Model(x, keras.layers.Concatenate()([layer(x), layer(2 * x)])), [layer]


def nested_model():
    x, layer = keras.Input((3,)), bare(posterior=ibnn.NormalAffine(initial_scale=0.2))
    inner = keras.Sequential([keras.Input((3,)), layer])
    middle = keras.Model(x, inner(x))
    y = keras.Input((3,))
    return keras.Model(y, keras.layers.Concatenate()([middle(y), layer(2 * y)])), [layer]


def twice_the_model():
    x, layer = keras.Input((3,)), bare(posterior=ibnn.NormalAffine(initial_scale=0.2))
    inner = keras.Sequential([keras.Input((3,)), layer])
    return keras.Model(x, keras.layers.Concatenate()([inner(x), inner(2 * x)])), [layer]


def stochastic_model():
    x, layer = keras.Input((3,)), bare(posterior=ibnn.NormalAffine(initial_scale=0.2))
    y = keras.layers.Concatenate()([layer(x), layer(2 * x)])
    return ibnn.StochasticModel(x, y), [layer]


def two_layers():
    x = keras.Input((3,))
    layers = [bare(posterior=ibnn.NormalAffine(initial_scale=0.2 + k)) for k in range(2)]
    y = layers[0](x)
    return keras.Model(x, keras.layers.Concatenate()([layers[1](y), layers[1](2 * y)])), layers


def gaussian_kl(layer):
    s = layer.posterior.initial_scale
    p = layer.posterior.prior_scale
    return 3 * (np.log(p / s) + s**2 / (2 * p**2) - 0.5)


@pytest.mark.parametrize(
    ("make", "run_eagerly"),
    [
        (flat_model, False),
        (stochastic_model, False),
        (two_layers, False),
        (nested_model, True),
        (twice_the_model, True),
        (stochastic_model, True),
    ],
)
def test_a_layer_called_twice_has_one_z_and_one_kl(make, run_eagerly):
    model, layers = make()
    x, y = np.ones((6, 3), "float32"), np.zeros((6, 6), "float32")
    likelihood = 1.25
    expected = likelihood + sum(map(gaussian_kl, layers)) / 10

    def check(out):
        assert distinct_rows(out) == len(out)
        np.testing.assert_allclose(out[:, 3:], 2 * out[:, :3], rtol=1e-6)

    check(numpy(model(x)))
    assert len(model.losses) == len(layers)
    np.testing.assert_allclose(sum(map(float, model.losses)), expected - likelihood, rtol=1e-5)
    model.compile(
        keras.optimizers.SGD(0.0),
        lambda y_true, y_pred: likelihood + 0 * ops.mean(y_pred, axis=-1),
        run_eagerly=run_eagerly,
        jit_compile=JIT and not run_eagerly,
        steps_per_execution=1 if run_eagerly else 2,
    )
    # TensorFlow would trace the first step twice for an optimizer without variables.
    model.optimizer.build(model.trainable_variables)
    check(model.predict(x, batch_size=3, verbose=0))
    evaluated = model.evaluate(x, y, batch_size=3, verbose=0)
    np.testing.assert_allclose(np.ravel(evaluated)[0], expected, rtol=1e-5)
    history = model.fit(x, y, batch_size=3, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    if "kl" in history:
        np.testing.assert_allclose(history["kl"], gaussian_kl(layers[0]), rtol=1e-5)
        np.testing.assert_allclose(history["nll"], likelihood, rtol=1e-5)


def test_two_calls_are_two_passes():
    layer = bare()
    x = ops.ones((4, 3))
    assert np.all(numpy(layer(x)) != numpy(layer(x)))
    model, _ = flat_model()
    assert np.all(numpy(model(x)) != numpy(model(x)))


@pytest.mark.parametrize("make", [flat_model, twice_the_model, stochastic_model])
def test_two_calls_in_a_stateless_scope_are_two_passes(make):
    model, layers = make()
    x = ops.ones((4, 3))
    parts = (model.trainable_variables, model.non_trainable_variables)
    state = [[v.value for v in part] for part in parts]
    kl = gaussian_kl(layers[0]) / 10
    with keras.StatelessScope(collect_losses=True):
        called = [numpy(model(x)) for _ in range(2)]
        np.testing.assert_allclose(sum(map(float, model.losses)), kl, rtol=1e-5)
        first, state[1], losses = model.stateless_call(*state, x, return_losses=True)
        second, *_ = model.stateless_call(*state, x)
    np.testing.assert_allclose(sum(map(float, losses)), kl, rtol=1e-5)
    outputs = [*called, numpy(first), numpy(second)]
    assert distinct_rows(np.concatenate([out[:, :3] for out in outputs[:2]])) == 8
    assert distinct_rows(np.concatenate([out[:, :3] for out in outputs[2:]])) == 8
    for out in outputs:
        np.testing.assert_allclose(out[:, 3:], 2 * out[:, :3], rtol=1e-6)


def test_a_scope_inside_of_a_call_does_not_part_its_pass():
    class Swaps(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = bare()

        def call(self, inputs):
            first = self.layer(inputs)
            with keras.StatelessScope():
                return ops.concatenate([first, self.layer(2 * inputs)], axis=-1)

    model, x = Swaps(), np.ones((4, 3), "float32")
    model.compile(jit_compile=JIT)
    for out in (numpy(model(x)), model.predict(x, verbose=0)):
        np.testing.assert_allclose(out[:, 3:], 2 * out[:, :3], rtol=1e-6)


# ------------------------------------------------------------------------------ no pass to be found


def test_a_method_called_directly_belongs_to_the_pass_around_it_or_is_refused():
    class Direct(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = bare()

        def call(self, inputs):
            return ops.concatenate([self.inner.call(inputs), self.inner.call(2 * inputs)], axis=-1)

    x = ops.ones((4, 3))
    layer = Direct()
    out = numpy(layer(x))
    np.testing.assert_allclose(out[:, 3:], 2 * out[:, :3], rtol=1e-6)
    assert len(layer.losses) == 1
    with noise.scope():
        assert numpy(bare().call(x)).shape == (4, 3)
    for model in (bare(), stochastic_model()[0]):
        with pytest.raises(RuntimeError, match=r"layer\(x\), not layer\.call\(x\)"):
            model.call(x)


def test_a_keras_that_renames_its_call_context_is_refused(monkeypatch):
    """Each call of a layer would be a pass of its own, with a KL of its own."""
    known = keras.src.backend.common.global_state

    class Renamed:
        @staticmethod
        def get_global_attribute(name, *args, **kwargs):
            return known.get_global_attribute(f"new_{name}", *args, **kwargs)

        @staticmethod
        def set_global_attribute(name, value):
            known.set_global_attribute(f"new_{name}", value)

    model, _ = flat_model()
    monkeypatch.setattr(keras.src.layers.layer, "global_state", Renamed)
    with pytest.raises(RuntimeError, match=f"Keras {keras.__version__}: pip install 'keras>="):
        model(ops.ones((4, 3)))


# ---------------------------------------------------------------------------- what is left behind


def left_behind():
    gc.collect()
    return len(forward_pass._passes)


@pytest.mark.slow
def test_nothing_is_left_behind():
    gc.collect()
    model, _ = nested_model()
    x, y = np.ones((6, 3), "float32"), np.zeros((6, 6), "float32")
    model.compile("sgd", "mse", jit_compile=JIT)
    model(x)
    assert left_behind() == 0
    model.predict(x, verbose=0)
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0)
    assert left_behind() == 0
    assert forward_pass._open_pass.get() is None


def test_a_failing_call_leaves_nothing_behind():
    before = len(forward_pass._passes)

    class Fails(keras.layers.Layer):
        def call(self, inputs):
            raise RuntimeError("on purpose")

        def compute_output_shape(self, input_shape):
            return input_shape

    x = keras.Input((3,))
    model = Scoped(keras.Model(x, Fails()(bare()(x))), groups=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(np.ones((2, 3), "float32"))
    assert forward_pass._open_pass.get() is None
    assert distinct_rows(numpy(bare()(ops.ones((4, 3))))) == 4
    assert left_behind() <= before


@pytest.mark.skipif(not ON_JAX, reason="tracers are JAX's")
@pytest.mark.parametrize("make", [flat_model, stochastic_model])
def test_no_tracer_leaks(make):
    import jax

    model, layers = make()
    x = np.ones((4, 3), "float32")
    trainable, rest = model.trainable_variables, model.non_trainable_variables

    def run(weights, state, inputs):
        out, state, losses = model.stateless_call(weights, state, inputs, return_losses=True)
        return out, sum(losses)

    with jax.checking_leaks():
        out, added = jax.jit(run)([v.value for v in trainable], [v.value for v in rest], x)
    assert np.all(np.isfinite(out))
    np.testing.assert_allclose(float(added), gaussian_kl(layers[0]) / 10, rtol=1e-5)


# ------------------------------------------------------------------------------------------ scopes


def test_scopes_nest():
    layer = bare()
    with noise.scope(groups=1) as outer:
        assert noise.current() is outer
        first = z_of(layer, 4, groups=2)
        assert noise.current() is outer
        second = numpy(layer(ops.ones((4, 3))))
    assert distinct_rows(first) == 2
    assert distinct_rows(second) == 1
    with pytest.raises(RuntimeError, match="No forward pass"):
        noise.current()
    assert distinct_rows(numpy(layer(ops.ones((4, 3))))) == 4


def test_an_exception_restores_the_outer_scope():
    with noise.scope(groups=1) as outer:
        with pytest.raises(KeyError), noise.scope(groups=2):
            raise KeyError
        assert noise.current() is outer
    with pytest.raises(KeyError), noise.scope(groups=2):
        raise KeyError
    assert forward_pass._open_pass.get() is None


def test_threads_do_not_see_each_others_scope():
    layer, seen = bare(), {}
    ready, done = threading.Barrier(2), threading.Barrier(2)

    def work(groups):
        with noise.scope(groups=groups) as own:
            ready.wait(30)
            seen[groups] = (noise.current() is own, numpy(layer(ops.ones((4, 3)))))
            done.wait(30)

    layer(ops.ones((4, 3)))
    with noise.scope(groups=4) as outer:
        threads = [threading.Thread(target=work, args=(g,)) for g in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert noise.current() is outer
    for groups, (own, z) in seen.items():
        assert own
        assert distinct_rows(z) == groups
    assert set(seen) == {1, 2}


def test_a_pass_sums_the_kl_of_its_layers():
    layers = [bare(posterior=ibnn.NormalAffine(initial_scale=s)) for s in (0.2, 1.2)]
    with noise.scope() as here:
        for layer in layers:
            layer(ops.ones((4, 3)))
            layer(ops.ones((4, 3)))
        found = float(here.kl)
    np.testing.assert_allclose(found, sum(map(gaussian_kl, layers)), rtol=1e-5)


def test_a_scope_in_a_model_works_compiled():
    model = Scoped(keras.Sequential([keras.Input((3,)), bare()]), groups=2)
    model.compile(steps_per_execution=2, jit_compile=JIT)
    z = model.predict(np.ones((16, 3), "float32"), batch_size=4, verbose=0)
    for batch in z.reshape(4, 4, 3):
        assert distinct_rows(batch) == 2
        np.testing.assert_array_equal(batch[::2], batch[1::2])
    assert distinct_rows(z) == 8


# ----------------------------------------------------------------------- noise that is not portable


def test_noise_that_need_not_be_portable_differs_wherever_it_should():
    def draws(first=0, key=(3, 4)):
        seed = ops.convert_to_tensor(np.array(key, "int32"))
        sample = ops.convert_to_tensor(np.arange(first, first + 50, dtype="int32"))
        here = noise.Pass(seed=seed, sample=sample, portable=False)
        return [numpy(here.source.normal(50, (40,), "float64", None)) for _ in range(3)]

    batches = [draws(first, (3 + batch, 4)) for batch in range(4) for first in (0, 50)]
    values = np.concatenate([z.ravel() for layers in batches for z in layers])
    assert len(np.unique(values)) == values.size
    assert abs(values.mean()) < 5 / values.size**0.5
    assert abs(values.std() - 1) < 5 / (2 * values.size) ** 0.5
    for again, z in zip(draws(), draws(), strict=True):
        np.testing.assert_array_equal(again, z)


@pytest.mark.once
@pytest.mark.parametrize("kind", ["channel", "position"])
@pytest.mark.parametrize("count", [5, 130])
def test_without_noise_z_is_its_mean_in_batches_of_any_size(count, kind):
    flows = [ibnn.flows.Planar(), ibnn.flows.Planar()]
    layer = ibnn.Stochastic(
        keras.layers.Identity(), ibnn.FlowPosterior(flows), train_size=10, noise=kind
    )
    layer.build((None, 4, 3))
    rng = np.random.default_rng(0)
    for weight in layer.posterior.trainable_variables:
        weight.assign(weight + 0.5 * rng.normal(size=weight.shape))
    mean = numpy(layer.posterior.mean())
    with ibnn.noise_off(layer):
        for training in (False, True):
            z = numpy(layer(ops.ones((count, 4, 3)), training=training))
            close(z, np.broadcast_to(mean, z.shape), 1e-6)

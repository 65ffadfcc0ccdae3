"""Keras's loss is `kl_scale` times minus the log-likelihood of an example, and so is the KL's."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers, losses, ops
from scipy.special import log_softmax

import tfp_ibnn as ibnn
from tests.flows.tools import numpy

JIT = keras.backend.backend() == "jax"  # XLA compiles slowly, and JAX cannot do without
ROWS, TRAIN_SIZE = 8, 50
RNG = np.random.default_rng(0)
SPARSE = losses.SparseCategoricalCrossentropy


def network(units, *shape, mask=False):
    first = [layers.Masking()] if mask else []
    return keras.Sequential([keras.Input(shape), *first, layers.Dense(units, name="last")])


def stochastic(det, **options):
    posterior = ibnn.NormalAffine(beta=1, prior_scale=0.5)
    return ibnn.to_stochastic(det, posterior, train_size=TRAIN_SIZE, seed=1, **options)


def inputs(*shape):
    return RNG.normal(size=(ROWS, *shape)).astype("float32")


def ragged(*shape):
    """Inputs whose later steps are padding: 2, 3, 4, 5 of 5 steps are left."""
    x = inputs(*shape)
    for row, steps in enumerate((2, 3, 4, 5) * (ROWS // 4)):
        x[row, steps:] = 0
    return x


def categorical(y, out, keep=True):
    """Minus the log-likelihood of all classes y (N, ...) of each example, summed."""
    each = -np.take_along_axis(log_softmax(out, axis=-1), np.maximum(y, 0)[..., None], -1)[..., 0]
    return np.sum((each * keep).reshape(ROWS, -1), axis=1)


def binary(y, out):
    return np.sum(np.logaddexp(0, out) - y * out, axis=tuple(range(1, out.ndim)))


def gaussian(y, out):
    loc, scale = np.split(out, 2, axis=-1)
    each = 0.5 * ((y - loc) / scale) ** 2 + np.log(scale)
    return np.sum(each.reshape(ROWS, -1), axis=1)


def squares(y, out, scale=0.7):
    return np.sum(((y - out) ** 2 / (2 * scale**2)).reshape(ROWS, -1), axis=1)


def absolutes(y, out, scale=0.7):
    return np.sum((np.abs(y - out) / scale).reshape(ROWS, -1), axis=1)


def pinballs(y, out, scale=0.7):
    """Minus the mean over two levels of log-densities of asymmetric Laplace distributions."""
    below, above = np.split(out, 2, axis=-1)
    each = [np.maximum(t * (y - q), (t - 1) * (y - q)) for t, q in ((0.2, below), (0.9, above))]
    return np.sum((2 * np.mean(each, axis=0) / scale).reshape(ROWS, -1), axis=1)


def with_head(*shape):
    return keras.Sequential([keras.Input(shape), layers.Dense(4), ibnn.layers.GaussianHead()])


CLASS, STEPS, PIXELS = (RNG.integers(0, 3, (ROWS, *s)) for s in ((), (5,), (4, 6)))
YES_OR_NO = RNG.integers(0, 2, (ROWS, 5, 3))
NUMBERS = RNG.normal(size=(ROWS, 5, 2)).astype("float32")
PADDED = ragged(5, 2)
KEPT = np.any(PADDED, axis=-1, keepdims=True)
IGNORED = np.where(RNG.random(PIXELS.shape) < 0.3, -1, PIXELS)
SPREAD = {"noise_scale": 0.7}

# Network, loss, how to compile, inputs, targets, minus their log-likelihood, the factor.
CASES = {
    "class": (network(3, 2), SPARSE(True), {}, inputs(2), CLASS, categorical, 1),
    "one-hot": (
        *(network(3, 2), losses.CategoricalCrossentropy(True), {}, inputs(2)),
        *(np.eye(3)[CLASS], lambda y, out: categorical(y.argmax(-1), out), 1),
    ),
    "step": (network(3, 5, 2), SPARSE(True), {}, inputs(5, 2), STEPS, categorical, 1 / 5),
    "pixel": (network(3, 4, 6, 2), SPARSE(True), {}, inputs(4, 6, 2), PIXELS, categorical, 1 / 24),
    "weighted": (
        *(network(3, 5, 2), SPARSE(True), {"loss_weights": 2.0}, inputs(5, 2)),
        *(STEPS, categorical, 2 / 5),
    ),
    "unknown size": (
        *(network(3, None, None, 2), SPARSE(True), {}, inputs(4, 6, 2)),
        *(PIXELS, categorical, 1 / 24),
    ),
    "masks": (
        *(network(3, 5, 2, mask=True), SPARSE(True), {}, PADDED, STEPS),
        *(lambda y, out: categorical(y, out, np.any(PADDED, axis=-1)), 1 / 3.5),
    ),
    "ignored class": (
        *(network(3, 4, 6, 2), SPARSE(True, ignore_class=-1), {}, inputs(4, 6, 2), IGNORED),
        *(lambda y, out: categorical(y, out, y >= 0), ROWS / np.sum(IGNORED >= 0)),
    ),
    "sum": (
        *(network(3, 5, 2), SPARSE(True, reduction="sum"), {}, inputs(5, 2)),
        *(STEPS, categorical, ROWS),
    ),
    "labels": (
        *(network(3, 5, 2), losses.BinaryCrossentropy(True), {}, inputs(5, 2)),
        *(YES_OR_NO, binary, 1 / 15),
    ),
    "gaussian": (
        *(with_head(5, 2), ibnn.layers.GaussianNLL(), {}, inputs(5, 2)),
        *(NUMBERS, gaussian, 1 / 5),
    ),
    "mse": (network(2, 5, 2), "mse", SPREAD, inputs(5, 2), NUMBERS, squares, 2 * 0.49 / 10),
    "pinball": (
        *(network(4, 5, 2), ibnn.layers.PinballLoss((0.2, 0.9)), SPREAD, inputs(5, 2)),
        *(NUMBERS, pinballs, 0.35 / 10),
    ),
    "pinball masks": (
        *(network(4, 5, 2, mask=True), ibnn.layers.PinballLoss((0.2, 0.9)), SPREAD, PADDED),
        *(NUMBERS, lambda y, out: pinballs(y * KEPT, KEPT * out), 0.35 / 7),
    ),
    "mae": (network(2, 5, 2), "mae", SPREAD, inputs(5, 2), NUMBERS, absolutes, 0.7 / 10),
}
MEASURED = ("unknown size", "masks", "ignored class", "sum", "pinball masks")


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_the_kl_are_in_proportion(name):
    det, loss, options, x, y, nll, factor = CASES[name]
    model = stochastic(det)
    model.compile(keras.optimizers.SGD(0.0), loss, run_eagerly=not JIT, **options)
    assert (model.get_compile_config()["kl_scale"] is None) == (name in MEASURED)
    if name in MEASURED:
        model.fit(x, y, verbose=0)
    found = []
    kernel = ibnn.stochastic_layers(model)[0].layer.kernel
    for change in (0.0, np.random.default_rng(1).normal(size=kernel.shape)):
        kernel.assign(kernel + change)
        with ibnn.noise_off(model):
            out = model.predict(x, verbose=0).astype("float64")
            found.append((model.evaluate(x, y, verbose=0, return_dict=True)["loss"], nll(y, out)))
    (loss_0, nll_0), (loss_1, nll_1) = found
    assert (loss_1 - loss_0) / np.mean(nll_1 - nll_0) == pytest.approx(factor, rel=1e-3)
    model(x)
    (layer,) = ibnn.stochastic_layers(model)
    (added,), kl = layer.losses, numpy(layer.posterior.summary().kl)
    assert float(added) == pytest.approx(factor * np.mean(kl) / TRAIN_SIZE, rel=1e-5)
    assert model.get_compile_config()["kl_scale"] == pytest.approx(factor, rel=1e-6)


# ---------------------------------------------------------------------------------- several outputs


def two_outputs(as_dict):
    x = keras.Input((4, 6, 2))
    one = layers.Dense(3, name="class")(layers.GlobalAveragePooling2D()(x))
    each = layers.Dense(3, name="pixels")(x)
    return keras.Model(x, {"class": one, "pixels": each} if as_dict else [one, each])


@pytest.mark.once
@pytest.mark.parametrize("as_dict", [True, False])
def test_loss_weights_in_proportion_to_the_answers_are_exact(as_dict):
    model = stochastic(two_outputs(as_dict))
    loss = {"class": SPARSE(True), "pixels": SPARSE(True)} if as_dict else [SPARSE(True)] * 2
    wanted = {"class": 1.0, "pixels": 24.0} if as_dict else [1.0, 24.0]
    with pytest.warns(UserWarning, match=re.escape(f"loss_weights={wanted}")):
        model.compile("sgd", loss)
    assert model.get_compile_config()["kl_scale"] == 1  # no likelihood counts more than once
    with warnings.catch_warnings(action="error", category=UserWarning):
        model.compile("sgd", loss, loss_weights=wanted)
        assert model.get_compile_config()["kl_scale"] == pytest.approx(1)
        halves = keras.tree.map_structure(lambda weight: weight / 2, wanted)
        model.compile("sgd", loss, loss_weights=halves)
        assert model.get_compile_config()["kl_scale"] == pytest.approx(0.5)


@pytest.mark.once
def test_an_output_without_a_loss_does_not_count():
    model = stochastic(two_outputs(as_dict=True))
    with warnings.catch_warnings(action="error", category=UserWarning):
        model.compile("sgd", {"pixels": SPARSE(True)})
    assert model.get_compile_config()["kl_scale"] == pytest.approx(1 / 24)


# ------------------------------------------------------------------------- what has to be assumed


@pytest.mark.once
def test_open_noise_warns_once_with_the_remedy():
    model = stochastic(network(2, 3))
    with pytest.warns(UserWarning, match="noise_scale=0.3.*GaussianHead") as caught:
        model.compile("sgd", "mse")
    assert len(caught) == 1
    assert model.get_compile_config()["kl_scale"] == 1  # 2 / 2 numbers


def each_class(y_true, y_pred):
    return losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def all_classes(y_true, y_pred):
    return ops.sum(each_class(y_true, y_pred), axis=-1)


def each_number(y_true, y_pred):
    return ops.square(y_true - y_pred) / 2


@pytest.mark.once
@pytest.mark.parametrize(
    ("loss", "shape", "y", "count"),
    [
        (each_class, (), CLASS, 1),
        (each_class, (5,), STEPS, 5),
        (all_classes, (5,), STEPS, 1),
        (each_number, (), np.ones((ROWS, 3)), 3),
        (lambda y_true, y_pred: ops.mean(each_class(y_true, y_pred)), (), CLASS, 1),
    ],
    ids=["class", "classes", "sum of classes", "numbers", "mean"],
)
def test_the_values_of_a_loss_of_unknown_meaning_are_counted(loss, shape, y, count):
    model = stochastic(network(3, *shape, 2))
    model.compile("sgd", loss, run_eagerly=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(inputs(*shape, 2), y, batch_size=ROWS, verbose=0)
    told = [
        w for w in caught if f"the mean of {count} negative log-likelihoods per" in str(w.message)
    ]
    assert len(told) == (count > 1)
    assert model.get_compile_config()["kl_scale"] == pytest.approx(1 / count)


@pytest.mark.once
def test_a_loss_of_unknown_meaning_can_be_explained():
    with warnings.catch_warnings(action="error", category=UserWarning):
        model = stochastic(network(3, 5, 2))
        model.compile("sgd", each_class, kl_scale=0.1)
        assert ibnn.stochastic_layers(model)[0].kl_scale == 0.1
        model = stochastic(network(1, 2))
        model.compile("sgd", each_number)  # of one number: one value
        assert model.get_compile_config()["kl_scale"] == 1


@pytest.mark.once
def test_noise_scale_is_refused_where_the_loss_knows_the_noise():
    with pytest.raises(ValueError, match="got the loss 'sparse_categorical_crossentropy'"):
        stochastic(network(3, 2)).compile("sgd", SPARSE(True), noise_scale=0.5)


@pytest.mark.once
def test_a_step_on_masks_that_were_not_measured_warns():
    model = stochastic(network(3, 5, 2, mask=True))
    model.compile("sgd", SPARSE(True), run_eagerly=True)
    with pytest.warns(UserWarning, match="kl_scale=1 / number"):
        model.train_on_batch(PADDED, STEPS)


@pytest.mark.once
@pytest.mark.parametrize("kind", ["generator", "dataset", "PyDataset"])
def test_a_batch_is_measured_and_still_trained_on(kind):
    batches = [(PADDED[k : k + 4], STEPS[k : k + 4]) for k in (0, 4)]
    data = {
        "generator": lambda: iter(batches),
        "dataset": lambda: keras_dataset(PADDED, STEPS),
        "PyDataset": lambda: ibnn.data.ShuffledBatches(PADDED, STEPS, 4, seed=0),
    }[kind]()
    model = stochastic(network(3, 5, 2, mask=True))
    model.compile(keras.optimizers.SGD(0.0), SPARSE(True), run_eagerly=True)
    callbacks = [data.follow()] if kind == "PyDataset" else []
    data = (batch for batch in data) if kind == "generator" else data
    model.fit(data, verbose=0, shuffle=False, callbacks=callbacks)
    scale = model.get_compile_config()["kl_scale"]
    assert scale == pytest.approx(1 / 3.5) if kind != "PyDataset" else 1 / 5 <= scale <= 1 / 2
    assert int(model.optimizer.iterations) == 2


@pytest.mark.once
def test_a_generator_loses_no_batch_in_a_fit_of_the_users_that_does_not_name_it():
    class Mine(keras.Model):
        def fit(self, **kwargs):
            return super().fit(**kwargs)

    det = network(3, 5, 2, mask=True)
    model = stochastic(Mine(det.inputs, det.outputs))
    model.compile(keras.optimizers.SGD(0.0), SPARSE(True), run_eagerly=True)
    batches = ((PADDED[k : k + 4], STEPS[k : k + 4]) for k in (0, 4))
    model.fit(x=batches, verbose=0, shuffle=False)
    assert model.get_compile_config()["kl_scale"] == pytest.approx(1 / 3.5)
    assert int(model.optimizer.iterations) == 2


def keras_dataset(x, y):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


@pytest.mark.once
def test_subclassed_models_are_measured_where_their_output_has_positions():
    class Mine(keras.Model):
        def __init__(self, flat, **kwargs):
            super().__init__(**kwargs)
            self.flat, self.first = flat, layers.Masking()
            self.last = layers.Dense(3)
            self.pool = layers.Flatten() if flat else layers.Identity()

        def call(self, x):
            return self.last(self.pool(self.first(x)))

        def get_config(self):
            return {**super().get_config(), "flat": self.flat}

    for flat, before, after in ((True, 1, 1), (False, None, 1 / 3.5)):
        det = Mine(flat=flat)
        det(PADDED)
        model = stochastic(det)
        model.compile("sgd", SPARSE(True), run_eagerly=True)
        assert model.get_compile_config()["kl_scale"] == before
        model.fit(PADDED, CLASS if flat else STEPS, verbose=0)
        assert model.get_compile_config()["kl_scale"] == pytest.approx(after)


@pytest.mark.once
def test_the_factor_is_saved(tmp_path):
    model = stochastic(network(2, 5, 3))
    model.compile("sgd", "mse", noise_scale=0.7)
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings(action="error", category=UserWarning):
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    scale = 2 * 0.49 / 10
    assert ibnn.stochastic_layers(loaded)[0].kl_scale == pytest.approx(scale)
    assert loaded.get_compile_config()["kl_scale"] == pytest.approx(scale)
    # A file of 0.1.0 has no factor: what it was trained with stays.
    old = model.get_compile_config()
    del old["kl_scale"], old["noise_scale"]
    loaded.compile_from_config(old)
    assert ibnn.stochastic_layers(loaded)[0].kl_scale == 1


@pytest.mark.once
def test_nested_stochastic_models_have_the_factor_of_the_outer_one():
    inner = stochastic(network(4, 5, 2))
    inner.compile("sgd", "mse", noise_scale=0.1)
    x = keras.Input((5, 2))
    model = ibnn.StochasticModel(x, layers.Dense(3)(inner(x)))
    model.compile("sgd", SPARSE(True))
    assert ibnn.stochastic_layers(model)[0].kl_scale == pytest.approx(1 / 5)


# ------------------------------------------------------ trained by plain `fit`: the exact posterior

NOISE, PRIOR = 3.0, 0.5


def exact_posterior(x, y, keep):
    """Of z in y = z x + noise, by numpy."""
    x, y = x[keep].astype("float64"), y[keep].astype("float64")
    precision = 1 / PRIOR**2 + np.sum(x**2) / NOISE**2
    return (1 / PRIOR**2 + np.sum(x * y) / NOISE**2) / precision, precision**-0.5


def normal_nll():
    return ibnn.layers.DistributionNLL(lambda out: ibnn.tfd.Normal(out, NOISE))


@pytest.mark.parametrize("kind", ["step", "masked step", "pixel"])
def test_the_conjugate_model_reaches_the_exact_posterior(kind):
    shape = (3, 4) if kind == "pixel" else (12,)
    rng = np.random.default_rng(3)
    x = rng.uniform(0.5, 1.5, (12, *shape, 1)).astype("float32")
    if kind == "masked step":
        x[(np.arange(12)[:, None] + np.arange(12)) % 12 < 6] = 0  # half of each example
    y = (2.2 * x + NOISE * rng.normal(size=x.shape)).astype("float32")
    mean, scale = exact_posterior(x, y, x != 0)

    start = keras.Input((*shape, 1))
    layer = ibnn.StochasticDense(
        1,
        use_bias=False,
        kernel_initializer="ones",
        posterior=ibnn.NormalAffine(prior_scale=PRIOR, beta=1, seed=1),
        train_size=12,
    )
    hidden = layers.Masking()(start) if kind == "masked step" else start
    model = ibnn.StochasticModel(start, layer(hidden), train_samples=32)
    ibnn.freeze(model, "deterministic")
    steps = 250
    schedule = keras.optimizers.schedules.CosineDecay(0.05, steps, alpha=1e-3)
    likelihood = (
        {"loss": normal_nll()} if kind == "pixel" else {"loss": "mse", "noise_scale": NOISE}
    )
    model.compile(keras.optimizers.Adam(schedule), **likelihood, jit_compile=JIT)
    x, y = (np.concatenate([part] * steps) for part in (x, y))
    model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    affine = layer.posterior.affine.bijector()
    m, s = (float(part[0]) for part in numpy(affine.shift, affine.scale))
    assert abs(m - mean) < 0.1 * scale
    assert abs(s / scale - 1) < 0.06
    # With the KL of one answer per example it would be near the prior.
    answers = 6 if kind == "masked step" else 12
    tempered = (1 / PRIOR**2 + (scale**-2 - 1 / PRIOR**2) / answers) ** -0.5
    assert tempered / scale > 1.4

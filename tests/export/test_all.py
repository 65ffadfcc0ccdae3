"""Every posterior, decision and kind of model: each kind of file says what Python says."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests import registry
from tests.monte_carlo_tools import JAX, averaged, data, dense, numpy, set_weights
from tfp_ibnn.export.frozen import in_float32
from tfp_ibnn.export.reading import open_exported
from tfp_ibnn.export.served import flat
from tfp_ibnn.layers import GaussianHead, QuantileHead

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow writes ONNX and LiteRT files"),
]

S = 5
COUNT = 40
LABELS = np.arange(COUNT) % 3


def chain(shape, *parts):
    return set_weights(keras.Sequential([keras.Input(shape, name="features"), *parts]))


def mc(model, **options):
    return averaged(model, S, seed=3, **options)


def stochastic(model, posterior=None, **options):
    posterior = posterior or ibnn.NormalAffine(initial_scale=0.5)
    return mc(ibnn.to_stochastic(model, posterior, train_size=100), **options)


# ------------------------------------------------------------------------------------- posteriors


def of_registry(name):
    """A network whose posterior has weights of order one."""
    size = max(4, registry.min_posterior_channels(name))
    parts = [layers.Dense(size, "tanh"), dense(3, "softmax", posterior=registry.POSTERIORS[name]())]
    model = chain((4,), *parts)
    registry.perturb(parts[1].posterior, seed=1, size=0.5)
    return mc(model)


def joint():
    plain = chain((4,), layers.Dense(3, "tanh"), layers.Dense(3, "softmax"))
    return stochastic(plain, ibnn.JointPosterior(ibnn.NormalFull(initial_scale=0.5)))


def both_sides():
    plain = chain((4,), layers.Dense(3, "tanh"), layers.Dense(3, "softmax"))
    return stochastic(plain, ibnn.NormalAffine(sides="both", initial_scale=0.5))


def over_weights(posterior):
    return stochastic(chain((4,), layers.Dense(3, "tanh"), layers.Dense(3, "softmax")), posterior)


def position():
    parts = [dense(3, "tanh", noise="position"), layers.Flatten(), dense(3, "softmax")]
    return mc(chain((5, 4), *parts))


# ---------------------------------------------------------------------------------------- networks


def image():
    parts = [
        layers.Conv2D(3, 3, padding="same", activation="relu"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(),
        layers.SeparableConv2D(4, 2, activation="relu"),
        layers.DepthwiseConv2D(2, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, "softmax"),
    ]
    return stochastic(chain((8, 8, 2), *parts))


def open_image():
    """Images of any size."""
    parts = [layers.Conv2D(3, 3, padding="same", activation="gelu"), layers.MaxPooling2D()]
    parts += [layers.Conv2D(4, 2, activation="relu"), layers.GlobalAveragePooling2D()]
    return stochastic(chain((None, None, 2), *parts, layers.Dense(3, "softmax")))


def causal():
    parts = [layers.Conv1D(3, 2, padding="causal", dilation_rate=d) for d in (1, 2)]
    return stochastic(chain((6, 4), *parts, layers.Flatten(), layers.Dense(3, "softmax")))


def volume():
    parts = [layers.Conv3D(3, 2, activation="relu"), layers.GlobalAveragePooling3D()]
    return stochastic(chain((4, 4, 4, 1), *parts, layers.Dense(3, "softmax")))


def in_16_bits():
    """Which becomes float32 in files without TensorFlow."""
    parts = [layers.Dense(5, "tanh", dtype="mixed_bfloat16")]
    return stochastic(chain((4,), *parts, layers.Dense(3, "softmax")))


def autoencoder():
    parts = [layers.Conv2D(3, 3, strides=2, padding="same", activation="tanh")]
    parts += [layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")]
    return stochastic(chain((6, 6, 1), *parts))


def recurrent(kind, **options):
    parts = [kind(4, return_sequences=True, **options), kind(3, **options)]
    return stochastic(chain((5, 4), *parts, layers.Dense(3, "softmax")))


def bidirectional():
    parts = [layers.Bidirectional(layers.GRU(3)), layers.Dense(3, "softmax")]
    return stochastic(chain((5, 4), *parts))


def words():
    """Words, some of them padding."""
    inputs = keras.Input((5,), dtype="int32", name="features")
    hidden = layers.Embedding(6, 4, mask_zero=True)(inputs)
    hidden = layers.LSTM(3)(hidden)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    return stochastic(set_weights(model))


def recurrent_ensemble():
    def member(seed):
        parts = [layers.GRU(3), layers.Dense(3, "softmax")]
        return set_weights(keras.Sequential([keras.Input((4, 2), name="features"), *parts]), seed)

    return mc(ibnn.DeepEnsemble([member(0), member(1)]))


def masked_attention():
    """To words that are no padding, and to earlier ones."""
    inputs = keras.Input((5,), dtype="int32", name="features")
    hidden = layers.Embedding(6, 4, mask_zero=True)(inputs)
    hidden = layers.MultiHeadAttention(2, 2)(hidden, hidden, use_causal_mask=True)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return stochastic(set_weights(keras.Model(inputs, layers.Dense(3, "softmax")(hidden))))


def attention(length):
    inputs = keras.Input((length, 4), name="features")
    hidden = layers.MultiHeadAttention(2, 2)(inputs, inputs)
    hidden = layers.LayerNormalization()(layers.Add()([inputs, hidden]))
    hidden = layers.GlobalAveragePooling1D()(layers.EinsumDense("abc,cd->abd", (length, 4))(hidden))
    return stochastic(set_weights(keras.Model(inputs, layers.Dense(3, "softmax")(hidden))))


def adapter():
    model = chain((4,), layers.Dense(5, "tanh"), layers.Dense(3, "softmax"))
    for layer in model.layers:
        layer.enable_lora(2)
    set_weights(model, seed=1)
    return stochastic(model)


def several(kind):
    wide, deep = keras.Input((3,), name="wide"), keras.Input((2,), name="deep")
    hidden = dense(5, "tanh")(layers.Concatenate()([wide, deep]))
    inputs = {"list": [wide, deep], "dict": {"wide": wide, "deep": deep}}[kind]
    outputs = {
        "digit": dense(3, "softmax", name="digit")(hidden),
        "size": GaussianHead(name="size")(dense(2)(hidden)),
    }
    head = {"digit": "softmax", "size": "gaussian"}
    return mc(set_weights(keras.Model(inputs, outputs)), head=head)


def sigmoid():
    model = chain((4,), layers.Dense(5, "tanh"), dense(2))
    return mc(model, head="sigmoid", from_logits=True, sampling="qmc")


def gaussian():
    model = chain((4,), layers.Dense(4, "tanh"), dense(4, "tanh"), GaussianHead())
    return mc(model, sampling="antithetic", interval=0.9)


def quantiles(outputs=2):
    parts = [layers.Dense(4, "tanh"), dense(3 * outputs), QuantileHead(outputs=outputs)]
    return mc(chain((4,), *parts), interval=0.9)


def points():
    model = chain((4,), dense(4, "tanh"), dense(2))
    return mc(model, head="point", interval=0.8, return_samples=True, standard_error=True)


def of_counts():
    """A distribution of one's own."""
    from tfp_ibnn import tfd

    head = lambda outputs: tfd.Poisson(log_rate=outputs)  # noqa: E731
    return mc(chain((4,), dense(4, "tanh"), dense(1)), head=head)


def dropout():
    parts = [layers.Dropout(0.5), layers.GaussianDropout(0.3)]
    model = chain((4,), layers.Dense(6, "tanh"), *parts, layers.Dense(3, "softmax"))
    return mc(model, dropout=True)


class Own(keras.Model):
    """A model whose `call` is its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = dense(4, "tanh"), dense(3, "softmax")

    def call(self, inputs):
        return self.last(self.first(inputs) * 2)


def own():
    model = Own()
    model(data(2, 4))
    return mc(set_weights(model), from_logits=False)


# ---------------------------------------------------------------------------- weights and decisions


@functools.cache
def trained(seed=0):
    keras.utils.set_random_seed(seed)
    model = chain((4,), layers.Dense(3, "tanh"), layers.Dense(3))
    set_weights(model, seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def swag():
    callback = ibnn.SWAG(every=1, unit="step", rank=3)
    trained().fit(data(COUNT, 4), LABELS, batch_size=8, epochs=1, verbose=0, callbacks=[callback])
    return mc(callback.posterior())


def laplace(**options):
    posterior = ibnn.Laplace(trained(), prior_precision=1.0, **options)
    return mc(posterior.fit(data(COUNT, 4), LABELS, verbose=0))


def regression(**options):
    model = chain((4,), layers.Dense(3, "tanh"), layers.Dense(1))
    model.compile("sgd", "mse")
    posterior = ibnn.Laplace(model, prior_precision=1.0, **options)
    return mc(posterior.fit(data(COUNT, 4), data(COUNT, 1), verbose=0))


def variational():
    posterior = ibnn.GaussianVI(trained())
    return mc(posterior.fit(data(COUNT, 4), LABELS, steps=2, verbose=0))


def path_of_sgld():
    """The networks that SGLD passes."""
    model = keras.models.clone_model(trained())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ibnn.SGLD(0.1, train_size=COUNT, prior_scale=1.0, seed=0), loss)
    snapshots = ibnn.Snapshots(unit="step")
    options = {"batch_size": 10, "verbose": 0, "callbacks": [snapshots]}
    model.fit(data(COUNT, 4), LABELS, **options)
    return mc(snapshots.posterior())


def batch_norm():
    parts = [layers.Dense(3), layers.BatchNormalization(), layers.Dense(3, "softmax")]
    return mc(chain((4,), *parts), batch_norm=data(COUNT, 4))


def last_layer():
    posterior = ibnn.LastLayerHMC(trained(), draws=8, warmup=8, chains=2)
    return mc(posterior.fit(data(COUNT, 4), LABELS, verbose=0))


def noisy():
    return chain((4,), dense(4, "tanh"), dense(3, "softmax"))


def scaled(model):
    temperature = ibnn.TemperatureScaling(model, from_logits=None)
    return temperature.fit(data(COUNT, 4), LABELS)


def by_class(kind):
    return kind(trained(), from_logits=True).fit(data(COUNT, 4), LABELS)


def temperature_of_ensemble():
    ensemble = ibnn.DeepEnsemble([trained(0), trained(1)])
    model = ibnn.MonteCarlo(ensemble, S, from_logits=True)
    return ibnn.TemperatureScaling(model).fit(data(COUNT, 4), LABELS)


def pixels():
    parts = [layers.Conv2D(3, 3, padding="same", activation="relu"), layers.Conv2D(3, 1)]
    plain = chain((4, 4, 2), *parts, layers.Softmax())
    return stochastic(plain)


def sets_of_pixels():
    labels = np.resize(LABELS, (COUNT, 4, 4))
    return ibnn.Conformal(pixels(), "lac", 0.7).fit(data(COUNT, 4, 4, 2), labels)


def detector_of_pixels(score, reduction):
    detector = ibnn.OODDetector(pixels(), score, k=3, reduction=reduction)
    return detector.fit(data(COUNT, 4, 4, 2))


def split_of_points():
    model = mc(chain((4,), dense(4, "tanh"), dense(1)), head="point")
    return ibnn.Conformal(model, "split", 0.7).fit(data(COUNT, 4), data(COUNT, 1))


def sets(method, **options):
    model = mc(noisy())
    return ibnn.Conformal(model, method, 0.7, **options).fit(data(COUNT, 4), LABELS)


def intervals(method):
    model = mc(chain((4,), dense(4, "tanh"), dense(2), GaussianHead()), interval=0.7)
    return ibnn.Conformal(model, method, 0.7).fit(data(COUNT, 4), data(COUNT, 2)[:, :1])


def moved_quantiles():
    return ibnn.Conformal(quantiles(1), "cqr").fit(data(COUNT, 4), data(COUNT, 1))


def detector(score):
    model = chain((4,), dense(4, "tanh"), layers.Dense(3, "softmax"))
    return ibnn.OODDetector(mc(model), score, k=3).fit(data(COUNT, 4), LABELS)


def student(teacher):
    return ibnn.distill(teacher, data(COUNT, 4), epochs=0, verbose=0)


# Name -> a function that makes what is exported.
CASES = {
    **{f"posterior-{name}": functools.partial(of_registry, name) for name in registry.POSTERIORS},
    "joint": joint,
    "both-sides": both_sides,
    "mean-field": lambda: over_weights(ibnn.MeanField()),
    "mnf": lambda: over_weights(ibnn.MNF()),
    "position": position,
    "image": image,
    "open-image": open_image,
    "causal": causal,
    "volume": volume,
    "in-16-bits": in_16_bits,
    "autoencoder": autoencoder,
    "lstm": lambda: recurrent(layers.LSTM),
    "gru": lambda: recurrent(layers.GRU),
    "simple-rnn": lambda: recurrent(layers.SimpleRNN, go_backwards=True),
    "bidirectional": bidirectional,
    "recurrent-ensemble": recurrent_ensemble,
    "words": words,
    "attention": lambda: attention(5),
    "open-attention": lambda: attention(None),
    "masked-attention": masked_attention,
    "adapter": adapter,
    "list": lambda: several("list"),
    "dict": lambda: several("dict"),
    "sigmoid": sigmoid,
    "gaussian": gaussian,
    "quantiles": quantiles,
    "points": points,
    "of-counts": of_counts,
    "dropout": dropout,
    "batch-norm": batch_norm,
    "own": own,
    "plain": lambda: mc(chain((4,), layers.Dense(3, "softmax"))),
    "ensemble": lambda: mc(ibnn.DeepEnsemble([trained(0), trained(1), trained(2)])),
    "mixture-of-weights": lambda: mc(ibnn.WeightMixture([trained(0), noisy()])),
    "noisy-ensemble": lambda: mc(ibnn.DeepEnsemble([noisy(), noisy()])),
    "swag": swag,
    "laplace": laplace,
    "laplace-probit": lambda: laplace(link_approx="probit"),
    "laplace-networks": lambda: laplace(pred_type="nn", subset_of_weights="all"),
    "laplace-linearized": lambda: laplace(subset_of_weights="all"),
    "laplace-diag": lambda: laplace(hessian_structure="diag"),
    "laplace-full": lambda: laplace(hessian_structure="full"),
    "laplace-of-numbers": regression,
    "laplace-of-all-for-numbers": lambda: regression(subset_of_weights="all"),
    "gaussian-vi": variational,
    "sgld": path_of_sgld,
    "last-layer-hmc": last_layer,
    "temperature": lambda: scaled(trained()),
    "temperature-of-noise": lambda: mc(scaled(noisy())),
    "temperature-of-average": lambda: scaled(mc(noisy())),
    "temperature-of-ensemble": temperature_of_ensemble,
    "vector": lambda: by_class(ibnn.VectorScaling),
    "isotonic": lambda: by_class(ibnn.IsotonicScaling),
    "lac": lambda: sets("lac"),
    "aps": lambda: sets("aps", by="class"),
    "raps": lambda: sets("raps", k=1, penalty=0.2),
    "raps-randomized": lambda: sets("raps", randomized=0),
    "split": lambda: intervals("split"),
    "split-of-points": split_of_points,
    "sets-of-pixels": sets_of_pixels,
    "cqr": lambda: intervals("cqr"),
    "cqr-of-quantiles": moved_quantiles,
    "student-of-classes": lambda: student(mc(noisy())),
    "student-of-numbers": lambda: student(gaussian()),
    "student-of-labels": lambda: student(sigmoid()),
    "student-of-points": lambda: student(points()),
    "max_probability": lambda: detector("max_probability"),
    "entropy": lambda: detector("entropy"),
    "entropy-of-pixels": lambda: detector_of_pixels("entropy", "mean"),
    "knn-of-pixels": lambda: detector_of_pixels("knn", None),
    "epistemic": lambda: detector("epistemic"),
    "mahalanobis": lambda: detector("mahalanobis"),
    "energy": lambda: detector("energy"),
    "vim": lambda: detector("vim"),
    "relative_mahalanobis": lambda: detector("relative_mahalanobis"),
    "knn": lambda: detector("knn"),
}

QUICK = {
    ("posterior-NormalAffine", "onnx"),
    ("posterior-NormalPlanar1d", "litert"),
    ("image", "onnx"),
    ("image", "litert"),
    ("ensemble", "onnx"),
    ("aps", "litert"),
    ("knn", "onnx"),
    ("dict", "onnx"),
}

# A format that has no such operation; the error says so.
REFUSED = {
    ("raps-randomized", "onnx"): "`randomized` sets depend on the bits",
    ("raps-randomized", "litert"): "`randomized` sets depend on the bits",
}

ENDINGS = {"onnx": ".onnx", "litert": ".tflite", "saved_model": ""}

OPEN_SIZES = (5, 8)


def inputs_of(model, facts):
    """Inputs by name, and as the model takes them."""
    named = {}
    for number, (name, spec) in enumerate(facts["inputs"].items()):
        _, *sizes = spec["shape"]
        for axis, size in enumerate(sizes):
            sizes[axis] = OPEN_SIZES[axis] if size is None else size
        shape = (7, *sizes)
        if spec["dtype"] == "int32":
            named[name] = np.random.default_rng(0).integers(0, 6, shape).astype("int32")
        else:
            named[name] = data(*shape, seed=number)
    return named, next(iter(named.values())) if len(named) == 1 else named


def expected_of(model, x, format):
    """What Python says, in one dict."""
    served = model if hasattr(model, "serve") else averaged(model, 1, seed=0)
    is_as_it_is = format == "saved_model"
    with contextlib.nullcontext() if is_as_it_is else in_float32(served):
        prediction = served.serve(keras.tree.map_structure(keras.ops.convert_to_tensor, x))
    return {name: numpy(value) for name, value in flat(prediction).items()}


@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=() if (name, format) in QUICK else pytest.mark.slow)
        for name in CASES
        for format in ENDINGS
    ],
)
def test_a_file_says_what_python_says(name, format, tmp_path):
    model = CASES[name]()
    path = tmp_path / f"model{ENDINGS[format]}"
    options = {}
    if name == "own":
        options["input_signature"] = {"x": keras.InputSpec(shape=(None, 4), dtype="float32")}
    if (name, format) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, format]):
            ibnn.export(model, path, format=format, **options)
        assert list(tmp_path.iterdir()) == []
        return
    ibnn.export(model, path, format=format, **options)
    exported = open_exported(path)
    named, x = inputs_of(model, exported.facts)
    if name == "list":
        x = list(named.values())
    expected = expected_of(model, x, format)
    for count in (1, 7):  # batches of any size
        found = exported.run(**{key: value[:count] for key, value in named.items()})
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(
                found[key], value[:count], rtol=1e-5, atol=1e-5, err_msg=key, strict=True
            )

"""No int32 variable on TensorFlow, which keeps those on the CPU.

XLA, Keras's default on a GPU, refuses a step that reads one: no model would train there. The dtype
"int" is int64 on TensorFlow. What is made here runs on a CPU, and would have shown it.
"""

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.registry import DISCRETE, FLOWS, POSTERIORS, SURJECTIONS

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow's variables"),
]

X = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 3)).astype("float32")
Y = np.arange(12) % 3
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture
def made():
    """All variables of TensorFlow that a test makes."""
    import tensorflow as tf

    found = []

    def keep(creator, **kwargs):
        found.append(creator(**kwargs))
        return found[-1]

    with tf.variable_creator_scope(keep):
        yield found


def assert_none_is_int32(variables):
    assert variables
    assert not [v.name for v in variables if v.dtype == "int32"]


@pytest.mark.parametrize(
    "registry",
    [FLOWS, POSTERIORS, SURJECTIONS, DISCRETE],
    ids=["flows", "posteriors", "surjections", "discrete"],
)
def test_of_every_flow_and_posterior(made, registry):
    for make in registry.values():
        layer = make()
        layer.build((None, 4 * getattr(layer, "width", 1)))
    assert_none_is_int32(made)


def network():
    front = ibnn.data.preprocessing(X, augment=True, padding=1, seed=0)
    conv = ibnn.StochasticConv2D(4, 3, posterior=ibnn.NormalInvConv(1, planar=1), train_size=12)
    inputs = keras.Input((6, 6, 3))
    x = keras.layers.Flatten()(conv(keras.Sequential(front)(inputs)))
    x = ibnn.Stochastic(keras.layers.Dense(4), ibnn.MixturePosterior(2), 12)(x)
    outputs = ibnn.StochasticDense(3, train_size=12)(keras.layers.Dropout(0.1)(x))
    return ibnn.StochasticModel(inputs, outputs)


def test_of_training_prediction_and_loading(eagerly, made, tmp_path):
    """And of each class that Keras knows of the package: a new one must be made here too."""
    model = network()
    kinds = (
        ibnn.BrierScore,
        ibnn.ExpectedCalibrationError,
        ibnn.NegativeLogLikelihood,
    )
    metrics = [kind(from_logits=True) for kind in kinds]
    optimizer = ibnn.two_speed(keras.optimizers.Adam(1e-3), 1e-2)
    model.compile(optimizer, LOGITS, metrics=metrics, run_eagerly=True)
    callbacks = [
        ibnn.KLAnnealing(2),
        ibnn.PosteriorLog(),
        ibnn.TerminateOnNonFinite(every=1),
        ibnn.MonteCarloEvaluation((X[:2], Y[:2]), samples=2),
        ibnn.Checkpoint(tmp_path / "run.npz"),
    ]
    model.fit(X, Y, epochs=1, callbacks=callbacks, verbose=0)
    ways = ({"independent": True, "dropout": True}, {"sampling": "qmc", "return_samples": True})
    for options in ways:
        mc = ibnn.MonteCarlo(model, samples=2, **options)
        mc.compile(run_eagerly=True)
        mc.predict(X, verbose=0)
    mc.evaluate(X, Y, verbose=0)
    mc.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.inner.fit(X, Y, verbose=0)
    kinds = (ibnn.TemperatureScaling, ibnn.VectorScaling, ibnn.IsotonicScaling)
    scaled = [kind(model).fit(X, Y) for kind in kinds]
    regression = keras.Sequential([keras.Input((2,)), ibnn.layers.GaussianHead()])
    quantiles = keras.Sequential([keras.Input((3,)), ibnn.layers.QuantileHead()])
    plain = keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Flatten()])
    plain.add(keras.layers.Dense(3, activation="softmax"))
    sets = [kind([plain, plain]) for kind in (ibnn.DeepEnsemble, ibnn.weights.WeightSets)]
    plain.compile(loss="sparse_categorical_crossentropy", run_eagerly=True)
    sets.append(ibnn.Laplace(plain, link_approx="probit").fit(X, Y, verbose=0))
    random = ibnn.to_stochastic(plain, ibnn.MeanField(moped=0.1), train_size=12)
    random.compile("adam", "sparse_categorical_crossentropy", run_eagerly=True)
    random.fit(X, Y, verbose=0)
    samples = [ibnn.SWAG(unit="step", rank=2), ibnn.Snapshots(unit="step")]
    chains = [kind(1e-3, train_size=12, prior_scale=1.0) for kind in (ibnn.SGLD, ibnn.SGHMC)]
    chains.append(ibnn.IVON(1e-3, train_size=12, prior_scale=1.0))
    for chain in chains:
        plain.compile(chain, "sparse_categorical_crossentropy", run_eagerly=True)
        plain.fit(X, Y, batch_size=4, verbose=0, callbacks=samples)
    sets += [ibnn.WeightMixture([x.posterior() for x in samples])]
    sets += [
        ibnn.weights.ScaledPosterior(
            sets[0], keras.Sequential([keras.Input((3,)), keras.layers.Softmax()])
        )
    ]
    plain.compile(loss="sparse_categorical_crossentropy")
    gaussian = ibnn.GaussianVI(plain, covariance="diag")
    refined = ibnn.weights.RefinedPosterior(plain, [ibnn.flows.Spline()], places=[0, 1])
    last_layers = (gaussian, ibnn.LastLayerHMC(plain, chains=2, draws=4), refined)
    for weights in last_layers:
        ibnn.MonteCarlo(weights, samples=2)(X)
    for weights in (*sets, random):
        averaged = ibnn.MonteCarlo(weights)
        averaged.compile(run_eagerly=True)
        averaged.predict(X, verbose=0)

    normalizing = keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Flatten()])
    normalizing.add(keras.layers.BatchNormalization())
    batches = ibnn.data.ShuffledBatches(X, Y, batch_size=4, seed=0)
    normalized = ibnn.MonteCarlo(normalizing, samples=2, batch_norm=batches, head="point")

    decisions = [ibnn.Conformal(plain).fit(X, Y), ibnn.OODDetector(plain, "knn", k=2).fit(X)]

    flows = ibnn.to_stochastic(plain, ibnn.MNF([ibnn.flows.Planar()], []), train_size=12)
    flows(X, training=True)

    density = ibnn.FlowDensity([ibnn.flows.AffineCoupling()], base=2)
    density.adapt(np.arange(6.0).reshape(3, 2) ** 2)
    coders = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]) for _ in range(2))
    vae = ibnn.VAE(*coders, 2, [ibnn.flows.Planar()], prior=density, likelihood="gaussian")
    vae.compile("adam", run_eagerly=True)
    vae.fit(np.zeros((3, 2)), verbose=0)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.memory, self.head = keras.layers.GRU(2), keras.layers.Dense(2)

        def call(self, x):
            return self.head(self.memory(x[:, 0]))

    own = Own()
    own(X)
    own.head.enable_lora(1)
    own = ibnn.to_stochastic(own, ibnn.JointPosterior(ibnn.NormalAffine()), train_size=12)
    own(X, training=True)

    assert_none_is_int32(made)
    models = (own, loaded, regression, quantiles, random, flows, density, vae)
    models += (*scaled, *sets, *last_layers, *decisions, normalized)
    seen = {type(part) for m in models for part in m._flatten_layers()}
    seen |= {
        type(part) for part in (*metrics, *callbacks, *samples, optimizer, *chains, *mc.metrics)
    }
    bases = (ibnn.Flow, ibnn.Posterior, ibnn.flows.Surjection, ibnn.flows.DiscreteFlow)
    known = {
        kind
        for key, kind in keras.saving.get_custom_objects().items()
        if key.startswith("tfp_ibnn>") and not issubclass(kind, bases)
    }
    owners = (
        keras.layers.Layer,
        keras.metrics.Metric,
        keras.optimizers.Optimizer,
        keras.callbacks.Callback,
    )
    assert not {kind.__name__ for kind in known - seen if issubclass(kind, owners)}

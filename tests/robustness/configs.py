"""Configs of every class of the library, with junk in one place."""

import warnings

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from tests.registry import FLOWS, POSTERIORS
from tests.robustness import mutate
from tests.robustness.harness import Wrong, refusal

__all__ = ["Campaign", "use_posterior"]

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
Y = np.array([0, 1, 2])
PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], "float32")

# Arguments that Keras reads itself, and refuses in its own way.
OF_KERAS = {*keras.layers.Conv2D(1, 1).get_config(), *keras.layers.Dense(1).get_config()}


def finite(*values):
    """Raise unless all numbers are finite."""
    for value in keras.tree.flatten(values):
        value = ops.convert_to_numpy(value)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise Wrong("it works with numbers that are not finite")


def use_flow(flow):
    """Build a flow and map noise by it."""
    flow.build((None, 4))
    finite(*flow.forward_and_log_det(ops.convert_to_tensor(X, dtype=flow.dtype)))


def use_posterior(posterior):
    """Build a posterior and draw from it."""
    posterior.build((None, 4))
    finite(*posterior.sample_and_kl((2,)), posterior.mean(), posterior.entropy())


def use_dense(layer):
    """Call a layer of vectors."""
    finite(layer(X), layer.losses)


def use_conv(layer):
    """Call a layer of images."""
    finite(layer(np.ones((2, 6, 6, 3), "float32")), layer.losses)


def use_metric(metric):
    """Update a metric."""
    metric.update_state(Y, PROBABILITIES)
    finite(metric.result())


def use_head(layer):
    """Call a head."""
    finite(layer(X))


def use_loss(loss):
    """Compute a loss."""
    finite(loss(X[:, :2], np.abs(X) + 1))


def use_model(model):
    """Predict by a model of models."""
    model.compile(run_eagerly=True)
    finite(model.predict(X, verbose=0))


def use_augmentation(layer):
    """Call an augmentation."""
    finite(layer(np.ones((2, 6, 6, 3), "float32"), training=True))


class Campaign:
    """A config is refused by ValueError or TypeError, or makes an object that works."""

    def __init__(self, place):
        self.place = place
        metrics = [
            ibnn.ExpectedCalibrationError(),
            ibnn.BrierScore(),
            ibnn.NegativeLogLikelihood(),
        ]
        planar = {"posterior": ibnn.NormalPlanar1d(depth=1), "train_size": 10}
        inner = keras.Sequential([keras.Input((4,)), ibnn.StochasticDense(3, train_size=9)])
        self.objects = [
            *((use_flow, make()) for make in FLOWS.values()),
            *((use_posterior, make()) for make in POSTERIORS.values()),
            *((use_metric, metric) for metric in metrics),
            (use_dense, ibnn.Stochastic(keras.layers.Dense(3), **planar)),
            (use_dense, ibnn.StochasticDense(3, **planar)),
            (use_conv, ibnn.StochasticConv2D(3, 2, **planar)),
            (use_head, ibnn.layers.GaussianHead()),
            (use_head, ibnn.layers.QuantileHead((0.1, 0.9), 2)),
            (use_loss, ibnn.layers.GaussianNLL()),
            (use_loss, ibnn.layers.PinballLoss((0.1, 0.9))),
            (use_augmentation, ibnn.data.RandomShift(1)),
            (use_augmentation, ibnn.data.RandomMirror()),
            (use_model, ibnn.MonteCarlo(inner, samples=4, head="softmax", from_logits=True)),
        ]

    def case(self, rng, number):
        """Make an object of a config with junk in it, and use it."""
        use, original = self.objects[number % len(self.objects)]
        config = original.get_config()
        places = mutate.leaves(config)
        # Half of the time among the arguments themselves, of which there are few.
        if rng.random() < 0.5:
            places = [place for place in places if len(place) == 1]
        kind = type(original)
        if not places:
            config, place, value = {}, (rng.choice(("x", "every")),), rng.choice(mutate.JUNK)
        else:
            place, value = rng.choice(places), rng.choice(mutate.JUNK)
        self.label = f"{kind.__name__} {'.'.join(map(str, place))} = {str(value)[:40]}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = kind.from_config(mutate.put(config, place, value))
                # So many draws would take hours, which is what they were asked for.
                if not ("samples" in place and isinstance(value, int) and value >= 10**9):
                    use(made)
        except Wrong:
            raise
        except Exception as error:
            by_keras = OF_KERAS.intersection(place)
            return refusal(error, Exception if by_keras else (ValueError, TypeError))
        return "right"

"""Small networks, trained along with SWAG."""

import keras
import numpy as np

import tfp_ibnn as ibnn

JAX = keras.backend.backend() == "jax"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(seed=0, norm=True):
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(4), keras.layers.BatchNormalization()][: 1 + norm]
    layers = [*hidden, keras.layers.ReLU(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    # Few steps, which TensorFlow takes longer to compile.
    model.compile(keras.optimizers.SGD(0.3, momentum=0.5), LOSS, run_eagerly=not JAX)
    return model


def trained(seed=0, norm=True):
    """Return a SWAG callback, and the trainable weights at the end of each epoch from the third."""
    model = network(seed, norm)
    swag, snapshots = ibnn.SWAG(start=2, rank=4), ibnn.Snapshots(start=2)
    model.fit(X, Y, epochs=9, batch_size=20, verbose=0, callbacks=[swag, snapshots])
    ids = [id(w) for w in model.weights]
    places = [ids.index(id(w)) for w in model.trainable_weights]
    sets = list(snapshots.read())
    assert len(sets) == 7
    path = np.array([np.concatenate([x[i].ravel() for i in places]) for x in sets], "float64")
    return swag, path

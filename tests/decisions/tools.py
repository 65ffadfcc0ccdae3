"""Examples that are known, near and far, and the scores of a network by other means."""

import keras
import numpy as np
from keras import layers
from scipy.special import logsumexp, softmax
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 6)).astype("float32")
NEW, FAR = X[:40] + 0.1, X[:30] + 4
Y = np.arange(150) % 3
D = 4


def features(model, x):
    kernel, bias, *last = (w.astype("float64") for w in model.get_weights())
    return np.tanh(x @ kernel + bias), *last


def oracle(kind, model, x):
    """The scores by other means: scikit-learn, or the published code's way."""
    f, kernel, bias = features(model, X)
    new = features(model, x)[0]
    logits = new @ kernel + bias
    if kind == "max_probability":
        return -softmax(logits, axis=1).max(axis=1)
    if kind == "entropy":
        p = softmax(logits, axis=1)
        return -(p * np.log(p)).sum(axis=1)
    if kind == "energy":
        return -logsumexp(logits, axis=1)
    if kind == "knn":
        unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (f, new)]
        return NearestNeighbors(n_neighbors=5).fit(unit[0]).kneighbors(unit[1])[0][:, 4]
    if kind == "vim":
        u = -np.linalg.pinv(kernel.T) @ bias
        fitted = EmpiricalCovariance(assume_centered=True).fit(f - u)
        values, vectors = np.linalg.eig(fitted.covariance_)
        null = vectors.T[np.argsort(-values)[D // 2 :]].T
        alpha = (f @ kernel + bias).max(axis=-1).mean()
        alpha /= np.linalg.norm((f - u) @ null, axis=-1).mean()
        return np.linalg.norm((new - u) @ null, axis=-1) * alpha - logsumexp(logits, axis=1)
    means = [f[c == Y].mean(axis=0) for c in range(3)]
    within = EmpiricalCovariance(assume_centered=True).fit(f - np.array(means)[Y])
    near = np.min([within.mahalanobis(new - m) for m in means], axis=0)
    return near - (kind != "mahalanobis") * EmpiricalCovariance().fit(f).mahalanobis(new)


def head_of(features, kernel, bias=0.0):
    """A network whose features are its inputs, with a softmax head."""
    made = keras.Sequential([keras.Input((features,)), layers.Dense(len(kernel[0]), "softmax")])
    made.layers[0].set_weights([np.asarray(kernel), np.full(len(kernel[0]), bias)])
    return made

"""Several outputs, likelihoods of TFP, and padding, in predictions and scores."""

import keras
import numpy as np
import pytest
import scipy.stats
from keras import layers, ops

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tests.monte_carlo_tools import JAX

REGISTER = keras.saving.register_keras_serializable(package="tests")
DATA = np.random.default_rng(0)
X = DATA.normal(size=(20, 4)).astype("float32")
Y = {
    "count": DATA.poisson(2, 20).astype("float32"),
    "kind": DATA.integers(0, 3, 20),
    "size": DATA.normal(size=20).astype("float32"),
}


@REGISTER
def poisson(x):
    return ibnn.tfd.Poisson(log_rate=x)


LOSS = {
    "count": ibnn.layers.DistributionNLL(poisson),
    "kind": "sparse_categorical_crossentropy",
    "size": "mse",
}
HEADS = {"count": poisson, "kind": "softmax", "size": "point"}


def network(as_list=False):
    """A stochastic model of three outputs; in a list they are not in the order of their names."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), name="features")
    hidden = layers.Dense(6, "tanh")(inputs)
    outputs = {
        "size": layers.Dense(1, name="size")(hidden),
        "kind": layers.Dense(3, "softmax", name="kind")(hidden),
        "count": layers.Dense(1, name="count")(hidden),
    }
    model = keras.Model(inputs, [*outputs.values()] if as_list else outputs)
    posterior = ibnn.NormalAffine(initial_scale=0.3, seed=0)
    return ibnn.to_stochastic(model, posterior, train_size=20)


@pytest.fixture(scope="module")
def model():
    model = network()
    model.compile("adam", LOSS)
    return model


def alone(model, name):
    """The same model with one of its outputs."""
    index = sorted(Y).index(name)
    part = keras.Model(model.inputs, model.outputs[index])
    part.compile("adam", LOSS[name])
    return part


# ---------------------------------------------------------------------------------- several outputs


def entropy(p):
    return -(p * np.log(p)).sum(axis=-1)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_each_output_is_averaged_by_itself(model, chunk_size):
    mc = ibnn.MonteCarlo(model, samples=10, seed=3, chunk_size=chunk_size)
    found = mc.predict(X, verbose=0)
    assert sorted(found) == sorted(Y)
    draws = [mc.draw(X, number) for number in range(10)]
    for name in Y:
        means, within = (
            np.stack([numpy(draw[name][key]) for draw in draws]) for key in ("mean", "aleatoric")
        )
        mean = means.mean(axis=0)
        epistemic = means.var(axis=0)
        if name == "kind":
            epistemic = entropy(mean) - within.mean(axis=0)
            np.testing.assert_allclose(found[name]["entropy"], entropy(mean), rtol=1e-4)
        assert (means.std(axis=0) > 1e-3).all()
        np.testing.assert_allclose(found[name]["mean"], mean, atol=1e-5)
        np.testing.assert_allclose(found[name]["epistemic"], epistemic, atol=1e-5)
        np.testing.assert_allclose(found[name]["aleatoric"], within.mean(axis=0), atol=1e-5)


def test_scores_have_the_names_of_the_outputs(model):
    mc = ibnn.MonteCarlo(model, samples=10, seed=3)
    found = mc.predict(X, verbose=0)
    scores = mc.evaluate(X, Y, verbose=0, return_dict=True)
    probability = found["kind"]["mean"][np.arange(20), Y["kind"]]
    squares = {name: (found[name]["mean"][:, 0] - Y[name]) ** 2 for name in ("count", "size")}
    rates = np.exp(found["count"]["parameters"][..., 0].astype("float64"))
    density = scipy.stats.poisson.pmf(Y["count"][:, None], rates).mean(axis=1)
    right = {
        "kind_nll": -np.log(probability).mean(),
        "kind_accuracy": (found["kind"]["mean"].argmax(axis=-1) == Y["kind"]).mean(),
        "size_rmse": np.sqrt(squares["size"].mean()),
        "count_rmse": np.sqrt(squares["count"].mean()),
        "count_nll": -np.log(density).mean(),
    }
    right["loss"] = right["kind_nll"] + squares["size"].mean() + right["count_nll"]
    for name in ("kind_brier", "kind_ece"):
        assert 0 < scores.pop(name) < 2
    assert scores == pytest.approx(right, rel=1e-4)


def test_outputs_in_a_list_go_by_the_names_of_their_layers(eagerly):
    model, options = network(as_list=True), {"samples": 6, "seed": 1}
    found = ibnn.MonteCarlo(model, head=HEADS, **options)
    named = ibnn.MonteCarlo(network(), head=HEADS, **options).at_mean(X)
    for name, part in found.at_mean(X).items():  # draws depend on the order of the layers
        np.testing.assert_allclose(part["mean"], named[name]["mean"], atol=1e-5)
    targets = [Y["size"], Y["kind"], Y["count"]]  # the order of the outputs
    by_place = found.evaluate(X, targets, verbose=0, return_dict=True)
    assert by_place == pytest.approx(found.evaluate(X, Y, verbose=0, return_dict=True))


@pytest.mark.slow
def test_weights_by_output_or_for_all(model):
    mc = ibnn.MonteCarlo(model, samples=4, seed=0)
    weight = np.r_[np.ones(10), np.zeros(10)].astype("float32")
    half = mc.evaluate(X[:10], {k: v[:10] for k, v in Y.items()}, verbose=0, return_dict=True)
    whole = mc.evaluate(X, Y, verbose=0, return_dict=True)
    common = mc.evaluate(X, Y, sample_weight=weight, verbose=0, return_dict=True)
    one = {"kind": weight, "size": np.ones(20, "float32"), "count": np.ones(20, "float32")}
    apart = mc.evaluate(X, Y, sample_weight=one, verbose=0, return_dict=True)
    assert common["kind_nll"] == pytest.approx(half["kind_nll"], abs=1e-5)
    assert common["size_rmse"] == pytest.approx(half["size_rmse"], abs=1e-5)
    assert apart["kind_nll"] == pytest.approx(half["kind_nll"], abs=1e-5)
    assert apart["size_rmse"] == pytest.approx(whole["size_rmse"], abs=1e-5)


@pytest.mark.slow
def test_added_metrics_see_the_means_by_name(model):
    mc = ibnn.MonteCarlo(model, samples=4, seed=0)
    mc.compile(metrics={"size": ["mae"]})
    scores = mc.evaluate(X, Y, verbose=0, return_dict=True)
    found = [value for key, value in scores.items() if key.endswith(("mae", "absolute_error"))]
    error = np.abs(mc.predict(X, verbose=0)["size"]["mean"][:, 0] - Y["size"]).mean()
    assert found == [pytest.approx(error, abs=1e-5)]


@pytest.mark.slow
def test_files_hold_heads_and_functions(model, tmp_path):
    mc = ibnn.MonteCarlo(network(), samples=5, seed=0, head=HEADS)
    mc.save(tmp_path / "mc.keras")
    loaded = keras.saving.load_model(tmp_path / "mc.keras")
    before, after = (x.predict(X, verbose=0) for x in (mc, loaded))
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), before, after
    )


def test_an_ensemble_has_several_outputs_too(eagerly):
    members = [ibnn.to_deterministic(network()) for _ in range(2)]
    for weight in members[1].weights:
        weight.assign(weight * 0.7 + 0.1)
    found = ibnn.MonteCarlo(ibnn.DeepEnsemble(members), head=HEADS).predict(X, verbose=0)
    right = [numpy(member(X)["size"]) for member in members]
    np.testing.assert_allclose(found["size"]["mean"], np.mean(right, axis=0), atol=1e-6)
    np.testing.assert_allclose(found["size"]["epistemic"], np.var(right, axis=0), atol=1e-6)
    rates = [np.exp(numpy(member(X)["count"])) for member in members]
    np.testing.assert_allclose(found["count"]["aleatoric"], np.mean(rates, axis=0), rtol=1e-5)


@REGISTER
class TwoHeads(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kind, self.size = layers.Dense(3, "softmax"), layers.Dense(1)

    def call(self, x):
        return {"kind": self.kind(x), "size": self.size(x)}


def test_a_subclass_has_several_outputs_by_its_heads(eagerly):
    plain = TwoHeads()
    plain(X)
    sto = ibnn.to_stochastic(plain, ibnn.NormalAffine(initial_scale=0.3, seed=0), train_size=20)
    heads = {"kind": "softmax", "size": "point"}
    mc = ibnn.MonteCarlo(sto, samples=5, seed=0, head=heads, return_samples=True)
    found = mc.predict(X, verbose=0)
    assert found["kind"]["samples"].shape == (20, 5, 3)
    assert found["size"]["epistemic"].min() > 0
    with pytest.raises(ValueError, match=r"several outputs: give `head` for each, like .*'kind'"):
        ibnn.MonteCarlo(sto, samples=2, head="softmax").predict(X, verbose=0)
    with pytest.raises(ValueError, match=r"outputs are \['kind', 'size'\], but `head` has"):
        ibnn.MonteCarlo(sto, samples=2, head={"kind": "softmax"}).predict(X, verbose=0)


def test_a_loss_for_some_outputs_is_enough():
    model = network()
    model.compile("adam", {"kind": LOSS["kind"], "size": LOSS["size"]})
    with pytest.raises(ValueError, match="unknown what the output of model 'count' means"):
        ibnn.MonteCarlo(model)
    heads = {"count": poisson, "kind": None, "size": None}
    assert sorted(ibnn.MonteCarlo(model, samples=2, head=heads).at_mean(X)) == sorted(Y)


@REGISTER
class Pair(keras.Model):
    """Two outputs in a tuple."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(1), layers.Dense(1)

    def call(self, x):
        return self.first(x), self.second(x) + 10


def test_outputs_of_a_subclass_in_a_tuple_go_by_their_place(eagerly):
    plain = Pair()
    plain(X)
    sto = ibnn.to_stochastic(plain, ibnn.NormalAffine(seed=0), train_size=20)
    mc = ibnn.MonteCarlo(sto, samples=2, seed=0, head={"1": "point", "0": "point"})
    scores = mc.evaluate(X, [np.zeros(20), 10 + np.zeros(20)], verbose=0, return_dict=True)
    assert scores["0_rmse"] < 5
    assert scores["1_rmse"] < 5


def test_an_output_may_be_called_mean(eagerly):
    inputs = keras.Input((4,))
    parts = {"mean": layers.Dense(1)(inputs), "spread": layers.Dense(1)(inputs)}
    model = ibnn.to_stochastic(keras.Model(inputs, parts), ibnn.NormalAffine(), train_size=20)
    mc = ibnn.MonteCarlo(model, samples=2, head="point")
    assert mc.predict(X, verbose=0)["mean"]["mean"].shape == (20, 1)


@pytest.mark.skipif(JAX, reason="TensorFlow writes SavedModels")
def test_an_export_has_the_outputs_side_by_side(model, tmp_path):
    import tensorflow as tf

    mc = ibnn.MonteCarlo(model, samples=5, seed=0)
    path = ibnn.export(mc, tmp_path / "1")
    served = tf.saved_model.load(str(path)).signatures["serve"](features=tf.constant(X))
    for name, part in mc.predict(X, verbose=0).items():
        for key, value in part.items():
            np.testing.assert_allclose(served[f"{name}_{key}"], value, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": {"kind": "softmax"}}, "`head` must be a dict with an entry for each of"),
        ({"from_logits": {"kind": True}}, "`from_logits` must be a dict with an entry for each"),
        ({"head": {**HEADS, "size": "sofmax"}}, "`head` must be"),
    ],
)
def test_wrong_options_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        ibnn.MonteCarlo(model, **options)


def test_wrong_targets_are_refused(model):
    mc = ibnn.MonteCarlo(model, samples=2)
    with pytest.raises(ValueError, match=r"`y` must be a dict with an entry for each of \['count'"):
        mc.evaluate(X, {"kind": Y["kind"]}, verbose=0)
    with pytest.raises(ValueError, match="one output"):
        ibnn.MonteCarlo(alone(model, "kind"), head={"kind": "softmax"})


@pytest.mark.parametrize("what", ["laplace", "temperature", "conformal", "ood", "calibrate"])
def test_what_is_for_one_output_says_so(model, what):
    plain = ibnn.to_deterministic(model)
    tries = {
        "laplace": lambda: ibnn.Laplace(plain).fit(X, Y["kind"]),
        "temperature": lambda: ibnn.TemperatureScaling(plain).fit(X, Y["kind"]),
        "conformal": lambda: ibnn.Conformal(ibnn.MonteCarlo(model, samples=2)),
        "ood": lambda: ibnn.OODDetector(ibnn.MonteCarlo(model, samples=2), score="entropy"),
        "calibrate": lambda: ibnn.calibrate(plain, (X, Y["kind"]), validation=(X, Y["kind"])),
    }
    with pytest.raises(ValueError, match="one (output|tensor)"):
        tries[what]()


# -------------------------------------------------------------------------------------- likelihoods


def mixture(x):
    logits, locs, raw = ops.split(x, 3, axis=-1)
    parts = ibnn.tfd.Normal(locs, ops.softplus(raw))
    return ibnn.tfd.MixtureSameFamily(ibnn.tfd.Categorical(logits=logits), parts)


def negative_binomial(x):
    return ibnn.tfd.NegativeBinomial(total_count=3.0, logits=x)


def triangular(x):
    scale = ibnn.tfd.MultivariateNormalTriL
    zero = ops.zeros_like(x[..., 2])
    rows = [[ops.exp(x[..., 2]), zero], [x[..., 3], ops.exp(x[..., 4])]]
    matrix = ops.stack([ops.stack(row, axis=-1) for row in rows], axis=-2)
    return scale(x[..., :2], matrix)


OUTPUTS = DATA.normal(size=(20, 6)).astype("float32")


def test_poisson_loss():
    y, x = Y["count"], OUTPUTS[:, :1]
    right = -scipy.stats.poisson.logpmf(y, np.exp(x[:, 0].astype("float64")))
    loss = ibnn.layers.DistributionNLL(poisson, reduction=None)
    for target in (y, y[:, None]):
        np.testing.assert_allclose(loss(target, x), right, rtol=1e-5)


def test_losses_of_independent_numbers_are_summed():
    y, x = DATA.poisson(2, (20, 3)), OUTPUTS[:, :3]
    right = -scipy.stats.poisson.logpmf(y, np.exp(x.astype("float64"))).sum(axis=-1)
    found = ibnn.layers.DistributionNLL(poisson, reduction=None)(y, x)
    np.testing.assert_allclose(found, right, rtol=1e-5)


def test_negative_binomial_loss():
    y, x = Y["count"], OUTPUTS[:, :1]
    p = 1 / (1 + np.exp(x[:, 0].astype("float64")))
    right = -scipy.stats.nbinom.logpmf(y, 3.0, p)
    found = ibnn.layers.DistributionNLL(negative_binomial, reduction=None)(y, x)
    np.testing.assert_allclose(found, right, rtol=1e-4)


def test_mixture_loss():
    y = Y["size"]
    logits, locs, raw = np.split(OUTPUTS.astype("float64"), 3, axis=-1)
    weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    density = scipy.stats.norm.pdf(y[:, None], locs, np.log1p(np.exp(raw)))
    right = -np.log((weights * density).sum(axis=-1))
    for target in (y, y[:, None]):
        found = ibnn.layers.DistributionNLL(mixture, reduction=None)(target, OUTPUTS)
        np.testing.assert_allclose(found, right, rtol=1e-4)


def test_multivariate_loss():
    y, x = DATA.normal(size=(20, 2)).astype("float32"), OUTPUTS[:, :5]
    right = []
    for row, target in zip(x.astype("float64"), y, strict=True):
        factor = np.array([[np.exp(row[2]), 0], [row[3], np.exp(row[4])]])
        right.append(-scipy.stats.multivariate_normal.logpdf(target, row[:2], factor @ factor.T))
    found = ibnn.layers.DistributionNLL(triangular, reduction=None)(y, x)
    np.testing.assert_allclose(found, right, rtol=1e-3)


def first_column(x):
    return ibnn.tfd.Poisson(log_rate=x[:, :1])


@pytest.mark.parametrize("make", [poisson, negative_binomial, mixture, first_column])
def test_the_averaged_density_is_that_of_all_draws(eagerly, make):
    keras.utils.set_random_seed(1)
    size = 6 if make is mixture else 1
    model = keras.Sequential([keras.Input((4,)), layers.Dense(size)])
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(initial_scale=0.5, seed=0), train_size=20)
    sto.compile("adam", ibnn.layers.DistributionNLL(make))
    y = Y["size"] if make is mixture else Y["count"]
    mc = ibnn.MonteCarlo(sto, samples=7, seed=0)
    found = mc.predict(X, verbose=0)
    assert found["parameters"].shape == (20, 7, size)
    each = [make(ops.convert_to_tensor(found["parameters"][:, i])) for i in range(7)]
    shape = found["mean"].shape
    means = np.stack([numpy(x.mean()).reshape(shape) for x in each])
    variances = np.stack([numpy(x.variance()).reshape(shape) for x in each])
    np.testing.assert_allclose(found["mean"], means.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["epistemic"], means.var(axis=0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found["aleatoric"], variances.mean(axis=0), rtol=1e-4)
    target = ops.convert_to_tensor(y if make is mixture else y[:, None])
    density = np.mean([np.exp(numpy(x.log_prob(target))) for x in each], axis=0)
    scores = mc.evaluate(X, y, verbose=0, return_dict=True)
    assert scores["nll"] == pytest.approx(-np.log(density).mean(), rel=1e-4)
    assert scores["loss"] == pytest.approx(scores["nll"], rel=1e-5)


@pytest.mark.slow
def test_training_lowers_the_loss_of_counts():
    keras.utils.set_random_seed(0)
    x = DATA.normal(size=(200, 2)).astype("float32")
    y = DATA.poisson(np.exp(x[:, 0])).astype("float32")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(seed=0), train_size=200)
    sto.compile(keras.optimizers.Adam(0.05), ibnn.layers.DistributionNLL(poisson))
    history = sto.fit(x, y, epochs=10, verbose=0).history["loss"]
    assert history[-1] < history[0] - 0.1


def test_what_is_wrong_with_a_likelihood_is_said(eagerly):
    with pytest.raises(ValueError, match="`make` must be a function"):
        ibnn.layers.DistributionNLL("poisson")
    with pytest.raises(ValueError, match="`make` must return a TFP distribution"):
        ibnn.layers.DistributionNLL(lambda x: x)(np.ones(20), OUTPUTS[:, :2])
    with pytest.raises(ValueError, match="targets must have the shape"):
        ibnn.layers.DistributionNLL(poisson)(np.ones((20, 3)), OUTPUTS[:, :2])
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.warns(UserWarning, match="no stochastic layer"):
        mc = ibnn.MonteCarlo(model, head=lambda x: ibnn.tfd.LogitNormal(x, 1.0))
    with pytest.raises(ValueError, match="LogitNormal has no mean"):
        mc.predict(X, verbose=0)
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=20)
    with pytest.raises(ValueError, match="`interval` is not for TFP"):
        ibnn.MonteCarlo(sto, samples=2, head=poisson, interval=0.9).predict(X, verbose=0)


# ------------------------------------------------------------------------------------------ padding

IDS = DATA.integers(1, 9, (12, 7))
for row, length in zip(IDS, DATA.integers(2, 8, 12), strict=True):
    row[length:] = 0
KEPT = IDS > 0
TAGS = DATA.integers(0, 3, (12, 7))


@pytest.fixture(scope="module")
def tagger():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    x = layers.LSTM(5, return_sequences=True)(x)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    return ibnn.to_stochastic(model, ibnn.NormalAffine(initial_scale=0.3, seed=0), train_size=12)


@pytest.mark.parametrize("weighted", [False, True])
def test_padding_does_not_count(request, tagger, weighted):
    if weighted:  # the other case is compiled
        request.getfixturevalue("eagerly")
    mc = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    weight = DATA.random(12).astype("float32") if weighted else None
    each = (np.ones(12) if weight is None else weight)[:, None] * np.ones(7)
    mean = mc.predict(IDS, verbose=0)["mean"]
    nll = -np.log(np.take_along_axis(mean, TAGS[..., None], -1)[..., 0])
    right = mean.argmax(axis=-1) == TAGS
    scores = mc.evaluate(IDS, TAGS, sample_weight=weight, verbose=0, return_dict=True)
    average = {"weights": each[KEPT]}
    small = mc.evaluate(IDS, TAGS, 5, 0, sample_weight=weight, return_dict=True)
    for key in ("nll", "accuracy", "brier", "ece"):  # whatever the batches
        assert small[key] == pytest.approx(scores[key], rel=1e-4)
    assert scores["nll"] == pytest.approx(np.average(nll[KEPT], **average), rel=1e-4)
    assert scores["accuracy"] == pytest.approx(np.average(right[KEPT], **average), rel=1e-4)
    if not weighted:
        assert scores["loss"] == pytest.approx(scores["nll"], rel=1e-4)
        others = mc.evaluate(IDS, np.where(KEPT, TAGS, 0), verbose=0, return_dict=True)
        assert others == pytest.approx(scores, rel=1e-5)  # of what is padding nothing matters


@pytest.mark.slow
def test_longer_batches_have_the_same_scores(tagger):
    mc = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    longer = np.pad(IDS, ((0, 0), (0, 4))), np.pad(TAGS, ((0, 0), (0, 4)))
    scores = [
        mc.evaluate(*pair, batch_size=12, verbose=0, return_dict=True)
        for pair in ((IDS, TAGS), longer)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.slow
def test_weights_of_steps_and_added_metrics(tagger):
    mc = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    mc.compile(metrics=["sparse_categorical_accuracy"])
    weight = DATA.random((12, 7)).astype("float32")
    mean = mc.predict(IDS, verbose=0)["mean"]
    nll = -np.log(np.take_along_axis(mean, TAGS[..., None], -1)[..., 0])
    scores = mc.evaluate(IDS, TAGS, sample_weight=weight, verbose=0, return_dict=True)
    right = np.average(nll[KEPT], weights=weight[KEPT])
    assert scores["nll"] == pytest.approx(right, rel=1e-4)
    accuracy = (mean.argmax(axis=-1) == TAGS)[KEPT].mean()
    assert scores["sparse_categorical_accuracy"] == pytest.approx(accuracy, rel=1e-4)


@pytest.mark.slow
def test_several_outputs_each_have_their_padding(tagger):
    pooled = layers.GlobalAveragePooling1D()(tagger.outputs[0])
    model = keras.Model(tagger.input, {"tags": tagger.outputs[0], "one": layers.Dense(1)(pooled)})
    heads = {"tags": "softmax", "one": "point"}
    mc = ibnn.MonteCarlo(model, samples=6, seed=0, head=heads)
    alone = ibnn.MonteCarlo(tagger, samples=6, seed=0)
    right = alone.evaluate(IDS, TAGS, batch_size=12, verbose=0, return_dict=True)
    y = {"tags": TAGS, "one": np.zeros(12)}
    scores = mc.evaluate(IDS, y, batch_size=12, verbose=0, return_dict=True)
    assert scores["tags_nll"] == pytest.approx(right["nll"], rel=1e-4)
    size = mc.predict(IDS, verbose=0)["one"]["mean"]
    assert scores["one_rmse"] == pytest.approx(np.sqrt((size**2).mean()), rel=1e-4)


@pytest.mark.once
def test_nested_outputs_are_refused():
    inputs = keras.Input((4,))
    nested = {"a": {"b": layers.Dense(2)(inputs)}, "c": layers.Dense(3)(inputs)}
    with pytest.raises(ValueError, match="nested"):
        ibnn.MonteCarlo(keras.Model(inputs, nested))


@pytest.mark.parametrize("posterior", [ibnn.NormalAffine, ibnn.MeanField])
def test_layers_of_two_precisions_train(eagerly, posterior):
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, dtype="float64")(inputs)
    plain = keras.Model(inputs, layers.Dense(3, "softmax", dtype="float32")(hidden))
    model = ibnn.to_stochastic(plain, posterior(), train_size=20)
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(X, Y["kind"], verbose=0).history
    assert np.isfinite(history["loss"]).all()

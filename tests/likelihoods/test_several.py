"""Several outputs, each with a likelihood of its own, in predictions and scores."""

import keras
import numpy as np
import pytest
import scipy.stats
from keras import layers

import tfp_ibnn as ibnn
from tests.layer_checklist import numpy
from tests.likelihoods.tools import REGISTER, X, Y, poisson
from tests.monte_carlo_tools import JAX

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


@pytest.mark.parametrize("what", ["laplace", "temperature", "conformal", "ood"])
def test_what_is_for_one_output_says_so(model, what):
    plain = ibnn.to_deterministic(model)
    tries = {
        "laplace": lambda: ibnn.Laplace(plain).fit(X, Y["kind"]),
        "temperature": lambda: ibnn.TemperatureScaling(plain).fit(X, Y["kind"]),
        "conformal": lambda: ibnn.Conformal(ibnn.MonteCarlo(model, samples=2)),
        "ood": lambda: ibnn.OODDetector(ibnn.MonteCarlo(model, samples=2), score="entropy"),
    }
    with pytest.raises(ValueError, match="one (output|tensor)"):
        tries[what]()


# ------------------------------------------------------------------------------------------ padding


@pytest.mark.once
def test_nested_outputs_are_refused():
    inputs = keras.Input((4,))
    nested = {"a": {"b": layers.Dense(2)(inputs)}, "c": layers.Dense(3)(inputs)}
    with pytest.raises(ValueError, match="nested"):
        ibnn.MonteCarlo(keras.Model(inputs, nested))

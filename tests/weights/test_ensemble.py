"""An ensemble of given models is averaged, saved and exported like any other posterior."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.weights.members import JAX, LABELS, LOSS, SLOW, SMALL, X, Y, dropping, small


def network(seed, units=4, activation="relu"):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            keras.layers.Conv2D(5, 3, activation=activation),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(units),
        ]
    )
    model.compile("sgd", LOSS)
    return model


def trained(seed):
    """Return a network whose batch-norm statistics are its own."""
    model = network(seed)
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        least = 0.5 if weight.path.endswith("variance") else -0.2
        weight.assign(rng.uniform(least, least + 0.4, weight.shape))
    return model


@pytest.fixture(scope="module")
def models():
    return [trained(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def by_hand(models):
    """The probabilities of each model, (models, examples, classes)."""
    return np.stack([ops.convert_to_numpy(ops.softmax(model(X))) for model in models])


@pytest.fixture(scope="module")
def monte_carlo(models):
    return ibnn.MonteCarlo(ibnn.DeepEnsemble(models))


def test_it_is_the_average_bit_by_bit(monte_carlo, by_hand):
    for number, expected in enumerate(by_hand):
        one = ops.convert_to_numpy(monte_carlo.draw(X, number)["mean"])
        np.testing.assert_array_equal(one, expected)
    found = ops.convert_to_numpy(monte_carlo(X)["mean"])
    if JAX:  # compiles every loop, and rounds otherwise in it
        np.testing.assert_allclose(found, by_hand.mean(axis=0), rtol=1e-6)
    else:
        np.testing.assert_array_equal(found, by_hand.sum(axis=0) / np.float32(3))


def test_compiled_it_says_the_same(monte_carlo, by_hand):
    found = monte_carlo.predict(X, batch_size=7, verbose=0)
    np.testing.assert_allclose(found["mean"], by_hand.mean(axis=0), atol=3e-7)
    np.testing.assert_allclose(found["variance"], by_hand.var(axis=0), atol=3e-7)
    gap = found["entropy"] - found["aleatoric"]
    np.testing.assert_allclose(found["epistemic"], gap, atol=2e-6)
    assert found["epistemic"].min() > 0


def test_all_models_are_taken_but_no_more(eagerly, models, by_hand):
    ensemble = ibnn.DeepEnsemble(models)
    assert ibnn.MonteCarlo(ensemble).samples == 3
    two = ibnn.MonteCarlo(ensemble, samples=2)
    assert two.samples == 2
    found = two.predict(X, verbose=0)["mean"]
    np.testing.assert_allclose(found, by_hand[:2].mean(axis=0), atol=3e-7)


@pytest.mark.parametrize("chunk_size", [pytest.param(1, marks=SLOW), 2])
def test_chunks(eagerly, models, by_hand, chunk_size):
    mc = ibnn.MonteCarlo(ibnn.DeepEnsemble(models), chunk_size=chunk_size, return_samples=True)
    found = mc.predict(X, verbose=0)
    np.testing.assert_allclose(found["samples"], np.moveaxis(by_hand, 0, 1), atol=3e-7)
    streamed = ibnn.MonteCarlo(ibnn.DeepEnsemble(models), chunk_size=chunk_size)
    np.testing.assert_allclose(
        streamed.predict(X, verbose=0)["mean"], by_hand.mean(axis=0), atol=3e-7
    )


def test_scores_are_those_of_the_average(eagerly, monte_carlo, by_hand):
    scores = monte_carlo.evaluate(X, Y, verbose=0, return_dict=True)
    nll = -np.log(by_hand.mean(axis=0)[np.arange(20), Y]).mean()
    assert scores["nll"] == pytest.approx(nll, rel=1e-5)
    assert scores["loss"] == pytest.approx(nll, rel=1e-5)  # not the loss of a model inside


def test_the_weights_are_copies(models):
    ensemble = ibnn.DeepEnsemble(models)
    before = ops.convert_to_numpy(ibnn.MonteCarlo(ensemble)(X)["mean"])
    old = [model.get_weights() for model in models]
    for model in models:
        model.set_weights([w + 1 for w in model.get_weights()])
    after = ops.convert_to_numpy(ibnn.MonteCarlo(ensemble)(X)["mean"])
    for model, weights in zip(models, old, strict=True):
        model.set_weights(weights)
    np.testing.assert_array_equal(before, after)


def test_a_file_holds_all_sets(monte_carlo, tmp_path):
    monte_carlo.save(tmp_path / "ensemble.keras")
    loaded = keras.models.load_model(tmp_path / "ensemble.keras")
    np.testing.assert_array_equal(
        ops.convert_to_numpy(loaded(X)["mean"]), ops.convert_to_numpy(monte_carlo(X)["mean"])
    )


@pytest.mark.skipif(JAX, reason="TensorFlow writes SavedModels")
def test_export(monte_carlo, by_hand, tmp_path):
    import tensorflow as tf

    ibnn.export(monte_carlo, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures
    found = served["serve"](inputs=tf.constant(X))["mean"].numpy()
    np.testing.assert_allclose(found, by_hand.mean(axis=0), atol=3e-7)
    for number in (0, 2, 4):
        one = served["sample"](inputs=tf.constant(X), seed=tf.constant(number))["mean"].numpy()
        np.testing.assert_allclose(one, by_hand[number % 3], atol=3e-7)
    first = served["deterministic"](inputs=tf.constant(X))["mean"].numpy()
    np.testing.assert_allclose(first, by_hand[0], atol=3e-7)


def test_regression_and_temperature(eagerly, models, by_hand):
    labels = np.where(np.arange(20) % 3, by_hand.mean(axis=0).argmax(axis=1), Y)
    scaled = ibnn.TemperatureScaling(ibnn.MonteCarlo(ibnn.DeepEnsemble(models))).fit(X, labels)
    assert scaled.predict(X, verbose=0).shape == (20, 4)
    mc = ibnn.MonteCarlo(ibnn.DeepEnsemble(models), head="point")
    found = mc.predict(X, verbose=0)
    raw = np.stack([ops.convert_to_numpy(model(X)) for model in models])
    np.testing.assert_allclose(found["mean"], raw.mean(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["epistemic"], raw.var(axis=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [], "list of built Keras models"),
        (lambda: [keras.layers.Dense(2)], "must be a Keras model"),
        (lambda: [keras.Sequential([keras.layers.Dense(2)])], "is not built"),
        (lambda: [network(0), network(1, units=3)], "the weights of"),
        (lambda: [network(0), network(1, activation="tanh")], "`activation` of 'conv2d"),
        (lambda: [network(0), ibnn.DeepEnsemble([network(1)])], "use ibnn.WeightMixture"),
        (
            lambda: [
                ibnn.to_stochastic(network(0), posterior, train_size=10)
                for posterior in (ibnn.NormalAffine(), ibnn.NormalAffine(prior_scale=0.1))
            ],
            "`prior_scale` of",
        ),
    ],
)
def test_what_is_not_an_ensemble(make, words):
    with pytest.raises(ValueError, match=words):
        ibnn.DeepEnsemble(make())


@pytest.mark.parametrize("option", [{"sampling": "qmc"}, {"independent": True}, {"dropout": True}])
def test_options_of_noise_are_refused(models, option):
    with pytest.raises(ValueError, match=f"`{next(iter(option))}` must be"):
        ibnn.MonteCarlo(ibnn.DeepEnsemble(models), **option)


@pytest.mark.slow
def test_stochastic_members_are_a_mixture(stochastic_models):
    """Draw s is draw s of the member s mod 2 by itself."""
    ensemble = ibnn.DeepEnsemble(stochastic_models)
    mc = ibnn.MonteCarlo(ensemble, samples=3, seed=3)
    assert mc.samples == 4  # two of each member
    members = [ibnn.MonteCarlo(model, samples=3, seed=3) for model in stochastic_models]
    draws = [ops.convert_to_numpy(members[s % 2].draw(SMALL, s)["mean"]) for s in range(4)]
    assert np.std(draws[::2], axis=0).min() > 0
    for number, expected in enumerate(draws):
        one = ops.convert_to_numpy(mc.draw(SMALL, number)["mean"])
        np.testing.assert_allclose(one, expected, atol=3e-7)
    found = ops.convert_to_numpy(mc(SMALL)["mean"])
    np.testing.assert_allclose(found, np.mean(draws, axis=0), atol=1e-6)
    first = ops.convert_to_numpy(members[0].at_mean(SMALL)["mean"])
    np.testing.assert_allclose(ops.convert_to_numpy(mc.at_mean(SMALL)["mean"]), first, atol=1e-6)


@pytest.mark.once
def test_all_members_are_drawn_as_often(eagerly, stochastic_models):
    """Whatever the number of draws: as members are equally likely."""
    mixture = ibnn.WeightMixture([stochastic_models[0], small(7), small(8)])
    mc = ibnn.MonteCarlo(mixture, samples=4, seed=3, return_samples=True)
    assert mc.samples == 6
    found = mc.predict(SMALL, verbose=0)
    for number in (1, 2):
        member = ops.convert_to_numpy(ops.softmax(mixture.members[number].network(SMALL)))
        np.testing.assert_allclose(found["samples"][:, number], member, atol=1e-6)
        np.testing.assert_allclose(found["samples"][:, number + 3], member, atol=1e-6)
    ensemble = ibnn.DeepEnsemble(stochastic_models)
    assert [ibnn.MonteCarlo(ensemble, samples=n).samples for n in (1, 2, 3)] == [2, 2, 4]
    assert ibnn.MonteCarlo(ibnn.WeightMixture([small(7), small(8)]), samples=1).samples == 2


@pytest.mark.once
def test_a_file_holds_stochastic_members(eagerly, stochastic_models, tmp_path):
    mc = ibnn.MonteCarlo(ibnn.DeepEnsemble(stochastic_models), samples=4, seed=3)
    expected = ops.convert_to_numpy(mc(SMALL)["mean"])
    mc.save(tmp_path / "ensemble.keras")
    loaded = keras.models.load_model(tmp_path / "ensemble.keras")
    np.testing.assert_allclose(ops.convert_to_numpy(loaded(SMALL)["mean"]), expected, atol=1e-6)


def test_training(eagerly, capsys):
    builds, epochs = [], []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))

    def train(**options):
        return ibnn.DeepEnsemble.train(
            lambda seed: small(seed, builds=builds), 2, SMALL, LABELS, epochs=2, **options
        )

    ensemble = train(seed=4, callbacks=[count])
    assert builds == [4, 5]
    assert len(epochs) == 4
    assert capsys.readouterr().out.count("Member") == 2
    again = train(seed=4, verbose=0, callbacks=lambda seed: [count])
    assert capsys.readouterr().out == ""
    kernels = ops.convert_to_numpy(ensemble.weights[0])
    np.testing.assert_array_equal(kernels, ops.convert_to_numpy(again.weights[0]))
    assert len(np.unique(kernels[:, 0, 0])) == 2
    keras.utils.set_random_seed(5)
    by_hand = small(5)
    by_hand.fit(SMALL, LABELS, epochs=2, verbose=0)
    np.testing.assert_array_equal(by_hand.get_weights()[0], kernels[1])


@pytest.mark.once
def test_functions_need_not_take_the_seed(eagerly):
    options = {"epochs": 1, "verbose": 0, "seed": 4}
    expected = ibnn.DeepEnsemble.train(small, 2, SMALL, LABELS, **options)
    options["callbacks"] = lambda: [keras.callbacks.Callback()]
    found = ibnn.DeepEnsemble.train(lambda: small(0), 2, SMALL, LABELS, **options)
    for one, other in zip(expected.weights, found.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.once
def test_a_member_that_diverges_is_left_out(eagerly):
    def build(seed):
        return small(seed, rate=1e38 if seed == 1 else 0.1)

    with pytest.warns(UserWarning, match="seed 1 diverged"):
        ensemble = ibnn.DeepEnsemble.train(build, 3, 1e3 * SMALL, LABELS, epochs=3, verbose=0)
    assert ensemble.count == 2
    with (
        pytest.warns(UserWarning, match="diverged"),
        pytest.raises(ArithmeticError, match=r"seeds \[1\]"),
    ):
        ibnn.DeepEnsemble.train(build, 1, 1e3 * SMALL, LABELS, seed=1, epochs=3, verbose=0)


@pytest.mark.once
def test_an_interrupt_keeps_the_finished_members(eagerly):
    class Interrupt(keras.callbacks.Callback):
        def __init__(self, seed):
            super().__init__()
            self.seed = seed

        def on_epoch_end(self, epoch, logs=None):
            if self.seed == 2:
                raise KeyboardInterrupt

    def train(seed):
        options = {"callbacks": lambda seed: [Interrupt(seed)], "verbose": 0}
        return ibnn.DeepEnsemble.train(small, 4, SMALL, LABELS, seed=seed, **options)

    with pytest.warns(UserWarning, match="2 of 4 members"):
        assert train(seed=0).count == 2
    with pytest.raises(KeyboardInterrupt):
        train(seed=2)


@pytest.mark.once
def test_what_build_must_return():
    for wrong in (lambda seed: None, lambda seed: keras.Sequential([keras.Input((5,))])):
        with pytest.raises(ValueError, match="compiled Keras model"):
            ibnn.DeepEnsemble.train(wrong, 2, SMALL, LABELS)
    with pytest.raises(ValueError, match=r"`build\(1\)` must return .* `rate` of"):
        ibnn.DeepEnsemble.train(dropping, 2, SMALL, LABELS, verbose=0)
    with pytest.raises(ValueError, match="`n` must be"):
        ibnn.DeepEnsemble.train(small, 0, SMALL, LABELS)


def test_members_may_be_built_by_their_training(eagerly):
    def build():
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4)])
        model.compile("sgd", LOSS)
        return model

    assert ibnn.DeepEnsemble.train(build, 2, X, Y, verbose=0).count == 2

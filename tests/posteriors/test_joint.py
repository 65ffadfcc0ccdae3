"""One posterior over the z of several layers."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops
from scipy.optimize import minimize

import tfp_ibnn as ibnn
from studies.joint_time import STUDY
from studies.joint_time import run as time_joint
from tests.layer_checklist import numpy, predict_without_noise, stir
from tests.whole.test_elbo import compiled, linear
from tfp_ibnn.diagnostics.targets import target_of

JAX = keras.backend.backend() == "jax"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network():
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(5, "tanh", name="first"), layers.Dense(3, "tanh", name="second")]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2, name="logits")])


def joint(posterior=None, **options):
    posterior = posterior or ibnn.JointPosterior(ibnn.NormalLowRank(2, beta=1.0))
    return ibnn.to_stochastic(network(), posterior, train_size=32, **options)


def whole(model):
    return ibnn.stochastic_layers(model)[0].posterior.joint


def trained(model, epochs=1, **options):
    model.compile(ibnn.two_speed(keras.optimizers.Adam(1e-3), 1e-2), LOGITS)
    model.optimizer.build(model.trainable_variables)
    return model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, **options).history


def averaged(model, samples, **options):
    options = {"seed": 0, "head": "softmax", "from_logits": True, **options}
    return ibnn.MonteCarlo(model, samples, **options)


def one_pass(model, x=X):
    """Return the z of each layer in a pass, the KL of it, and what it adds to the loss."""
    with ibnn.noise.scope() as forward_pass:
        model(x)
        z = [numpy(forward_pass.recall(layer)) for layer in ibnn.stochastic_layers(model)]
        return z, float(forward_pass.kl), float(sum(model.losses))


# --------------------------------------------------------------------------------- the mathematics


def test_a_block_diagonal_covariance_is_the_factorised_posterior():
    apart = ibnn.to_stochastic(network(), ibnn.NormalFull(beta=1.0), train_size=32)
    together = joint(ibnn.JointPosterior(ibnn.NormalFull(beta=1.0)))
    stir(apart, size=0.2)
    blocks = [layer.posterior for layer in ibnn.stochastic_layers(apart)]
    full = whole(together)
    assert [x.posterior.start for x in ibnn.stochastic_layers(together)] == [0, 4, 9]
    for name in ("loc", "raw_scale"):
        values = np.concatenate([numpy(getattr(block, name)) for block in blocks])
        getattr(full, name).assign(values)
    matrix, start = np.eye(12, dtype="float32"), 0
    for block in blocks:
        place = slice(start, start := start + block.channels)
        matrix[place, place] = numpy(block._matrix())
    full.lower.assign(matrix[np.tril_indices(12, -1)])

    _, kl, loss = one_pass(together)
    np.testing.assert_allclose([kl, loss], one_pass(apart)[1:], rtol=1e-5)
    noise = RNG.normal(size=(100, 12)).astype("float32")
    parts = np.split(noise, [4, 9], axis=1)
    draws = [numpy(block.transform(part).z) for block, part in zip(blocks, parts, strict=True)]
    np.testing.assert_allclose(
        numpy(full.transform(noise).z), np.concatenate(draws, axis=1), atol=1e-5
    )


def test_the_kl_is_that_of_the_whole_vector():
    model = joint(ibnn.JointPosterior(ibnn.NormalLowRank(2, beta=3.0, gamma=0.5)))
    stir(model, size=0.3)
    posterior = whole(model)
    q, tfd = posterior.distribution(), ibnn.tfd
    prior = tfd.MultivariateNormalDiag(np.ones(12, "float32"), np.full(12, 0.3, "float32"))
    expected, entropy = float(tfd.kl_divergence(q, prior)), float(q.entropy())
    _, kl, loss = one_pass(model)
    np.testing.assert_allclose(kl, expected, rtol=1e-4)
    np.testing.assert_allclose(loss, (3 * expected - 0.5 * entropy) / 32, rtol=1e-4)
    shares = [layer.summary() for layer in ibnn.stochastic_layers(model)]
    np.testing.assert_allclose(sum(float(x.kl) for x in shares), expected, rtol=1e-4)


def test_all_layers_have_parts_of_one_draw_per_example():
    model = joint(ibnn.JointPosterior(ibnn.NormalFull(initial_scale=0.3)))
    matrix = np.zeros((12, 12), "float32")
    matrix[4:, 0] = 10.0
    whole(model).lower.assign(matrix[np.tril_indices(12, -1)])
    (first, second, _), _, _ = one_pass(model, np.ones((500, 4), "float32"))
    assert np.corrcoef(first[:, 0], second[:, 2])[0, 1] > 0.98
    assert abs(np.corrcoef(first[:, 1], second[:, 2])[0, 1]) < 0.2
    assert np.unique(first[:, 0]).size > 490


def test_a_layer_called_twice_has_one_draw_and_one_kl():
    inputs, shared = keras.Input((4,)), layers.Dense(4)
    plain = keras.Model(inputs, layers.Dense(2)(shared(shared(inputs))))
    model = ibnn.to_stochastic(plain, ibnn.JointPosterior(ibnn.NormalFull(beta=1.0)), 32)
    stir(model)
    posterior = whole(model)
    assert posterior.channels == 8
    _, kl, loss = one_pass(model)
    np.testing.assert_allclose([kl, loss * 32], float(posterior.summary().kl), rtol=1e-5)


N, SIGMA, PRIOR = 20, 0.5, 0.5
GRID = np.linspace(-2.0, 5.0, 601)


def product_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 1))
    return x.astype("float32"), (1.5 * x + SIGMA * rng.normal(size=(N, 1))).astype("float32")


def log_joint(z1, z2):
    """log p(y, z) of y ~ N(z1 z2 x, sigma^2), which knows the product of the two z only."""
    x, y = (part.astype("float64").reshape(-1, 1, 1) for part in product_data())
    likelihood = -0.5 * np.sum((y - z1 * z2 * x) ** 2, axis=0) / SIGMA**2
    prior = -0.5 * ((z1 - 1) ** 2 + (z2 - 1) ** 2) / PRIOR**2
    constants = N * np.log(SIGMA) + 2 * np.log(PRIOR) + (N / 2 + 1) * np.log(2 * np.pi)
    return likelihood + prior - constants


def elbo(loc, factor):
    """By Gauss-Hermite quadrature, exact here: the integrand is a polynomial of degree 4."""
    points, weights = np.polynomial.hermite_e.hermegauss(9)
    first, second = np.meshgrid(points, points)
    z1, z2 = np.einsum("ij,jkl->ikl", factor, [first, second]) + loc[:, None, None]
    expected = np.sum(np.outer(weights, weights) * log_joint(z1, z2)) / weights.sum() ** 2
    return expected + np.log(np.abs(np.linalg.det(factor))) + 1 + np.log(2 * np.pi)


def best_elbo(correlated):
    def negative(p):
        return -elbo(p[:2], np.array([[np.exp(p[2]), 0], [correlated * p[4], np.exp(p[3])]]))

    return -minimize(negative, [1.2, 1.2, -1.5, -1.5, -0.1]).fun


def test_it_reaches_a_higher_elbo_where_only_the_product_of_two_layers_is_known():
    values = log_joint(*np.meshgrid(GRID, GRID))
    top = values.max()
    evidence = np.log(np.sum(np.exp(values - top)) * (GRID[1] - GRID[0]) ** 2) + top
    x, y = product_data()
    steps, template = 400, ibnn.NormalFull(prior_scale=PRIOR, beta=1.0, seed=1)
    joint = ibnn.JointPosterior(template)
    inputs = keras.Input((1,))
    outputs = linear(joint, N, 1)(linear(joint, N, 1)(inputs))
    model = ibnn.StochasticModel(inputs, outputs, train_samples=64)
    compiled(model, SIGMA, 0.05, steps)
    data = [np.tile(part, (steps, 1)) for part in (x, y)]
    model.fit(*data, batch_size=N, steps_per_epoch=steps, shuffle=False, verbose=0)
    q = ibnn.stochastic_layers(model)[0].posterior.joint
    factor = np.linalg.cholesky(numpy(q.distribution().covariance()))
    found = elbo(numpy(q.loc).astype("float64"), factor)
    assert evidence > best_elbo(True) >= found - 1e-6
    assert found > evidence - 0.3
    assert found > best_elbo(False) + 0.7  # nats, over all posteriors of independent layers


# ------------------------------------------------------------------------------- in a model's life


@pytest.mark.parametrize(
    "make",
    [
        ibnn.NormalLowRank,
        pytest.param(ibnn.NormalPlanar1d, marks=pytest.mark.slow),
        pytest.param(ibnn.MixturePosterior, marks=pytest.mark.slow),
    ],
)
def test_train_log_predict_save_and_fold(make, tmp_path):
    plain, model = network(), joint(ibnn.JointPosterior(make(beta=2.0)), train_samples=2)
    np.testing.assert_allclose(predict_without_noise(model, X), numpy(plain(X)), atol=1e-5)
    before = [numpy(weight) for weight in whole(model).trainable_weights]
    callbacks = [ibnn.KLAnnealing(1), ibnn.PosteriorLog()]
    history = trained(model, 2, callbacks=callbacks)
    weights = whole(model).trainable_weights
    assert all(np.any(numpy(x) != y) for x, y in zip(weights, before, strict=True))
    assert all(weight.of_posterior for weight in weights)
    ids = [id(weight) for weight in model.weights]
    assert len(set(ids)) == len(ids)
    assert {id(weight) for weight in weights} < set(ids)
    assert history["beta"] == [0.0, 2.0]
    kl = sum(history[f"{name}/kl"][-1] for name in ("first", "second", "logits"))
    np.testing.assert_allclose(kl, float(np.mean(numpy(whole(model).summary().kl))), rtol=1e-4)

    mc = averaged(model, 6)
    prediction = {key: numpy(part) for key, part in mc(X).items()}
    np.testing.assert_allclose(numpy(mc(X[:20])["mean"]), prediction["mean"][:20], atol=1e-6)
    assert prediction["epistemic"].mean() > 0
    mc.save(tmp_path / "mc.keras")
    loaded = keras.saving.load_model(tmp_path / "mc.keras")
    np.testing.assert_allclose(numpy(loaded(X)["mean"]), prediction["mean"], atol=1e-6)
    parts = [layer.posterior for layer in ibnn.stochastic_layers(loaded)]
    assert len({id(part.joint) for part in parts}) == 1
    assert [x.path for x in loaded.inner.weights] == [x.path for x in model.weights]
    folded = ibnn.to_deterministic(model)
    np.testing.assert_allclose(numpy(folded(X)), predict_without_noise(model, X), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"sampling": "antithetic"}, {"sampling": "qmc"}, {"independent": True}],
    ids=["antithetic", "qmc", "independent"],
)
def test_every_way_of_sampling(options):
    model = joint(ibnn.JointPosterior(ibnn.NormalLowRank(2, initial_scale=0.3)))
    stir(model, size=0.1)
    means = [numpy(averaged(model, s, **options)(X[:4])["mean"]) for s in (256, 1024)]
    np.testing.assert_allclose(*means, atol=0.05)


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("float64", marks=pytest.mark.slow)]
)
def test_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        plain = network()
    finally:
        keras.config.set_dtype_policy("float32")
    model = ibnn.to_stochastic(plain, ibnn.JointPosterior(ibnn.NormalLowRank(2)), 32)
    wanted = "float64" if policy == "float64" else "float32"
    assert {x.dtype for x in whole(model).weights} == {wanted}
    assert np.isfinite(trained(model)["loss"]).all()


def test_the_noise_of_one_layer_can_be_switched_off():
    for inner in (ibnn.NormalAffine(), ibnn.NormalFull(), ibnn.NormalPlanar1d()):
        model = joint(ibnn.JointPosterior(inner))
        stir(model, size=0.1)
        ibnn.set_noise(model.get_layer("second"), on=False)
        (first, second, third), _, _ = one_pass(model)
        assert min(first.std(axis=0).min(), third.std(axis=0).min()) > 0
        mean = numpy(whole(model).mean())[4:9]
        np.testing.assert_allclose(second, np.broadcast_to(mean, second.shape), atol=1e-6)


def test_a_copy_shares_its_own_weights_and_not_those_of_the_original():
    model = joint()
    stir(model)
    copy = keras.models.clone_model(model)
    assert whole(copy) is not whole(model)
    copy.set_weights(model.get_weights())
    with ibnn.noise_off(model), ibnn.noise_off(copy):
        np.testing.assert_allclose(numpy(copy(X)), numpy(model(X)), atol=1e-6)
    whole(copy).loc.assign(np.zeros(12))
    assert np.all(numpy(whole(model).loc) != 0)
    members = averaged(ibnn.DeepEnsemble([model, joint()]), 4)
    assert numpy(members(X)["mean"]).shape == (32, 2)


def test_several_in_one_model_and_one_template_for_several_models():
    first = ibnn.JointPosterior(ibnn.NormalFull())
    second = ibnn.JointPosterior(ibnn.NormalLowRank(1))
    model = joint({"first": first, "second": second, "logits": first})
    parts = [layer.posterior for layer in ibnn.stochastic_layers(model)]
    assert parts[0].joint is parts[2].joint is not parts[1].joint
    assert [part.start for part in parts] == [0, 0, 4]
    assert [part.joint.channels for part in parts] == [7, 5, 7]
    mixed = joint({"first": first, "second": ibnn.NormalAffine(), "logits": first})
    assert whole(mixed).channels == 7
    assert whole(mixed) is not whole(model)
    assert numpy(mixed(X)).shape == (32, 2)


def test_freezing_and_the_default_prior():
    model = joint(ibnn.JointPosterior(ibnn.NormalFull()))
    ibnn.freeze(model, "stochastic")
    assert not whole(model).trainable_weights
    assert len(model.trainable_weights) == 6
    copy = type(model).from_config(model.get_config())
    assert not whole(copy).trainable_weights
    ibnn.unfreeze(model, "stochastic")
    assert len(whole(model).trainable_weights) == 3
    ibnn.freeze(model, "deterministic")
    assert len(model.trainable_weights) == 3
    deep = keras.Sequential([keras.Input((2,)), *(layers.Dense(2) for _ in range(15))])
    deep = ibnn.to_stochastic(deep, ibnn.JointPosterior(ibnn.NormalLowRank(1)), 5000)
    assert whole(deep).prior_scale == pytest.approx(0.2)
    assert float(whole(deep).beta) == pytest.approx(10.0)


def test_rows_cut_from_an_example_have_its_draw():
    inputs = keras.Input((3, 4))
    rows = layers.Reshape((3, 2))(layers.Dense(2)(layers.Dense(4)(inputs)))
    plain = keras.Model(inputs, rows)
    model = ibnn.to_stochastic(plain, ibnn.JointPosterior(ibnn.NormalFull(initial_scale=0.5)), 32)
    first, second = ibnn.stochastic_layers(model)
    with ibnn.noise.scope() as forward_pass:
        first(ops.ones((5, 3, 4)))
        second(ops.ones((15, 4)))
        z, drawn = (
            numpy(x) for x in (forward_pass.recall(second), forward_pass.recall(whole(model)).z)
        )
        np.testing.assert_allclose(z, np.repeat(drawn[:, 4:], 3, axis=0))
        with pytest.raises(ValueError, match="not merge examples"):
            second.posterior.draw(forward_pass, 2, (), first.noise_switch > 0.5)


def test_a_layer_and_the_cell_of_another():
    inputs = RNG.normal(size=(8, 3, 4)).astype("float32")
    plain = keras.Sequential([keras.Input((3, 4)), layers.Dense(3), layers.LSTM(2)])
    model = ibnn.to_stochastic(plain, ibnn.JointPosterior(ibnn.NormalFull(beta=1.0)), 8)
    stir(model)
    assert whole(model).channels == 4 + 3 + 2
    _, kl, loss = one_pass(model, inputs)
    np.testing.assert_allclose([kl, loss * 8], float(whole(model).summary().kl), rtol=1e-5)
    copy = type(model).from_config(model.get_config())
    assert whole(copy).channels == 9


@keras.saving.register_keras_serializable(package="test_joint")
class Own(keras.Model):
    """A model with a `call` of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.cells = layers.Dense(3), layers.LSTM(2)

    def call(self, x):
        return self.cells(self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cell", "own"])
def test_layers_inside_of_others(kind, tmp_path):
    x = RNG.normal(size=(8, 3, 4)).astype("float32")
    if kind == "own":
        plain = Own()
        plain(x)
    else:
        plain = keras.Sequential([keras.Input((3, 4)), layers.Dense(3), layers.LSTM(2)])
    model = ibnn.to_stochastic(plain, ibnn.JointPosterior(ibnn.NormalFull(beta=1.0)), 8)
    model.compile("adam", "mse")
    model.fit(x, x[:, 0, :2], verbose=0)
    mc = ibnn.MonteCarlo(model, samples=4, seed=0)
    mc.save(tmp_path / "mc.keras")
    loaded = keras.saving.load_model(tmp_path / "mc.keras")
    np.testing.assert_allclose(numpy(loaded(x)["mean"]), numpy(mc(x)["mean"]), atol=1e-6)
    folded = ibnn.to_deterministic(model)
    np.testing.assert_allclose(numpy(folded(x)), predict_without_noise(model, x), atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_resumes(tmp_path):
    def run(epochs, path):
        model = joint(ibnn.JointPosterior(ibnn.NormalPlanar1d(seed=1)))
        model.compile(keras.optimizers.Adam(1e-2), LOGITS)
        checkpoint = ibnn.Checkpoint(path)
        done = checkpoint.restore(model)
        options = {"shuffle": False, "verbose": 0, "initial_epoch": done, "epochs": epochs}
        model.fit(X, Y, callbacks=[checkpoint], **options)
        return [numpy(x) for x in model.variables]

    run(1, tmp_path / "a.npz")
    resumed, at_once = run(3, tmp_path / "a.npz"), run(3, tmp_path / "b.npz")
    for one, other in zip(resumed, at_once, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_a_file_loads_in_a_fresh_process(tmp_path):
    model = joint()
    stir(model)
    trained(model)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    code = """
import sys, keras, numpy as np, tfp_ibnn as ibnn
model = keras.saving.load_model(sys.argv[1] + "/model.keras")
mean = ibnn.MonteCarlo(model, samples=8, seed=0)(np.load(sys.argv[1] + "/x.npy"))["mean"]
np.save(sys.argv[1] + "/mean.npy", keras.ops.convert_to_numpy(mean))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    expected = numpy(ibnn.MonteCarlo(model, samples=8, seed=0)(X)["mean"])
    np.testing.assert_allclose(np.load(tmp_path / "mean.npy"), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.skipif(JAX, reason="a SavedModel is TensorFlow's")
def test_export(tmp_path):
    import tensorflow as tf

    model = joint()
    stir(model)
    mc = averaged(model, 4)
    ibnn.export(mc, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
    np.testing.assert_allclose(served(inputs=X)["mean"], numpy(mc(X)["mean"]), atol=1e-5)


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.once
def test_what_cannot_work_is_refused():
    for inner in (ibnn.MeanField(), ibnn.MNF(), ibnn.JointPosterior(ibnn.NormalFull()), "full"):
        with pytest.raises(ValueError, match="`posterior` must be over z"):
            ibnn.JointPosterior(inner)
    image = keras.Sequential([keras.Input((4, 4, 3)), layers.Conv2D(2, 3), layers.Conv2D(2, 2)])
    with pytest.raises(ValueError, match="`noise` must be 'channel' for a JointPosterior"):
        ibnn.to_stochastic(image, ibnn.JointPosterior(ibnn.NormalFull()), 32, noise="position")
    wide = keras.Sequential([keras.Input((8190,)), layers.Dense(4), layers.Dense(1)])
    with pytest.raises(ValueError, match="got 8194. Use NormalLowRank"):
        ibnn.to_stochastic(wide, ibnn.JointPosterior(ibnn.NormalFull()), 32)
    alone = ibnn.StochasticDense(2, posterior=ibnn.JointPosterior(ibnn.NormalFull()), train_size=9)
    with pytest.raises(ValueError, match="use to_stochastic"):
        alone(X)


def test_the_first_layer_that_is_on_counts_the_kl():
    model = joint()
    expected = one_pass(model)[2]
    assert expected > 0
    first, *_, last = ibnn.stochastic_layers(model)
    ibnn.set_noise(first, False)
    assert one_pass(model)[2] == pytest.approx(expected, rel=0.2)  # of other draws
    ibnn.set_noise(last, False)
    ibnn.set_noise(first, True)
    assert one_pass(model)[2] == pytest.approx(expected, rel=0.2)
    ibnn.set_noise(model, False)
    assert one_pass(model)[2] == 0


def test_a_reference_over_z_takes_the_prior_of_each_layer():
    targets = []
    for posterior in (ibnn.JointPosterior(ibnn.NormalAffine()), ibnn.NormalAffine()):
        model = joint(posterior)
        model.compile(loss=LOGITS)
        targets.append(target_of(model, (X, Y)))
    z = 1 + 0.1 * RNG.normal(size=(3, 12))
    np.testing.assert_allclose(targets[0].values(z), targets[1].values(z), rtol=1e-5)


def test_a_density_in_another_order_than_the_layers_is_refused():
    apart = {"first|logits": ibnn.JointPosterior(ibnn.NormalFull()), ".*": ibnn.NormalAffine()}
    with pytest.raises(ValueError, match="must follow each other"):
        ibnn.diagnostics.elbo(joint(apart), lambda z: z[:, 0])
    ibnn.diagnostics.elbo(joint(), lambda z: z[:, 0], draws=4)


def test_another_model_needs_another_template():
    template = ibnn.JointPosterior(ibnn.NormalAffine())
    for number in range(2):
        inputs = keras.Input((4,))
        x = ibnn.StochasticDense(3, posterior=template, train_size=9)(inputs)
        model = ibnn.StochasticModel(inputs, x)
        if number:
            with pytest.raises(ValueError, match="a new template for each model"):
                model(X)
        else:
            model(X)


# ------------------------------------------------------------------------------------ what it costs

STORED = Path(__file__).parents[2] / "results" / "benchmark"


@pytest.mark.slow
def test_steps_are_timed_and_elbos_are_bounds_of_one_evidence(monkeypatch, tmp_path):
    x = RNG.normal(size=(64, 28, 28, 1))
    loaded = (x, (x.mean(axis=(1, 2, 3)) > 0).astype("int32")), None
    monkeypatch.setattr(time_joint.data, "load", lambda *_: loaded)
    options = "--networks mlp --rounds 2 --steps 2 --images 64 --epochs 2 --json".split()
    rows = time_joint.execute(STUDY.parse([*options, str(tmp_path / "found.json")]))
    assert [row["posterior"] for row in rows] == list(time_joint.POSTERIORS)
    assert all(row["ratio"] > 0.5 and row["elbo"] < 0 for row in rows)
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == rows


@pytest.mark.once
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_the_page_has_the_stored_steps_and_elbos(backend):
    page = (STORED.parent / "joint" / "README.md").read_text(encoding="utf-8")
    stored = json.loads((STORED / f"joint_{backend}.json").read_text())
    # The script has moved since the run.
    command = stored["command"].replace("scripts/time_joint.py", "scripts/study.py joint_time")
    assert command in page
    for row in stored["rows"]:
        assert f"{row['ratio']:.2f} ± {row['noise']:.2f}" in page
        if backend == "tensorflow":
            assert f"{row['elbo']:.0f} ± {1.96 * row['elbo_error']:.0f}" in page

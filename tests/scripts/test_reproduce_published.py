import json
from collections import Counter

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import Scorer, Settings, pruning, read_posteriors, robustness
from lib.networks import mlp
from lib.plan import PLANS, label

pytestmark = pytest.mark.once

PUBLISHED = ("mnist_mlp", "lenet5", "cifar5")
OVER_WEIGHTS = {".*": {"posterior": "MeanField", "prior": {"prior": "Laplace", "scale": 0.1}}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_method_has_as_many_trials_and_the_same_epochs(name):
    plan = PLANS[name]
    trials = plan.trial_runs(0)
    counts = Counter(tuple(trial.split("/")[1:3]) for trial in trials)
    assert len(set(counts.values())) == 1
    assert {settings.validation for settings in trials.values()} == {plan.held_out}
    chosen = {tuple(trial.split("/")[1:3]): settings for trial, settings in trials.items()}
    for part in plan.parts:
        runs = plan.runs(part, list(plan.seeds), chosen=chosen)
        found, tried = {run.split("/")[2] for run in runs}, {method for _, method in counts}
        assert found < tried if part.startswith(("long", "free")) else found == tried
        assert len({settings.epochs for settings in runs.values()}) == 1
        assert not any(settings.validation for settings in runs.values())


def test_widths_are_those_of_the_parts():
    plan = PLANS["mnist_mlp"]
    chosen = {tuple(t.split("/")[1:3]): s for t, s in plan.trial_runs(0).items()}
    for width in (400, 800, 1200):
        runs = plan.runs(f"width_{width}", [0], chosen=chosen)
        assert {settings.model for settings in runs.values()} == {f"mlp_{width}_{width}"}


def test_a_trial_may_have_a_name():
    assert label({"use": ["x"], "beta": 2.0, "label": "wide"}) == "wide"
    assert label({"use": ["x"], "beta": 2.0}) == "beta=2"


def test_posteriors_over_weights_can_be_read():
    found = read_posteriors(json.dumps(OVER_WEIGHTS), {"prior_scale": 0.7, "beta": 2.0})[".*"]
    assert isinstance(found, ibnn.MeanField)
    assert isinstance(found.prior, ibnn.priors.Laplace)
    assert found.initial_beta == 2.0
    plain = read_posteriors('{".*": {"posterior": "MNF"}}', {"prior_scale": 0.7})[".*"]
    assert (type(plain), plain.prior_scale) == (ibnn.MNF, 0.7)
    for wrong, message in (("Laplas", "did you mean 'Laplace'"), (None, "unknown prior")):
        content = {".*": {"posterior": "MeanField", "prior": {"prior": wrong}}}
        with pytest.raises(ValueError, match=message):
            read_posteriors(json.dumps(content))


def test_the_wide_lenet():
    from lib.run import _network

    settings = Settings(model="lenet_7_5_11", posterior="none", classes=5, dropout=0.5)
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), "uint8")
    model = _network(settings, images)
    assert [getattr(model.get_layer(n), "filters", None) for n in ("conv1", "conv2")] == [7, 5]
    assert (model.get_layer("fc1").units, model.output_shape) == (11, (None, 5))
    with pytest.raises(ValueError, match="model"):
        Settings(model="lenet_7_5")


def mean_field():
    keras.utils.set_random_seed(0)
    det = mlp((6,), 3, hidden=(8,))
    sto = ibnn.to_stochastic(det, ibnn.MeanField(), train_size=100, seed=0)
    sto.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return sto


def test_pruning_removes_the_noisiest_weights_and_gives_them_back(eagerly):
    model, rng = mean_field(), np.random.default_rng(0)
    test = rng.normal(size=(50, 6)).astype("float32"), rng.integers(0, 3, 50)
    before, seen = model.get_weights(), []

    class Watched(Scorer):
        def score(self, *images):
            seen.append([layer.layer.get_weights()[0] for layer in ibnn.stochastic_layers(model)])
            return super().score(*images)

    found = pruning.measure(model, Watched(model, 4), test)
    assert [row["removed"] for row in found["pruned"]] == list(pruning.SHARES)
    weights = 6 * 8 + 8 * 3
    for row, kernels in zip(found["pruned"], seen, strict=True):
        gone = sum((kernel == 0).sum() for kernel in kernels)
        assert gone == pytest.approx(row["removed"] * weights, abs=1)
        assert 0 <= row["accuracy"] <= 1
    assert sum(found["histogram"]) == sum(found["snr"]) == weights
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    plain = ibnn.to_deterministic(model)
    assert list(pruning.measure(plain, None, None)) == ["histogram"]


def test_draws_of_the_shown_image_are_kept(eagerly):
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 28, 1), "uint8")
    labels = np.arange(30) % 10
    model = mlp((28, 28, 1), hidden=(4,), preprocessing=ibnn.data.preprocessing(images))
    model = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=100, seed=0)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options = {"dataset": "mnist", "foreign": (), "shifts": ("clean", "rotations"), "shown": 3}
    settings = robustness.Settings(**options, degrees=(90, 180), samples=4)
    assert settings.as_dict()["shown"] == 3
    rows = robustness.measure(Scorer(model, 4), settings, (images, labels), {}).rows
    assert [np.shape(row["draws"]) for row in rows] == [(4, 10)] * 3
    for row in rows:
        np.testing.assert_allclose(np.mean(row["draws"], axis=0), row["shown"], atol=1e-3)
        np.testing.assert_allclose(np.sum(row["shown"]), 1, atol=1e-3)

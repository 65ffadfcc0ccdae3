import json
from collections import Counter

import keras
import numpy as np
import pandas as pd
import pytest

import tfp_ibnn as ibnn
from lib import Scorer, Settings, pruning, read_posteriors, robustness, store, tables
from lib.networks import mlp
from lib.plan import PLANS, label
from lib.scoring import HELD_OUT

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


# Tables of records that are made up.


def record(method, seed, **changes):
    base = {"accuracy": 0.98 + 0.001 * seed, "nll": 0.1, "brier": 0.1, "ece": 0.01, "samples": 1}
    base |= {"budget": "width_400", "dataset": "mnist", "model": "mlp", "epochs": 1, "seconds": 3.0}
    name = f"{changes.get('budget', 'width_400')}/mnist/{method}/seed{seed}"
    return {**base, "method": method, "seed": seed, "name": name, "parameters": 100, **changes}


def test_errors_stand_beside_published_ones():
    rows = [record(m, seed) for m in ("deterministic", "mnf") for seed in (0, 1)]
    rows[2]["parameters"] = rows[3]["parameters"] = 103
    table = tables._errors(pd.DataFrame(rows)).set_index("method")
    assert table["error (%)"].to_list() == ["1.95 ± 0.07"] * 2
    assert table["published"].to_list() == ["1.83", "-"]
    assert table["more"].to_list() == ["0.00%", "3.00%"]


def test_the_table_of_pruning():
    rows = [{"removed": 0.0, "accuracy": 0.98}, {"removed": 0.98, "accuracy": 0.9}]
    pruned = [record("mean_field", s, weights={"pruned": rows}) for s in (0, 1)]
    frame = pd.DataFrame([record("mnf", 0, weights={"histogram": []}), *pruned])
    (row,) = tables._pruned(frame).to_dict("records")
    assert row == {"error (%) without": "mean_field", "0%": "2.00 ± 0.00", "98%": "10.00 ± 0.00"}


def test_the_table_of_rotations():
    turned = [{"shift": "rotation", "level": d, "entropy": d / 90} for d in (0, 15, 90)]
    records = [record("mnf", seed, evaluations={"rotation": turned}) for seed in (0, 1)]
    (row,) = tables._turned(store.evaluated(records)).to_dict("records")
    assert row == {"method": "mnf", "0°": "0.000 ± 0.000", "90°": "1.000 ± 0.000"}


def test_unknown_classes_and_the_ensemble(tmp_path):
    """The ensemble's entropies are those of the mean prediction, on known and unknown images."""
    (tmp_path / "probabilities").mkdir()
    rng, records = np.random.default_rng(0), []
    for seed in (0, 1):
        parts = {
            n: rng.dirichlet(np.ones(5), 60).astype("float16") for n in ("probabilities", "unknown")
        }
        arrays = {**parts, "labels": np.arange(60) % 5}
        np.savez(tmp_path / f"probabilities/equal-deterministic-seed{seed}.npz", **arrays)
        rows = {"unknown": [{"name": HELD_OUT, "entropy_auroc": 0.5 + seed / 10}]}
        records.append(record("deterministic", seed, budget="equal", evaluations=rows))
    (averaged,) = store._averaged(records, tmp_path)
    known, unknown = store.stored_entropies(averaged, tmp_path)
    assert averaged["entropy_auroc"] == pytest.approx(ibnn.metrics.auroc(known, unknown))
    single = [store.stored_entropies(one, tmp_path) for one in records]
    assert known.mean() > max(one[0].mean() for one in single)
    (tmp_path / "summary.json").write_text(json.dumps({"averaged": [averaged]}))
    found = tables._unknown(pd.DataFrame(records), {}, tmp_path).set_index("method")
    assert found.loc["deterministic", "AUROC of unseen"] == "0.5500 ± 0.0707"
    assert found.loc["ensemble", "AUROC of unseen"] == f"{averaged['entropy_auroc']:.4f}"
    assert found["published error (%)"].to_list() == ["24", "21"]

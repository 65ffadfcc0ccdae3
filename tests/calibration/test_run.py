"""`calibrate`: on real digits, and its parts against hand-made cases."""

import functools
import re

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.datasets import load_diabetes, load_digits

import tfp_ibnn as ibnn
from tests.calibration.tools import LOGITS, Batches, classes, compiled, methods, mlp
from tfp_ibnn.__main__ import main
from tfp_ibnn.calibration import fine_tuned, run, trials, untrained
from tfp_ibnn.calibration.engine import Engine
from tfp_ibnn.calibration.examples import Training, folds_of

TENSORFLOW = keras.backend.backend() == "tensorflow"


def digits():
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype("float32"), data.target[order]
    return (x[:300], y[:300]), (x[300:1300], y[300:1300]), (x[1300:], y[1300:])


@pytest.fixture(scope="module")
def overfitted():
    """An MLP that has learned the wrong labels among its training examples by heart."""
    keras.utils.set_random_seed(0)
    (x, y), validation, test = digits()
    y = np.where(np.random.default_rng(1).random(len(y)) < 0.1, (y + 1) % 10, y)
    model = mlp(64, dropout=0.05)
    model.compile(keras.optimizers.Adam(1e-2), LOGITS, metrics=["accuracy"])
    rng = np.random.default_rng(2)  # 150 epochs in one: each by itself takes Keras longer
    rows = np.concatenate([rng.permutation(len(y)) for _ in range(150)])
    model.fit(x[rows], y[rows], batch_size=100, shuffle=False, verbose=0)
    return model, (x, y), validation, test


@pytest.fixture(scope="module")
def before(overfitted):
    return snapshot(overfitted[0])


@pytest.fixture(scope="module")
def report(overfitted, before):
    model, train, validation, _ = overfitted
    options = {"samples": 8, "batch_size": 100, "seed": 3, "verbose": False}
    with pytest.MonkeyPatch.context() as patch:
        # Laplace is tested apart.
        kept = (untrained.as_it_is, untrained.given, untrained.mc_dropout)
        others = (fine_tuned.fine_tuned, fine_tuned.gaussian)
        patch.setattr(run, "METHODS", methods(*kept, minutes=others))
        return ibnn.calibrate(model, train, validation, epochs=3, **options)


def snapshot(model):
    values = [keras.ops.convert_to_numpy(x) for x in (*model.variables, *model.optimizer.variables)]
    return [value.copy() for value in values], model.optimizer, model.loss, model.trainable


# On real data


def test_chosen_is_clearly_better_than_untreated_on_test_data(report, overfitted):
    test = report.evaluate(overfitted[3])
    untreated, chosen = test["as it is"], test[report.chosen.name]
    assert report.chosen.name != "as it is"
    assert chosen["NLL"] < 0.9 * untreated["NLL"]
    assert chosen["ECE"] < 0.75 * untreated["ECE"]
    assert chosen["accuracy"] > untreated["accuracy"] - 0.02


def test_candidates_are_all_there(report):
    trials = ("as it is", "MC dropout", "fine-tuned", "Gaussian")
    expected = [name + end for name in trials for end in ("", " + temperature")]
    expected[2:2] = ["as it is + vector scaling", "as it is + isotonic"]
    assert [x.name for x in report.candidates] == expected
    assert report.dropped == {}
    assert report.notes["effort"] == "minutes"
    # 3 epochs of fine-tuning; one epoch of the model was 150 in the training.
    shares = {x.name: x.trial.trainings for x in report.candidates}
    assert shares["MC dropout"] == 0
    assert shares["fine-tuned"] == pytest.approx(3 / 150)
    assert shares["Gaussian"] == pytest.approx(2 * 3 / 150)  # its steps take twice as long


def test_model_given_is_not_changed(before, report, overfitted):
    (values, *parts), (now, *others) = before, snapshot(overfitted[0])
    for old, new in zip(values, now, strict=True):
        np.testing.assert_array_equal(old, new)
    assert others == parts


def test_temperature_is_that_of_an_independent_fit(report, overfitted):
    model, _, (x, y), _ = overfitted
    part = folds_of(y, 2, 3) == 0
    scaled = ibnn.TemperatureScaling(model, from_logits=True).fit(x[part], y[part])
    found = next(x for x in report.candidates if x.name == "as it is + temperature")
    assert found.parameter == pytest.approx(float(scaled.temperature), rel=0.05)
    assert 1.2 < found.parameter < float(scaled.temperature)


def test_models_predict_what_the_table_scored(report, overfitted):
    x, y = overfitted[2]
    part = folds_of(y, 2, 3) == 1
    for candidate in report.candidates[3::4]:
        model = report.model_of(candidate.name)
        assert isinstance(model, ibnn.MonteCarlo)
        mean = model.predict(x[part], verbose=0)["mean"]
        np.testing.assert_allclose(mean, candidate.prediction, atol=2e-4)


def test_table(report):
    table = report.table(all=True)
    lines = str(table).splitlines()
    assert "500 validation examples, on which the choice was made" in lines[0]
    assert len(lines) == 4 + len(report.candidates)
    assert len({len(line) for line in lines[2:]}) == 1
    (marked,) = [line for line in lines if "**" in line]
    assert f"**{report.chosen.name}**" in marked
    row = table["as it is"]
    assert list(row) == [
        *("accuracy", "NLL", "Brier", "ECE", "ECE floor", "T"),
        *("behind best", "passes", "trainings", "MB", "seconds"),
    ]
    assert row["T"] == 1
    assert table["as it is + temperature"]["T"] == report.candidates[1].parameter
    assert row["passes"] == 1
    weights = 64 * 64 + 64 + 64 * 10 + 10
    assert row["MB"] == pytest.approx(4 * weights / 1e6)
    assert row["NLL"] == pytest.approx(report.candidates[0].nll.mean())
    assert 0 < row["ECE floor"] < row["ECE"]


def test_saved(report, overfitted, tmp_path):
    folder = report.save(tmp_path / "new" / "folder")
    files = {path.name for path in folder.iterdir()}
    texts = {"table.md", "model_card.md", "report.json"}
    assert files == {"model.keras", "calibration.png", *texts}
    card = (folder / "model_card.md").read_text()
    versions = "training examples: 300", f"keras: {keras.__version__}"
    for part in (report.why(), "seed: 3", *versions, "`import tfp_ibnn`"):
        assert part in card
    x = overfitted[3][0][:20]
    loaded = keras.models.load_model(folder / "model.keras")
    a, b = (model.predict(x, verbose=0)["mean"] for model in (loaded, report.model))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_decisions(report, overfitted):
    """Coverage, share answered and AUROC are in the card; without data, that they are left out."""
    assert "decisions: left out" in report.card()
    x, y = overfitted[3]
    noise = np.random.default_rng(0).random(x.shape).astype("float32")
    found = report.decide((x, y), {"noise": noise})
    assert found.keys() == {
        "coverage of 90 % sets",
        "share answered at 1 % error",
        "OOD AUROC against noise",
    }
    assert 0.85 < found["coverage of 90 % sets"] < 0.95
    entropies = (report.model.predict(part, verbose=0)["entropy"] for part in (x, noise))
    auroc = found["OOD AUROC against noise"]
    assert auroc == pytest.approx(ibnn.metrics.auroc(*entropies), abs=0.03)
    p = report.model.predict(x, verbose=0)["mean"]
    share = ibnn.decisions.error_threshold(p, y)["answered"]
    assert found["share answered at 1 % error"] == pytest.approx(share, abs=1e-4)
    card = report.card()
    assert all(f"{name}: {value}" in card for name, value in found.items())
    with pytest.raises(ValueError, match="`ood` must be a dict of inputs by name; got ndarray"):
        report.decide((x, y), noise)
    few = report.decide((x[:100], y[:100]))
    assert few["left out"].startswith("The guarantee takes at least 299 answers")
    assert few["OOD AUROC"].startswith("left out")


def test_unknown_candidate(report):
    with pytest.raises(ValueError, match="must be one of 'as it is', .*got 'nonsense'"):
        report.model_of("nonsense")


# The rule of selection


def test_draws_cost_more_than_training_and_a_temperature_nothing(report):
    cost = {x.name: x.cost[:2] for x in report.candidates}
    posterior = next(x for x in cost if x.startswith("Gaussian"))
    assert cost["as it is"] < cost["fine-tuned"] < cost["MC dropout"] < cost[posterior]
    for name in ("as it is", "fine-tuned", "MC dropout"):
        assert cost[name] == cost[f"{name} + temperature"]


# The training


def test_one_network_trains_several_trials_apart(overfitted):
    model, (x, y), _, _ = overfitted
    optimizer = keras.optimizers.Adam(1e-3)
    training = Training((x, y), 300, 3, 100, 0)
    setting = trials.Setting(
        model, classes(10, from_logits=True), optimizer, LOGITS, training, None, 4, 0, epochs=4
    )
    (trial,) = fine_tuned.gaussian(setting)

    def train(state, epoch):
        return trial.engine.train(state, lambda x: training.epoch(x, epoch))

    alone = train(train(trial.state, 1), 2)
    half = train(trial.state, 1)
    other = train(trial.state, 3)
    in_turns = train(half, 2)
    for a, b in zip(alone, in_turns, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(half, other, strict=True))


# Regression


@pytest.mark.once
@pytest.mark.parametrize("has_scales", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_regression(has_scales, eagerly, monkeypatch):
    monkeypatch.setattr(untrained, "PRIOR_FACTORS", (10,))
    data = load_diabetes()
    x, y = data.data.astype("float32") * 20, data.target / 100
    if has_scales:
        model = keras.Sequential(
            [
                keras.Input((10,)),
                layers.Dense(8, "relu"),
                layers.Dense(2),
                ibnn.layers.GaussianHead(),
            ]
        )
        model.compile(keras.optimizers.Adam(1e-2), ibnn.layers.GaussianNLL())
    else:
        model = mlp(8, 1, features=10)
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    rows = np.tile(np.arange(200), 30)  # 30 epochs in one
    model.fit(x[rows], y[rows], batch_size=200, shuffle=False, verbose=0)
    train, validation, test = ((x[i], y[i]) for i in np.split(np.arange(442), [200, 342]))
    options = {"epochs": 1, "samples": 4, "batch_size": 200, "verbose": False}
    report = ibnn.calibrate(model, train, validation, **options)
    table = report.evaluate(test)
    row = table["as it is"]
    assert list(row)[:4] == ["RMSE", "NLL", "CRPS", "90 % coverage"]
    mean = keras.ops.convert_to_numpy(model(test[0]))[:, 0]
    assert row["RMSE"] == pytest.approx(np.sqrt(np.mean((test[1] - mean) ** 2)), rel=1e-4)
    assert ("as it is + scale" in table.rows) == has_scales
    if not has_scales:
        error = validation[1] - keras.ops.convert_to_numpy(model(validation[0]))[:, 0]
        scale = np.sqrt(np.mean(error**2))
        assert report.candidates[0].parameter[0] == pytest.approx(scale, rel=1e-3)
    laplace = next(x for x in report.candidates if x.name.startswith("Laplace, all weights"))
    for candidate in (report.candidates[1], laplace, report.candidates[-1]):
        made = report.model_of(candidate.name)
        scored = made.evaluate(*test, return_dict=True, verbose=0)
        for key in ("rmse", "nll"):
            expected = table[candidate.name][key.upper()]
            assert scored[key] == pytest.approx(expected, rel=2e-3, abs=2e-3)
    drawn = [line for line in report.plot().axes[1].lines if len(line.get_xdata()) > 2]
    assert len(drawn) == 1 + (report.chosen is not report.candidates[0])
    assert list(table["as it is"])[4] == ("factor" if has_scales else "scale")


# Data, seeds and bad input


@pytest.mark.slow
def test_seed_repeats_everything(small, monkeypatch):
    def scores(seed):
        keras.utils.set_random_seed(len(found))  # on which nothing depends
        rows = small(model, samples=2, seed=seed).table().rows
        found.append({name: {**row, "seconds": 0} for name, row in rows.items()})

    found, model = [], compiled(LOGITS, dropout=0.3)
    scores(1)
    scores(2)
    assert found[0] != found[1]
    kept = (untrained.as_it_is, untrained.mc_dropout)
    monkeypatch.setattr(run, "METHODS", methods(*kept, minutes=(fine_tuned.gaussian,)))
    scores(1)
    scores(1)
    assert found[2] == found[3]
    assert len(found[2]) == 8


def test_datasets_give_what_arrays_do(small):
    x, y = small.x, small.y
    expected = small().candidates[0]
    found = small(train=Batches(x[:60], y[:60]), validation=Batches(x[60:], y[60:]))
    np.testing.assert_array_equal(found.candidates[0].prediction, expected.prediction)
    assert found.notes["training examples"] == 60
    assert len(found.candidates) == 6
    if TENSORFLOW:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices
        found = small(
            train=data((x[:60], y[:60])).shuffle(60).batch(16),
            validation=data((x[60:], y[60:])).batch(7),
        )
        np.testing.assert_array_equal(found.candidates[0].prediction, expected.prediction)
        with pytest.raises(ValueError, match="`train` never ends"):
            small(train=data((x, y)).batch(16).repeat())


def test_weights_several_inputs_and_one_hot_labels(deterministic_only, eagerly):
    rng = np.random.default_rng(0)
    a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b")
    outputs = layers.Dense(3, activation="softmax")(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("sgd", "categorical_crossentropy")
    x = {"a": rng.normal(size=(100, 2)), "b": rng.normal(size=(100, 1))}
    y = np.eye(3)[rng.integers(0, 3, 100)]
    report = ibnn.calibrate(model, (x, y, np.ones(100)), (x, y), epochs=1, verbose=False)
    mean = report.model_of("as it is").predict(x, verbose=0)["mean"]
    np.testing.assert_allclose(mean, model.predict(x, verbose=0), atol=1e-6)


def test_binary_classifier(deterministic_only, eagerly):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2)).astype("float32")
    y = (x[:, 0] + rng.normal(size=200) > 0).astype("float32")[:, None]
    model = mlp(4, 1, "sigmoid", features=2)
    model.compile("sgd", "binary_crossentropy")
    report = ibnn.calibrate(model, (x, y), (x, y), epochs=1, verbose=False)
    table = report.evaluate((x, y))
    for name in table.rows:
        mean, row = report.model_of(name).predict(x, verbose=0)["mean"], table[name]
        right = np.mean((mean > 0.5) == y)
        assert row["accuracy"] == pytest.approx(right)
        nll = -np.mean(np.log(np.where(y == 1, mean, 1 - mean)))
        assert row["NLL"] == pytest.approx(nll, abs=1e-4)


def test_method_joins_by_one_line(small, monkeypatch):
    def mine(setting):
        yield trials.Trial("mine", Engine(lambda: untrained.copy_of(setting.model)))

    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, mine))
    assert "mine + temperature" in small().table().rows


@pytest.mark.slow
def test_layers_that_cannot_be_converted_leave_the_rest(small, monkeypatch):
    laplace = (untrained.laplace_of_the_last_layer, untrained.laplace_of_all_weights)
    others = (fine_tuned.fine_tuned, fine_tuned.gaussian, *laplace)
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, minutes=others))
    parts = [
        keras.Input((2,)),
        layers.Reshape((2, 1, 1)),
        layers.ConvLSTM1D(3, 1),
        layers.Flatten(),
    ]
    model = keras.Sequential(parts)
    model.compile("sgd", LOGITS)
    with pytest.warns(UserWarning, match="left out, since") as caught:
        report = small(model)
    assert len(report.candidates) == 6
    names = ["Gaussian", "Laplace, last layer", "Laplace, all weights"]
    assert list(report.dropped) == names
    texts = [str(x.message) for x in caught if "left out" in str(x.message)]
    assert [text.split(":")[0] for text in texts] == names
    assert "must be a Dense one" in texts[1]
    assert "`model` has no layer to convert" in texts[0]
    others = (fine_tuned.gaussian,)
    monkeypatch.setattr(run, "METHODS", methods(untrained.as_it_is, minutes=others))
    model = keras.Sequential([*parts, layers.Dense(3)])
    model.compile("sgd", LOGITS)
    with pytest.warns(UserWarning, match="stay deterministic") as caught:
        assert len(small(model).candidates) == 6
    assert sum("stay deterministic" in str(x.message) for x in caught) == 1


# Posteriors over weights


@pytest.fixture
def posteriors(small, monkeypatch):
    """A function that calibrates with posteriors over weights alone."""
    laplace = (untrained.laplace_of_the_last_layer, untrained.laplace_of_all_weights)
    kept = (untrained.as_it_is, untrained.given, *laplace)
    others = (fine_tuned.fine_tuned,)
    monkeypatch.setattr(run, "METHODS", methods(*kept, minutes=others))
    monkeypatch.setattr(untrained, "PRIOR_FACTORS", (10,))

    def posteriors(*args, **options):
        return small(*args, **{"samples": 2, **options})

    posteriors.x, posteriors.y, posteriors.model = small.x, small.y, small.model
    return posteriors


@pytest.mark.parametrize("written", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_posteriors_over_weights_are_candidates(posteriors, tmp_path, written):
    x, y, model = posteriors.x, posteriors.y.astype(int), posteriors.model
    other = keras.models.clone_model(model)
    noisy = ibnn.to_stochastic(other, ibnn.NormalAffine(initial_scale=0.5), train_size=60)
    given = {"ensemble": ibnn.DeepEnsemble([model, other]), "other": other, "noisy": noisy}
    report = posteriors(candidates=given)
    names = [*given, "Laplace, last layer", "Laplace, all weights"]
    found = [name + end for name in names for end in ("", " + temperature")]
    assert [x.name for x in report.candidates][4:-2] == found
    table = report.evaluate((x, y))
    last = (2 * 4 + 2 * 4 * 3) / (2 * 4 + 4 * 3)  # two draws of the last layer
    assert [table[name]["passes"] for name in names] == [2, 1, 2, last, 2 * 2]
    p = np.mean([m.predict(x, verbose=0) for m in (model, other)], axis=0)
    assert table["ensemble"]["NLL"] == pytest.approx(-np.log(p[np.arange(160), y]).mean(), rel=1e-5)
    for name in ("noisy", "Laplace, all weights"):
        made = report.model_of(f"{name} + temperature")
        mean = made.predict(x, verbose=0)["mean"]
        scored = table[f"{name} + temperature"]
        assert scored["T"] != 1
        nll = -np.log(mean[np.arange(160), y]).mean()
        assert nll == pytest.approx(scored["NLL"], abs=1e-5)
        assert abs(nll - table[name]["NLL"]) > 1e-4
    if not written:
        return
    made.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0)["mean"], mean, atol=1e-6)
    if TENSORFLOW:
        import tensorflow as tf

        path = ibnn.export(made, tmp_path / "exported")
        served = tf.saved_model.load(path).signatures["serve"](inputs=tf.constant(x))
        np.testing.assert_allclose(served["mean"], mean, atol=1e-5)


def test_what_laplace_is_not_for_is_said(posteriors, monkeypatch):
    monkeypatch.setattr(untrained, "MOST_WEIGHTS", 20)
    with pytest.warns(UserWarning, match="Laplace, all weights: left out, since it is for at most"):
        report = posteriors()
    assert "Laplace, last layer" in report.table().rows
    late = posteriors(minutes=1e-9)
    scalings = ["as it is + vector scaling", "as it is + isotonic"]
    names = [*scalings, "Laplace, last layer", "Laplace, all weights", "fine-tuned"]
    assert late.dropped == dict.fromkeys(names, "there was no time for it")


def test_bad_candidates(posteriors):
    model = posteriors.model
    logits = mlp(4, 3, features=2)
    wide = mlp(4, 3, "softmax", features=3)
    cases = [
        ({"a": 3}, r"`candidates\['a'\]` must be a posterior over weights, .*; got int"),
        ({"a": ibnn.TemperatureScaling(logits)}, "or a plain Keras model; got TemperatureScaling"),
        ({"a": Subclass()}, "has no graph"),
        ({"a": wide}, r"`candidates\['a'\]` has inputs \[\(3,\)\] .*`model` has inputs \[\(2,\)"),
        ({"a": logits}, "not probabilities; `model` has .*, probabilities"),
        ({"a": ibnn.Laplace(model)}, "is not fitted"),
        ({"as it is + temperature": model}, "other names than 'as it is \\+ temperature'"),
    ]
    for candidates, message in cases:
        with pytest.raises(ValueError, match=message):
            posteriors(candidates=candidates)


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


@functools.cache
def bad_models():
    return list(made_bad())


def made_bad():
    yield mlp(features=2), "not compiled with one loss"
    yield compiled("hinge"), "The loss hinge with 3 outputs cannot be calibrated"
    yield compiled("binary_crossentropy"), r"targets of `train` must have the shape \(60, 3\)"
    yield compiled(lambda y, p: p), "cannot be calibrated"
    yield compiled("sparse_categorical_crossentropy"), "are not probabilities, as its loss expects"
    yield "model.keras", "`model` must be a Keras model; got 'model.keras'"
    stochastic = ibnn.to_stochastic(mlp(features=2), ibnn.NormalAffine(), train_size=10)
    yield stochastic, "has stochastic layers: give ibnn.to_deterministic"
    yield ibnn.TemperatureScaling(mlp(features=2), from_logits=True), "TemperatureScaling already"
    inputs = keras.Input((4, 2))
    sequence = keras.Model(inputs, layers.Dense(3)(inputs))
    sequence.compile("sgd", LOGITS)
    yield sequence, r"targets of `train` must have the shape \(60, 4\) or \(60, 4, 3\); got"
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD()))
    model = compiled(LOGITS)
    model.compile(several, LOGITS)
    yield model, "several optimizers"


@pytest.mark.parametrize("case", range(10))
def test_bad_models(small, case):
    model, message = bad_models()[case]
    with pytest.raises(ValueError, match=message) as caught:
        small(model)
    assert "\n" not in str(caught.value)


# The command


def test_command(small, tmp_path, capsys):
    small.model.save(tmp_path / "model.keras")
    names = "x_train", "y_train", "x_val", "y_val", "x_test", "y_test"
    arrays = dict(zip(names, 3 * (small.x, small.y), strict=True))
    np.savez(tmp_path / "data.npz", **arrays)
    files = [str(tmp_path / name) for name in ("model.keras", "data.npz")]
    assert main(["calibrate", *files, "--output", str(tmp_path / "out"), "--epochs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "as it is + temperature" in printed
    assert "160 test examples" in printed
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= {"model.keras", "table.md", "model_card.md", "test.md"}
    command = ["calibrate", *files, "--output", str(tmp_path / "out"), "--effort"]
    assert main([*command, "hours"]) == 1
    assert "error: `effort` must be one of 'seconds'," in capsys.readouterr().err
    del arrays["y_val"]
    np.savez(tmp_path / "data.npz", **arrays)
    assert main(["calibrate", *files, "--output", str(tmp_path / "out")]) == 1
    assert re.search(r"^error: .* must hold x_val and y_val", capsys.readouterr().err)


def test_command_with_models_that_need_python(tmp_path, capsys):
    """A class that no shell can import, and several inputs."""

    class Unknown(keras.layers.Layer):
        def call(self, inputs):
            return inputs

    inputs = [keras.Input((2,)), keras.Input((2,))]
    models = {
        "unknown": (keras.Model(inputs[0], Unknown()(inputs[0])), "class 'Unknown', which is not"),
        "two": (keras.Model(inputs, layers.Add()(inputs)), "two.keras has several inputs"),
    }
    data = str(tmp_path / "data.npz")
    np.savez(data, x_train=np.zeros((9, 2)), y_train=np.zeros(9))
    for name, (model, message) in models.items():
        path = str(tmp_path / f"{name}.keras")
        model.save(path)
        assert main(["calibrate", path, data, "--output", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert "Python" in error
        assert error.count("\n") == 1


def test_command_with_files_that_are_not_arrays(tmp_path, capsys):
    np.savez(tmp_path / "good.npz", x_train=np.zeros(3))
    good = (tmp_path / "good.npz").read_bytes()
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", x_train=np.array([{}], object))
    for name, content in (("text.npz", b"hello"), ("empty.npz", b""), ("cut.npz", good[:-9])):
        (tmp_path / name).write_bytes(content)
    options = ["--output", str(tmp_path / "out")]
    assert main(["calibrate", "model.keras", str(tmp_path / "objects.npz"), *options]) == 1
    assert "objects.npz holds arrays of objects: save texts as" in capsys.readouterr().err
    for name in ("single.npy", "text.npz", "empty.npz", "cut.npz"):
        data = str(tmp_path / name)
        assert main(["calibrate", "model.keras", data, *options]) == 1
        error = f"error: {data} is damaged or not an .npz file: write one with np.savez"
        assert capsys.readouterr().err.startswith(error)
    assert not (tmp_path / "out").exists()

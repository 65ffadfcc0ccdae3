"""What all streaming metrics share, and the array functions that they must agree with."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops
from scipy.special import expit, softmax

import tfp_ibnn as ibnn
from tfp_ibnn import metrics

PAIRS = {
    ibnn.ExpectedCalibrationError: (metrics.expected_calibration_error, 1e-6),
    ibnn.BrierScore: (metrics.brier_score, 1e-6),
    ibnn.NegativeLogLikelihood: (metrics.negative_log_likelihood, 1e-5),
}
NAMES = ["ece", "brier", "nll"]

RNG = np.random.default_rng(0)
LABELS = RNG.integers(4, size=24)
LOGITS = (2 * RNG.standard_normal((24, 4))).astype("float32")
PROBABILITIES = softmax(LOGITS, -1)
WEIGHTS = RNG.integers(4, size=24).astype("float32")

every_metric = pytest.mark.parametrize("make", PAIRS, ids=NAMES)


def value(metric, labels, predictions, weights=None, batch=None):
    step = batch or max(len(labels), 1)
    for start in range(0, len(labels), step):
        part = slice(start, start + step)
        metric.update_state(
            labels[part], predictions[part], None if weights is None else weights[part]
        )
    return float(metric.result())


def agree(make, found, labels, probabilities, weights=None):
    function, tolerance = PAIRS[make]
    expected = function(probabilities, labels, sample_weight=weights)
    assert expected > 0.01
    assert found == pytest.approx(expected, abs=tolerance)


@every_metric
def test_names_and_config(make):
    metric = make(from_logits=True)
    assert metric.name == NAMES[list(PAIRS).index(make)]
    config = {**metric.get_config(), "name": "other"}
    if "bins" in config:
        config["bins"] = 7
    again = keras.metrics.deserialize(keras.metrics.serialize(make(**config)))
    assert again.get_config() == config
    assert config["from_logits"] is True


@pytest.mark.once
@every_metric
@pytest.mark.parametrize("batch", [1, 6])
def test_batches_do_not_matter(make, batch):
    agree(make, value(make(), LABELS, PROBABILITIES, batch=batch), LABELS, PROBABILITIES)


@pytest.mark.once
@every_metric
def test_forms_of_labels(make):
    one_hot = np.eye(4)[LABELS]
    forms = (
        LABELS[:, None],
        LABELS.astype("float32"),
        LABELS.astype("uint8"),
        one_hot,
        one_hot > 0,
    )
    for labels in forms:
        agree(make, value(make(), labels, PROBABILITIES), LABELS, PROBABILITIES)
        agree(make, value(make(), LABELS, PROBABILITIES), labels, PROBABILITIES)


@every_metric
def test_logits(make):
    agree(make, value(make(from_logits=True), LABELS, LOGITS), LABELS, PROBABILITIES)
    found = PAIRS[make][0](LOGITS, LABELS, from_logits=True)
    agree(make, found, LABELS, PROBABILITIES)


@pytest.mark.once
@every_metric
def test_two_classes_by_one_probability(make):
    labels, logits = LABELS % 2, LOGITS[:, :1]
    one = expit(logits)
    both = np.concatenate([1 - one, one], axis=-1)
    for given in (labels, labels[:, None], np.eye(2)[labels]):
        agree(make, value(make(), given, one), labels, both)
        agree(make, value(make(from_logits=True), given, logits), labels, both)
        agree(make, PAIRS[make][0](one, given), labels, both)


@pytest.mark.once
@every_metric
def test_dense_predictions_count_every_position(make):
    labels, probabilities = LABELS.reshape(4, 3, 2), PROBABILITIES.reshape(4, 3, 2, 4)
    for given in (labels, labels[..., None], np.eye(4)[labels]):
        agree(make, value(make(), given, probabilities), LABELS, PROBABILITIES)
        agree(make, PAIRS[make][0](probabilities, given), LABELS, PROBABILITIES)


@pytest.mark.once
@every_metric
def test_whole_weights_are_repetitions(make):
    count = WEIGHTS.astype(int)
    labels, probabilities = np.repeat(LABELS, count), np.repeat(PROBABILITIES, count, axis=0)
    for weights in (WEIGHTS, WEIGHTS[:, None], WEIGHTS.astype(int)):
        agree(make, value(make(), LABELS, PROBABILITIES, weights, 6), labels, probabilities)
    agree(make, PAIRS[make][0](PROBABILITIES, LABELS, sample_weight=WEIGHTS), labels, probabilities)


@pytest.mark.once
@every_metric
@pytest.mark.parametrize("shape", [(), (6,), (6, 1), (6, 4), (6, 4, 1)], ids=str)
def test_weights_are_broadcast(make, shape):
    labels, probabilities = LABELS.reshape(6, 4), PROBABILITIES.reshape(6, 4, 4)
    weights = np.random.default_rng(1).uniform(0.5, 2, shape)
    full = np.broadcast_to(weights.reshape((*shape, 1, 1)[:2]), (6, 4)).ravel()
    metric = make()
    metric.update_state(labels, probabilities, sample_weight=weights)
    agree(make, float(metric.result()), LABELS, PROBABILITIES, full)
    found = PAIRS[make][0](probabilities, labels, sample_weight=weights)
    agree(make, found, LABELS, PROBABILITIES, full)


@every_metric
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_counted_in_float32(make, dtype):
    half = ops.cast(PROBABILITIES, dtype)
    metric = make(dtype="float16")
    assert {v.dtype for v in metric.variables} == {"float32"}
    rounded = ops.convert_to_numpy(ops.cast(half, "float32"))
    assert np.abs(rounded.sum(-1) - 1).max() > 1e-4
    agree(make, value(metric, LABELS, half), LABELS, rounded)


@pytest.mark.parametrize("make", [ibnn.ExpectedCalibrationError, ibnn.NegativeLogLikelihood])
def test_double_precision(make):
    found = value(make(dtype="float64"), LABELS, ops.convert_to_tensor(PROBABILITIES, "float64"))
    agree(make, found, LABELS, PROBABILITIES)


@pytest.mark.once
@every_metric
def test_no_example_then_one_then_reset(make):
    metric = make()
    assert float(metric.result()) == 0
    metric.update_state(np.zeros((0,), "int32"), np.zeros((0, 2), "float32"))
    assert float(metric.result()) == 0
    logits = make(from_logits=True)
    logits.update_state(np.zeros((0,), "int32"), np.zeros((0, 2), "float32"))
    assert float(logits.result()) == 0
    metric.update_state([1], np.array([[0.9, 0.1]]))
    agree(make, float(metric.result()), [1], [[0.9, 0.1]])
    metric.reset_state()
    assert float(metric.result()) == 0


BAD = {
    "nan": ([np.nan, 0.5, 0.5], 0, 1),
    "negative": ([-0.1, 0.6, 0.5], 0, 1),
    "sum": ([0.3, 0.3, 0.3], 0, 1),
    "infinite": ([np.inf, 0.0, 0.0], 0, 1),
    "high label": ([0.2, 0.3, 0.5], 3, 1),
    "low label": ([0.2, 0.3, 0.5], -1, 1),
    "fractional label": ([0.2, 0.3, 0.5], 0.5, 1),
    "nan label": ([0.2, 0.3, 0.5], np.nan, 1),
    "soft label": ([0.2, 0.3, 0.5], [0.5, 0.5, 0.0], 1),
    "no label": ([0.2, 0.3, 0.5], [0.0, 0.0, 0.0], 1),
    "two labels": ([0.2, 0.3, 0.5], [1.0, 1.0, 0.0], 1),
    "negative weight": ([0.2, 0.3, 0.5], 0, -1),
    "nan weight": ([0.2, 0.3, 0.5], 0, np.nan),
    "infinite weight": ([0.2, 0.3, 0.5], 0, np.inf),
}


NO_PROBABILITIES = ("negative", "sum", "infinite")

# The check is in one place: all cases for one metric, and one case for all.
every_bad_example = pytest.mark.parametrize(
    ("make", "case"),
    [(ibnn.BrierScore, case) for case in BAD] + [(make, "nan") for make in PAIRS],
)


@every_bad_example
def test_invalid_examples_make_nan_unless_they_have_no_weight(make, case):
    probabilities, label, weight = BAD[case]
    good = np.array([0.2, 0.2, 0.6])
    good_label = np.eye(3)[2] if np.ndim(label) else 2
    labels, weights = np.array([good_label, label]), np.array([1.0, weight])
    metric = make()
    if case not in NO_PROBABILITIES:
        metric.update_state(labels, np.array([good, probabilities]), sample_weight=weights)
        metric.update_state([2], good[None])
        assert np.isnan(float(metric.result()))
        metric.reset_state()
    metric.update_state(labels, np.array([good, probabilities]), sample_weight=np.array([1.0, 0.0]))
    agree(make, float(metric.result()), [2], good[None])


@every_bad_example
def test_functions_raise_where_metrics_are_nan(make, case):
    function = PAIRS[make][0]
    probabilities, label, weight = BAD[case]
    name = "sample_weight" if "weight" in case else "labels" if "label" in case else "probabilities"
    good = np.array([0.2, 0.2, 0.6])
    labels = np.array([np.eye(3)[2] if np.ndim(label) else 2, label])
    both = np.array([good, probabilities])
    with pytest.raises(ValueError, match=f"`{name}` must be .* at example 1"):
        function(both, labels, sample_weight=[1.0, weight])
    if "weight" not in case:
        assert function(both, labels, sample_weight=[1.0, 0.0]) == function(good[None], [2])


@pytest.mark.parametrize("case", NO_PROBABILITIES)
def test_numbers_that_are_no_probabilities_raise_eagerly(case):
    metric, both = ibnn.BrierScore(), np.array([[0.2, 0.2, 0.6], BAD[case][0]])
    with pytest.raises(ValueError, match=r"`y_pred` must be .* sum to 1; got \[.* at example 1"):
        metric.update_state([2, 0], both)
    assert float(metric.result()) == 0


@every_metric
def test_logits_taken_for_probabilities_raise_eagerly(make):
    metric = make()
    with pytest.raises(ValueError, match=rf"write {make.__name__}\(from_logits=True\)"):
        metric.update_state(LABELS, LOGITS)
    with pytest.raises(ValueError, match=r"got \[2.5\] at example 0"):
        make().update_state([0, 1], np.array([[2.5], [0.5]]))


def test_logits_taken_for_probabilities_are_nan_when_compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Identity()])
    model.compile(loss="mse", metrics=[ibnn.ExpectedCalibrationError()])
    logs = model.evaluate(LOGITS, np.eye(4)[LABELS], verbose=0, return_dict=True)
    assert np.isnan(logs["ece"])
    model.compile(loss="mse", metrics=[ibnn.BrierScore()], run_eagerly=True)
    with pytest.raises(ValueError, match=r"BrierScore\(from_logits=True\)"):
        model.evaluate(LOGITS, np.eye(4)[LABELS], verbose=0)


@every_metric
def test_infinite_logits(make):
    logits = np.array([[np.inf, 0.0]])
    assert np.isnan(value(make(from_logits=True), np.array([0]), logits))
    with pytest.raises(ValueError, match="`probabilities` must be logits, finite or -inf"):
        PAIRS[make][0](logits, [0], from_logits=True)


@pytest.mark.parametrize(
    ("probabilities", "labels", "weights", "message"),
    [
        (np.full(2, 0.5), [0, 1], None, r"\(\.\.\., 1\) for .* class 1 of two; got \(2,\)"),
        (np.full((2, 0), 0.5), [0, 1], None, r"\(\.\.\., classes\)"),
        (np.full((1, 2), 0.5), [0, 1], None, r"\(1,\), \(1, 1\) or \(1, 2\).* got \(2,\)"),
        (np.full((2, 2), 0.5), np.eye(3)[:2], None, r"or \(2, 2\).* got \(2, 3\)"),
        (np.full((2, 2), 0.5), 1, None, r"got \(\)"),
        (np.full((2, 2), 0.5), [0, 1], [1.0, 1.0, 1.0], r"`sample_weight` .* \(2,\).* got \(3,\)"),
        (np.full((2, 2), 0.5), [0, 1], np.ones((2, 2)), r"`sample_weight` .* got \(2, 2\)"),
    ],
)
def test_shapes_that_do_not_go_together(probabilities, labels, weights, message):
    with pytest.raises(ValueError, match=message):
        metrics.brier_score(probabilities, labels, sample_weight=weights)
    with pytest.raises(ValueError, match=message):
        ibnn.BrierScore().update_state(np.array(labels), probabilities, sample_weight=weights)


def test_functions_need_an_example():
    for probabilities, labels, weights in (
        (np.zeros((0, 2)), [], None),
        ([[0.5, 0.5]], [0], [0.0]),
    ):
        with pytest.raises(ValueError, match="`probabilities` must hold at least one example"):
            metrics.reliability(probabilities, labels, sample_weight=weights)


def overconfident(count):
    """Return predictions of which each is nearly certain, and their labels."""
    random = np.random.default_rng(2)
    wrong = random.uniform(0, 2e-3, count).astype("float32")
    probabilities = np.stack([1 - wrong, wrong], axis=-1)
    return probabilities, (random.random(count) < wrong).astype("int32")


def test_a_batch_of_a_million():
    probabilities, labels = overconfident(2**20)
    metric = ibnn.ExpectedCalibrationError()
    metric.update_state(labels, probabilities)
    expected = metrics.expected_calibration_error(probabilities.astype("float64"), labels)
    assert float(metric.result()) == pytest.approx(expected, rel=1e-3)


@every_metric
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sums_count_what_float32_rounds_away(make, jit):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Identity()])
    metric = make()
    model.compile(loss="mse", weighted_metrics=[metric], run_eagerly=not jit, jit_compile=jit)
    weights = np.array([2.0**24] + 8 * [1.0], "float32")
    one_hot = np.eye(4)[LABELS[:9]]
    model.evaluate(PROBABILITIES[:9], one_hot, 1, verbose=0, sample_weight=weights)
    assert float(metric.weight.value()) == 2**24 + 8


def classifier(jit_compile="auto"):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, activation="softmax")])
    model.compile(
        keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        metrics=[ibnn.BrierScore(name="unweighted")],
        weighted_metrics=[make() for make in PAIRS],
        jit_compile=jit_compile,
    )
    return model


@pytest.mark.once
@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_fit_and_evaluate_and_after_loading(request, graph, tmp_path):
    if not graph:
        request.getfixturevalue("eagerly")
    model = classifier()
    history = model.fit(LOGITS, LABELS, batch_size=8, verbose=0).history
    assert set(NAMES) <= set(history)
    model.save(tmp_path / "model.keras")
    for one in (model, keras.models.load_model(tmp_path / "model.keras")):
        logs = one.evaluate(LOGITS, LABELS, 8, 0, sample_weight=WEIGHTS, return_dict=True)
        probabilities = model.predict(LOGITS, verbose=0)
        for make, name in zip(PAIRS, NAMES, strict=True):
            agree(make, logs[name], LABELS, probabilities, WEIGHTS)
        agree(ibnn.BrierScore, logs["unweighted"], LABELS, probabilities)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX compiles in the test above")
@pytest.mark.slow
def test_compiled_by_xla():
    model = classifier(jit_compile=True)
    logs = model.evaluate(LOGITS, LABELS, 24, verbose=0, return_dict=True)
    for make, name in zip(PAIRS, NAMES, strict=True):
        agree(make, logs[name], LABELS, model.predict(LOGITS, verbose=0))


REPLICAS = """
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import tfp_ibnn as ibnn
from tests.metrics.test_all_streaming import LABELS, NAMES, PAIRS, PROBABILITIES, WEIGHTS, agree

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert strategy.num_replicas_in_sync == 2
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Identity()])
    model.compile(loss="mse", weighted_metrics=[make() for make in PAIRS])
invalid = np.r_[PROBABILITIES[:-1], np.ones((1, 4), "float32")]
for given in (invalid, PROBABILITIES):
    logs = model.evaluate(
        given, np.eye(4)[LABELS], 12, sample_weight=WEIGHTS, verbose=0, return_dict=True
    )
    for make, name in zip(PAIRS, NAMES):
        if given is invalid:
            assert np.isnan(logs[name]), logs
        else:
            agree(make, logs[name], LABELS, PROBABILITIES, WEIGHTS)
"""


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's strategies")
def test_replicas_are_added_up():
    # Logical devices must be made before TensorFlow starts.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", REPLICAS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

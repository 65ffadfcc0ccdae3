"""Students of one pass: where they begin, what they learn, and what takes them."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tfp_ibnn.distillation.distill import _Lessons
from tfp_ibnn.distillation.student import Student
from tfp_ibnn.distillation.transfer import transfer_of

JAX = keras.backend.backend() == "jax"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype("float32")
FEW = {"epochs": 1, "batch_size": 30, "verbose": 0}


@pytest.fixture(autouse=True)
def fast(eagerly):
    """Nothing is said about graphs; what is exported is one all the same."""


@functools.cache
def network(end):
    keras.utils.set_random_seed(1)
    last = {
        "softmax": [layers.Dense(3, "softmax")],
        "softmax layer": [layers.Dense(3), layers.Softmax()],
        "logits": [layers.Dense(3)],
        "sigmoid": [layers.Dense(2, "sigmoid")],
        "gaussian": [layers.Dense(2), ibnn.layers.GaussianHead()],
        "point": [layers.Dense(2)],
    }[end]
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), *last])


@functools.cache
def teacher(end, kind="noise", samples=8, **options):
    if end in ("logits", "point"):
        options |= {"head": "point"} if end == "point" else {"head": "softmax", "from_logits": True}
    if kind == "ensemble":
        other = keras.models.clone_model(network(end))
        return ibnn.MonteCarlo(ibnn.DeepEnsemble([network(end), other]), **options)
    wide = ibnn.NormalAffine(initial_scale=0.5, seed=0)
    stochastic = ibnn.to_stochastic(network(end), wide, train_size=60)
    return ibnn.MonteCarlo(stochastic, samples, seed=0, **options)


def distilled(*arguments, **options):
    return ibnn.distill(*arguments, **{**FEW, **options})


ENDS = ["softmax", "softmax layer", "logits", "sigmoid", "gaussian", "point"]


@pytest.mark.parametrize("end", ENDS)
def test_student_begins_at_the_posterior_mean(end):
    student = distilled(teacher(end), X, epochs=0)
    begun = student.predict(X, verbose=0)
    at_mean = keras.tree.map_structure(keras.ops.convert_to_numpy, teacher(end).at_mean(X))
    np.testing.assert_allclose(begun["mean"], at_mean["mean"], rtol=1e-5, atol=1e-6)
    if end in ("gaussian", "point"):
        np.testing.assert_allclose(begun["aleatoric"], at_mean["aleatoric"], rtol=1e-4)
    of_teacher = teacher(end).predict(X, verbose=0)
    assert begun.keys() | {"variance"} == of_teacher.keys() | {"variance"}
    # The second head is constant, of the right order.
    ratio = begun["epistemic"].mean() / of_teacher["epistemic"].mean()
    assert 0.3 < ratio < 3
    assert student.samples == 1
    trained = distilled(teacher(end), X)
    assert np.abs(trained.predict(X, verbose=0)["mean"] - begun["mean"]).max() > 1e-4


@pytest.mark.once
def test_names_of_a_teacher_from_a_file_may_come_again():
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, name="dense")(inputs)
    named = keras.Model(inputs, layers.Dense(3, "softmax", name="last")(hidden))
    stochastic = ibnn.to_stochastic(named, ibnn.NormalAffine(), train_size=60)
    keras.utils.clear_session()  # as in a new process
    student = distilled(ibnn.MonteCarlo(stochastic, 2, seed=0), X)
    assert student.predict(X, verbose=0)["mean"].shape == (60, 3)


def test_distilling_leaves_the_teacher_as_it_is():
    before = [np.copy(w) for w in teacher("softmax").get_weights()]
    distilled(teacher("softmax"), X, optimizer="sgd")
    for weight, value in zip(teacher("softmax").get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["moments", "likelihood"])
def test_a_teacher_that_is_a_dirichlet_is_recovered(loss):
    """Each of three inputs has class probabilities from a Dirichlet of its own.

    They are a batch of as many examples as classes, where broadcasting goes wrong most easily.
    """
    concentrations = np.array([[2.0, 3.0, 5.0], [0.5, 0.5, 4.0], [60.0, 20.0, 20.0]])
    p = np.stack([RNG.dirichlet(row, 400) for row in concentrations], axis=1)
    rows = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax", use_bias=False)])
    unused = np.zeros((1, 3))
    sets = [[np.float32(np.concatenate([np.log(draw), unused]))] for draw in p]
    mc = ibnn.MonteCarlo(ibnn.weights.WeightSets.of(rows, sets), samples=len(sets))
    x = np.eye(4, dtype="float32")[:3]
    features = keras.Sequential([keras.Input((4,)), layers.Identity()])
    student = ibnn.distill(
        mc,
        x,
        features,
        loss=loss,
        epochs={"moments": 300, "likelihood": 900}[loss],
        batch_size=3,
        optimizer=keras.optimizers.Adam(0.05),
        verbose=0,
    )
    outputs = student.inner.predict(x, verbose=0)
    np.testing.assert_allclose(np.exp(outputs), concentrations, rtol=0.25)
    found, expected = (model.predict(x, verbose=0) for model in (student, mc))
    for name in ("mean", "entropy", "aleatoric", "epistemic"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0.1)
    np.testing.assert_allclose(found["variance"], expected["variance"], rtol=0.25)


@pytest.mark.parametrize("kind", ["noise", "ensemble"])
def test_file_and_export_answer_like_the_student(kind, tmp_path):
    student = distilled(teacher("softmax", kind, interval=0.9), X)
    known = student.predict(X, verbose=0)
    assert known.keys() >= {"lower", "upper", "variance"}
    assert ((known["lower"] < known["mean"]) & (known["mean"] < known["upper"])).all()
    student.save(tmp_path / "student.keras")
    loaded = keras.saving.load_model(tmp_path / "student.keras").predict(X, verbose=0)
    for name, value in known.items():
        np.testing.assert_allclose(loaded[name], value, rtol=1e-5, atol=1e-6)
    if JAX:
        return
    import tensorflow as tf

    ibnn.export(student, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serve"]
    for name, value in served(inputs=tf.constant(X)).items():
        np.testing.assert_allclose(value, known[name], rtol=1e-4, atol=1e-5)


def test_sets_and_detectors_take_students():
    student = distilled(teacher("softmax"), X)
    y = np.arange(60) % 3
    sets = ibnn.Conformal(student, "aps", coverage=0.8).fit(X, y)
    assert sets.evaluate(X, y)["coverage"] >= 0.8
    for score in ("epistemic", "entropy", "mahalanobis"):
        detector = ibnn.OODDetector(student, score).fit(X)
        assert np.ptp(detector.score(X)) > 0
    scores = student.evaluate(X, y, verbose=0, return_dict=True)
    assert scores.keys() == {"accuracy", "nll", "brier", "ece", "loss"}
    regression = distilled(teacher("point"), X)
    assert regression.evaluate(X, X[:, :2], verbose=0, return_dict=True).keys() == {"rmse", "loss"}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[20 * index :][:20], np.zeros(20)


@pytest.mark.parametrize("form", ["pair", "PyDataset", "tf.data"])
def test_forms_of_data(form):
    if form == "tf.data":
        tf = pytest.importorskip("tensorflow")
        data = tf.data.Dataset.from_tensor_slices(X).batch(20)
    else:
        data = {"pair": (X, np.zeros(60)), "PyDataset": Batches()}[form]
    student = distilled(teacher("softmax"), data, samples=4, epochs=2)
    first, again = (student.predict(X, verbose=0)["mean"] for _ in range(2))
    np.testing.assert_allclose(first, again)


def test_draws_are_new_in_each_step_if_inputs_are():
    """What is augmented goes to teacher and student alike."""
    seen = []

    class Noted(layers.Layer):
        def call(self, x, training=False):
            seen.append((keras.ops.convert_to_numpy(x), training))
            return 2 * x

    options = {"seed": 0, "samples": 2}
    transfer = transfer_of(teacher("softmax"), X, Noted(), 60, 0, options)
    (x, first), (_, second) = (next(transfer.epoch(0)) for _ in range(2))
    assert [training for _, training in seen] == [True, True]
    np.testing.assert_allclose(x, 2 * seen[0][0])
    mean, other = (keras.ops.convert_to_numpy(part["mean"]) for part in (first, second))
    assert np.abs(mean - other).max() > 1e-3
    doubled = keras.ops.convert_to_numpy(teacher("softmax").average(x, 0)["mean"])
    assert np.abs(mean - doubled).max() < 0.5
    stored = transfer_of(teacher("softmax"), X, None, 30, 0, options)
    order = [np.concatenate([x for x, _ in stored.epoch(number)]) for number in (0, 0, 1)]
    np.testing.assert_array_equal(order[0], order[1])
    assert (order[0] != order[2]).any()
    np.testing.assert_array_equal(np.sort(order[2], axis=0), np.sort(X, axis=0))


def test_students_of_the_user():
    features = keras.Sequential([keras.Input((4,)), layers.Dense(6, "relu")])
    student = distilled(teacher("gaussian"), X, features)
    assert student.inner.output_shape == (None, 3)
    whole = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    student = distilled(teacher("softmax"), X, whole)
    assert student.inner is whole
    assert np.isfinite(student.predict(X, verbose=0)["epistemic"]).all()


class OwnCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def test_a_network_with_a_call_of_its_own():
    own = OwnCall()
    own(X)
    wide = ibnn.NormalAffine(initial_scale=0.5)
    stochastic = ibnn.to_stochastic(own, wide, train_size=60)
    mc = ibnn.MonteCarlo(stochastic, samples=4, head="softmax", from_logits=True)
    with pytest.raises(ValueError, match="has its own `call`: give `student`"):
        distilled(mc, X)
    other = OwnCall()
    other(X)
    assert distilled(mc, X, other).inner is other


def test_positions_and_masks():
    """An output at each step; padded steps have no weight."""
    inputs = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(9, 6, mask_zero=True)(inputs)
    outputs = layers.Dense(3, "softmax")(layers.Dense(5, "tanh")(embedded))
    model = ibnn.to_stochastic(keras.Model(inputs, outputs), ibnn.NormalAffine(), train_size=60)
    x = RNG.integers(1, 9, (20, 4))
    x[:, 2:] = 0
    student = distilled(ibnn.MonteCarlo(model, samples=4, seed=0), x)
    assert student.predict(x, verbose=0)["epistemic"].shape == (20, 4)


def test_inputs_reach_the_student_as_they_are():
    """2,049, such as the number of a word, is 2,048 in half precision."""
    parts = [keras.Input((1,)), layers.Identity(dtype="float32")]
    student = Student(keras.Sequential(parts), ibnn.likelihoods.SpreadPoint(2))
    policy = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_float16")
        lessons = _Lessons(student)
    finally:
        keras.config.set_dtype_policy(policy)
    outputs = lessons(np.array([[2049.0]], "float32"))
    assert float(outputs[0, 0]) == 2049


def test_minutes_end_the_training(capsys):
    student = distilled(teacher("softmax"), X, epochs=1000, minutes=1e-9, verbose=1)
    assert "`minutes` ended the training after 0 of 1000 epochs" in capsys.readouterr().out
    assert np.isfinite(student.predict(X, verbose=0)["mean"]).all()


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"augment": 3}, "`augment` must be a Keras layer or model; got 3"),
        (lambda: {"loss": "mse"}, "`loss` must be one of 'moments', 'likelihood'; got 'mse'"),
        (lambda: {"epochs": -1}, "`epochs` must be a whole number"),
        (lambda: {"student": network("softmax")}, "ends in a softmax: give it without its last"),
        (lambda: {"student": 3}, "`student` must be a built Keras model; got 3"),
        (lambda: {"teacher": network("softmax")}, "`teacher` has a single draw"),
        (lambda: {"samples": 1}, "`teacher` has a single draw"),
        (lambda: {"data": iter([X])}, "can be read only once"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model .* has no stochastic layer")
def test_what_is_refused(change, message):
    arguments = {"teacher": teacher("softmax"), "data": X, **change()}
    with pytest.raises(ValueError, match=message):
        distilled(**arguments)


def test_changes_of_several_inputs_are_the_users():
    x = {"a": X, "b": X}
    inputs = {name: keras.Input(X.shape[1:], name=name) for name in x}
    outputs = layers.Dense(2, "softmax")(layers.Add()([*inputs.values()]))
    model = keras.Model(inputs, outputs)
    teacher = ibnn.MonteCarlo(ibnn.to_stochastic(model, ibnn.NormalAffine(), 50), samples=2)
    with pytest.raises(ValueError, match="`augment` must take and return all inputs.*dict of 2"):
        ibnn.distill(teacher, x, augment=layers.GaussianNoise(0.1), epochs=1, verbose=0)


def test_several_outputs_are_refused():
    inputs = keras.Input((4,))
    outputs = {"a": layers.Dense(3, "softmax")(inputs), "b": layers.Dense(3, "softmax")(inputs)}
    model = ibnn.to_stochastic(keras.Model(inputs, outputs), ibnn.NormalAffine(), train_size=60)
    with pytest.raises(ValueError, match="Distill several outputs one at a time"):
        distilled(ibnn.MonteCarlo(model, samples=2), X)

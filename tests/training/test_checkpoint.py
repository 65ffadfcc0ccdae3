import errno
import json

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib.networks import mlp
from tests.layer_checklist import numpy
from tfp_ibnn.training.checkpoint import CheckpointError

N, EPOCHS, BATCH = 20, 4, 8
rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (N, 6, 6, 1), "uint8")
LABELS = rng.integers(0, 3, N)


def network(seed, hidden=7, activation="tanh", compiled=True, posteriors=None):
    """A small network with every kind of random state, none of which depends on another's seed."""
    keras.utils.set_random_seed(seed)
    front = ibnn.data.preprocessing(IMAGES, augment=True, padding=2, seed=100 + seed)
    det = mlp(
        (6, 6, 1), 3, hidden=(hidden,), activation=activation, preprocessing=front, dropout=0.3
    )
    posteriors = posteriors or {
        "fc1": ibnn.NormalAffine(),
        "fc2": ibnn.NormalPlanar1d(gamma=0.1),
    }
    model = ibnn.to_stochastic(det, posteriors, N, train_samples=2, seed=10 * seed)
    if compiled:
        schedule = keras.optimizers.schedules.CosineDecay(0.05, EPOCHS * 3)
        optimizer = ibnn.two_speed(keras.optimizers.SGD(schedule, 0.9, weight_decay=1e-3), 0.1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    return model


class Copy(keras.callbacks.Callback):
    """Keeps what the checkpoint was after two epochs, as a kill in the third would leave it."""

    def __init__(self, path, to):
        super().__init__()
        self.path, self.to = path, to

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.to.write_bytes(self.path.read_bytes())


def train(model, path, *callbacks, epochs=EPOCHS):
    """Go on from the checkpoint, if there is one; return all logs."""
    batches = ibnn.data.ShuffledBatches(IMAGES, LABELS, BATCH, seed=0)
    checkpoint = ibnn.Checkpoint(path)
    own = [batches.follow(), ibnn.KLAnnealing(3), ibnn.PosteriorLog(), checkpoint]
    done = checkpoint.restore(model)
    if not model.optimizer.built:  # TensorFlow would trace the first step twice
        model.optimizer.build(model.trainable_variables)
    model.fit(
        batches,
        shuffle=False,
        epochs=epochs,
        initial_epoch=done,
        callbacks=[*own, *callbacks],
        verbose=0,
    )
    return checkpoint.logs


def state(model):
    """All there is, by a name."""
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    found = {f"{i} {v.path}": numpy(v.value).copy() for i, v in enumerate(model.variables)}
    return found | {
        f"optimizer {i} {v.path}": numpy(v.value).copy() for i, v in enumerate(optimizer.variables)
    }


def assert_same(first, second, **tolerance):
    assert [name.split()[0] for name in first] == [name.split()[0] for name in second]
    for name, a, b in zip(first, first.values(), second.values(), strict=True):
        np.testing.assert_allclose(a, b, err_msg=name, **tolerance)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken") / "run.npz"
    model = network(0)
    logs = train(model, path, Copy(path, path.with_name("half.npz")))
    return model, logs, path


@pytest.fixture(scope="module")
def half(unbroken):
    return unbroken[2].with_name("half.npz")


def test_a_resumed_run_is_the_unbroken_one(unbroken, half, tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(half.read_bytes())
    model = network(7)
    before = state(model)
    logs = train(model, path)
    whole, whole_logs, _ = unbroken
    assert_same(state(whole), state(model), rtol=1e-5, atol=1e-6)
    assert len(logs) == len(whole_logs) == EPOCHS
    for row, expected in zip(logs, whole_logs, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert logs[0]["beta"] < logs[2]["beta"] < logs[3]["beta"] == 1
    # That is no luck: the two networks had nothing in common, nor were they left as they were.
    moved = [
        name for name, value in state(model).items() if not np.array_equal(value, before[name])
    ]
    assert sum("seed" in name for name in moved) >= 5  # shift, flip, dropout, two layers' noise
    assert {"optimizer", *"0"} <= {name.split()[0] for name in moved}


def test_restoring_gives_every_state_at_once(unbroken):
    whole, logs, path = unbroken
    model = network(3)
    checkpoint = ibnn.Checkpoint(str(path))
    assert checkpoint.restore(model) == EPOCHS
    assert checkpoint.logs == logs
    assert_same(state(whole), state(model), rtol=0, atol=0)
    assert int(numpy(model.optimizer.stochastic.iterations)) == EPOCHS * 3
    assert int(numpy(model.optimizer.deterministic.iterations)) == EPOCHS * 3


def test_every_seed_generator_is_in_the_checkpoint(unbroken):
    whole, _, _ = unbroken
    known = {id(variable) for variable in whole.variables}
    found = [
        value.state
        for layer in whole._flatten_layers()
        for value in vars(layer).values()
        if isinstance(value, keras.random.SeedGenerator)
    ]
    assert len(found) >= 5
    assert all(id(variable) in known for variable in found)


def test_without_a_file_nothing_happens(tmp_path):
    model = network(0)
    before = state(model)
    checkpoint = ibnn.Checkpoint(tmp_path / "none.npz")
    assert checkpoint.restore(model) == 0
    assert checkpoint.logs == []
    assert_same(before, state(model), rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == []


def broken_files(good):
    """Contents that are no whole checkpoint."""
    yield "empty", b""
    for part in (0.2, 0.6, 0.99):
        yield f"cut at {part}", good[: int(part * len(good))]
    yield "text", b"epochs: 3"
    yield "bytes gone in the middle", good[: len(good) // 3] + good[len(good) // 2 :]
    damaged = bytearray(good)
    damaged[good.index("epochs".encode("utf-32-le"))] ^= 0xFF
    yield "a byte of the record changed", bytes(damaged)


@pytest.fixture(scope="module")
def other_files(half, tmp_path_factory):
    """Whole archives that are no checkpoint of this library."""
    folder = tmp_path_factory.mktemp("other")
    np.savez(folder / "arrays.npz", a=np.ones(3))
    np.savez(folder / "record.npz", record=np.array("no JSON"))
    np.savez(folder / "list.npz", record=np.array("[1, 2]"))
    np.savez(folder / "lacks.npz", record=np.array(json.dumps({"epochs": 1, "logs": []})))
    np.savez(
        folder / "missing.npz",
        record=np.array(json.dumps({"epochs": 1, "logs": [], "model": 2, "optimizer": 0})),
    )
    np.savez(folder / "pickle.npz", record=np.array({"a": 1}, dtype=object))
    with (folder / "single.npz").open("wb") as file:
        np.save(file, np.ones(3))
    return {path.stem: path.read_bytes() for path in folder.iterdir()}


def test_a_broken_file_is_named_and_changes_nothing(half, other_files, tmp_path):
    model = network(0)
    before = state(model)
    path = tmp_path / "run.npz"
    for what, content in (*broken_files(half.read_bytes()), *other_files.items()):
        path.write_bytes(content)
        checkpoint = ibnn.Checkpoint(path)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.restore(model)
        assert "run.npz" in str(caught.value), what
        assert "\n" not in str(caught.value), what
        assert checkpoint.logs == [], what
        assert path.read_bytes() == content, what
        assert_same(before, state(model), rtol=0, atol=0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("place", "value"), [(10, 99), (8, 1), (6, 200)], ids=["method", "encrypted", "version"]
)
def test_an_archive_that_cannot_be_unpacked_is_named(half, tmp_path, place, value):
    content = bytearray(half.read_bytes())
    content[content.index(b"PK\x01\x02") + place] = value  # in the entry of the record
    (tmp_path / "run.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.npz"):
        ibnn.Checkpoint(tmp_path / "run.npz").restore(network(0))


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_another_models_file_is_refused_and_changes_nothing(half, which):
    model = network(5, hidden=8 if which == "model" else 7)
    if which == "optimizer":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss)
    before = state(model)
    with pytest.raises(CheckpointError, match=f"another run: its {which}"):
        ibnn.Checkpoint(half).restore(model)
    assert_same(before, state(model), rtol=0, atol=0)


def test_a_model_that_is_not_compiled_is_refused(half):
    with pytest.raises(ValueError, match="compiled"):
        ibnn.Checkpoint(half).restore(network(0, compiled=False))


@pytest.mark.once
@pytest.mark.parametrize("name", ["run", "run.keras", "run.npz.gz", ""])
def test_the_suffix_must_be_right(name):
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        ibnn.Checkpoint(name)


def test_a_full_disk_leaves_the_epoch_before(half, tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    path.write_bytes(half.read_bytes())

    def savez(file, **arrays):
        file.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    model, checkpoint = network(0), ibnn.Checkpoint(path)
    checkpoint.set_model(model)
    assert checkpoint.restore(model) == 2
    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(OSError, match="No space"):
        checkpoint.on_epoch_end(2, {"loss": 1.0})
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]
    assert path.read_bytes() == half.read_bytes()
    assert ibnn.Checkpoint(path).restore(network(1)) == 2


def test_numbers_that_are_not_finite_are_left_out_of_the_logs(tmp_path):
    model = network(0)
    checkpoint = ibnn.Checkpoint(tmp_path / "run.npz")
    checkpoint.set_model(model)
    checkpoint.on_epoch_end(0, {"loss": float("nan"), "kl": np.float32(2.0)})
    assert checkpoint.logs == [{"kl": 2.0}]
    again = ibnn.Checkpoint(tmp_path / "run.npz")
    assert again.restore(network(1)) == 1
    assert again.logs == [{"kl": 2.0}]


def test_weights_in_half_precision_come_back(policy, tmp_path):
    policy("bfloat16")
    path = tmp_path / "run.npz"
    x, y = rng.normal(size=(8, 4)).astype("float32"), np.zeros((8, 2), "float32")
    models = []
    for seed in (0, 1):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        models.append(model)
    models[0].fit(x, y, verbose=0, callbacks=[ibnn.Checkpoint(path)])
    assert ibnn.Checkpoint(path).restore(models[1]) == 1
    for a, b in zip(models[0].weights, models[1].weights, strict=True):
        np.testing.assert_array_equal(
            numpy(a.value).astype("float32"), numpy(b.value).astype("float32")
        )


@pytest.mark.once
@pytest.mark.slow
def test_a_run_in_half_precision_is_resumed_too(eagerly, policy, tmp_path):
    """With float16 comes an optimizer that scales the loss, and has a state of its own."""
    policy("mixed_float16")
    whole, path = network(0, posteriors=ibnn.NormalAffine()), tmp_path / "run.npz"
    logs = train(whole, path, Copy(path, tmp_path / "half.npz"), epochs=3)
    resumed = network(7, posteriors=ibnn.NormalAffine())
    resumed_logs = train(resumed, tmp_path / "half.npz", epochs=3)
    assert_same(state(whole), state(resumed), rtol=1e-3, atol=1e-4)
    assert [row["loss"] for row in resumed_logs] == pytest.approx(
        [row["loss"] for row in logs], rel=1e-3
    )

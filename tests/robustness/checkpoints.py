"""Checkpoints: damaged bytes, other members, arrays and records."""

import io
import json

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from tests.robustness import mutate
from tests.robustness.harness import Wrong, refusal
from tfp_ibnn.training.checkpoint import CheckpointError

__all__ = ["Campaign"]


def network(seed):
    """A small compiled network."""
    keras.utils.set_random_seed(seed)
    det = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(3, "tanh"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
    )
    model = ibnn.to_stochastic(det, ibnn.NormalPlanar1d(depth=1), train_size=8, seed=seed)
    model.compile(ibnn.two_speed(keras.optimizers.Adam(0.01), 0.02), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    """Return the values of all variables."""
    variables = [*model.variables, *model.optimizer.variables]
    return [ops.convert_to_numpy(variable.value).copy() for variable in variables]


def same(first, second):
    """Whether two states are the same."""
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


class Campaign:
    """A checkpoint is restored exactly, or not at all."""

    def __init__(self, place):
        self.path = place.folder / "run.npz"
        self.place = place
        model = network(1)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(8, 3)), rng.normal(size=(8, 3))
        checkpoint = ibnn.Checkpoint(self.path)
        model.fit(x, y, epochs=2, verbose=0, callbacks=[checkpoint])
        self.good, self.right, self.logs = self.path.read_bytes(), state(model), checkpoint.logs
        self.files = mutate.members(self.good)
        self.model = network(2)
        self.before = state(self.model)

    def case(self, rng, number):
        """Damage the file in one way, and restore it."""
        kinds = (
            self.bytes_changed,
            self.bytes_changed,
            self.members_changed,
            self.array_changed,
            self.record_changed,
        )
        self.path.write_bytes(kinds[number % len(kinds)](rng))
        checkpoint = ibnn.Checkpoint(self.path)
        try:
            epochs = checkpoint.restore(self.model)
        except Exception as error:
            if not same(state(self.model), self.before) or checkpoint.logs:
                raise Wrong(f"refused, but the model has changed: {error}") from error
            return refusal(error, CheckpointError, lines=1)
        found = state(self.model)
        variables = [*self.model.variables, *self.model.optimizer.variables]
        for variable, value in zip(variables, self.before, strict=True):
            variable.assign(value)
        if not same(found, self.right) or (epochs, checkpoint.logs) != (2, self.logs):
            raise Wrong("what was restored is not what was saved")
        return "right"

    def bytes_changed(self, rng):
        self.label, content = mutate.damaged(rng, self.good)
        return content

    def members_changed(self, rng):
        files = list(self.files)
        place, other = rng.sample(range(len(files)), 2)
        (name, content), (other_name, other_content) = files[place], files[other]
        kind = rng.choice(("removed", "doubled", "renamed", "swapped", "empty", "trick", "more"))
        self.label = f"{name} {kind}"
        if kind == "removed":
            del files[place]
        elif kind == "doubled":
            files.append(files[place])
        elif kind == "renamed":
            files[place] = (rng.choice(("x", name.upper(), f"./{name}", "model/999.npy")), content)
        elif kind == "swapped":
            files[place], files[other] = (name, other_content), (other_name, content)
        elif kind == "empty":
            files[place] = (name, b"")
        elif kind == "trick":
            files.append((rng.choice(mutate.tricks(self.place.outside)), content))
        else:
            files.append((f"model/{len(files)}.npy", content))
        return mutate.repacked(files)

    def array_changed(self, rng):
        names = [name for name, _ in self.files if name != "record.npy"]
        name = rng.choice(names)
        value = np.load(io.BytesIO(dict(self.files)[name]))
        changed, what = rng.choice(
            (
                (value.astype("U3"), "text"),
                (value.astype("complex64"), "complex"),
                (value.astype("float64") + 0.5, "float64"),
                (value.astype(bool), "bool"),
                (np.zeros((*value.shape, 1), value.dtype), "rank"),
                (np.zeros((7,), value.dtype), "size"),
                (np.full(value.shape, np.datetime64("2020")), "date"),
                (np.full(value.shape, None, object), "objects"),
                (np.zeros(value.shape, [("a", "f4")]), "record"),
                (value + 1, "value"),
                (None, "huge"),
            )
        )
        self.label = f"{name} {what}"
        buffer = io.BytesIO()
        if changed is None:
            header = {"descr": "<f4", "fortran_order": False, "shape": (10**11,)}
            np.lib.format.write_array_header_1_0(buffer, header)
        else:
            np.save(buffer, changed, allow_pickle=True)
        return mutate.repacked([(n, buffer.getvalue() if n == name else c) for n, c in self.files])

    def record_changed(self, rng):
        record = json.loads(str(np.load(io.BytesIO(dict(self.files)["record.npy"]))))
        place, value = rng.choice(mutate.leaves(record)), rng.choice(mutate.JUNK)
        self.label = f"record {place} = {str(value)[:40]}"
        buffer = io.BytesIO()
        np.save(buffer, np.array(json.dumps(mutate.put(record, place, value))))
        files = [(n, buffer.getvalue() if n == "record.npy" else c) for n, c in self.files]
        return mutate.repacked(files)

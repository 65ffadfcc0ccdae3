"""`.keras` files: damaged bytes, other members, other configs, other weights."""

import io
import json

import h5py
import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib.folder import RunError
from lib.scoring import read_model
from tests.robustness import mutate
from tests.robustness.harness import Wrong, refusal

__all__ = ["Campaign"]

WEIGHTS = "model.weights.h5"
INPUTS = np.linspace(0, 1, 2 * 64, dtype="float32").reshape(2, 8, 8, 1)


class Campaign:
    """A load raises an error with a message, or gives what the file says."""

    def __init__(self, place):
        self.place = place
        keras.utils.set_random_seed(1)
        det = keras.Sequential(
            [
                keras.Input((8, 8, 1), name="image"),
                keras.layers.Flatten(),
                keras.layers.Dense(5, "tanh", name="hidden"),
                keras.layers.Dropout(0.25, seed=5),
                keras.layers.Dense(10, name="logits"),
            ],
            name="small",
        )
        posteriors = {"hidden": ibnn.NormalAffine(), "logits": ibnn.NormalPlanar1d(depth=1)}
        model = ibnn.to_stochastic(det, posteriors, train_size=60, train_samples=2, seed=3)
        model(INPUTS, training=True)
        path = place.folder / "good.keras"
        model.save(path)
        self.good = path.read_bytes()
        self.files = mutate.members(self.good)
        self.config = json.loads(dict(self.files)["config.json"])
        self.places = [
            x for x in mutate.leaves(self.config) if "build_config" not in x and "module" not in x
        ]
        self.right = described(model)

    def case(self, rng, number):
        """Damage the file in one way, and load it in one of two ways."""
        kinds = (
            self.bytes_changed,
            self.bytes_changed,
            self.members_changed,
            self.path_trick,
            self.config_changed,
            self.config_changed,
            self.code_inside,
            self.weights_changed,
        )
        kind = kinds[number // 2 % len(kinds)]
        content, check = kind(rng)
        path = self.place.folder / "damaged.keras"
        path.write_bytes(content)
        by_library = number % 2 == 0
        self.label += ", read_model" if by_library else ", load_model"
        try:
            if by_library:
                model = read_model(path, "digits")
            else:
                model = keras.saving.load_model(path)
        except Exception as error:
            return refusal(error, RunError, lines=1) if by_library else refusal(error)
        check(model)
        return "right"

    def same(self, model):
        """Raise unless a model is the good one."""
        found = described(model)
        for name, value in self.right.items():
            if name not in found or not np.array_equal(found[name], value):
                raise Wrong(f"{name} is not what was saved")

    def never(self, model):
        raise Wrong("it was loaded")

    def bytes_changed(self, rng):
        self.label, content = mutate.damaged(rng, self.good)
        return content, self.same

    def members_changed(self, rng):
        files = list(self.files)
        place = rng.randrange(len(files))
        name, content = files[place]
        kind = rng.choice(("removed", "doubled", "renamed", "empty", "other weights", "more"))
        self.label = f"{name} {kind}"
        check = self.same
        if kind == "removed":
            del files[place]
        elif kind == "doubled":
            files.append(files[place])
        elif kind == "renamed":
            files[place] = (rng.choice(("x", name.upper(), f"./{name}", f"a/{name}")), content)
        elif kind == "empty":
            files[place] = (name, b"")
        elif kind == "other weights":
            self.label = kind
            files = [(n, mutate.damaged(rng, c)[1] if n == WEIGHTS else c) for n, c in files]
            # The checksum of the archive is right: it is for HDF5 to see, where it can.
            check = self.loadable
        else:
            files += [("assets/x.txt", b"x"), ("y", b"y")]
        return mutate.repacked(files), check

    def loadable(self, model):
        """Accept any finite answer: these bytes are weights, whoever wrote them."""
        ops.convert_to_numpy(model(INPUTS))

    def path_trick(self, rng):
        name = rng.choice(mutate.tricks(self.place.outside))
        self.label = f"member {name!r}"
        links = ()
        files = [*self.files, (name, b"escaped"), ("assets/a", b"a"), ("assets/b", b"b")]
        if rng.random() < 0.4:
            self.label = "link as a member"
            links = ("assets/link",)
            target = str(self.place.outside).encode()
            files += [("assets/link", target), ("assets/link/escaped", b"escaped")]
        return mutate.repacked(files, links), self.same

    def config_changed(self, rng):
        place, value = rng.choice(self.places), rng.choice(mutate.JUNK)
        self.label = f"{'.'.join(map(str, place))} = {str(value)[:40]}"
        changed = mutate.put(self.config, place, value)
        text = json.dumps(changed).encode()

        def check(model):
            try:
                self.same(model)
            except Wrong:
                # The file says so: the model must be of that form, and work.
                said = json.loads(model.to_json())
                if not agrees(said, changed, place):
                    raise
                if not np.isfinite(ops.convert_to_numpy(model(INPUTS))).all():
                    raise Wrong("its answer is not finite") from None

        files = [(n, text if n == "config.json" else c) for n, c in self.files]
        return mutate.repacked(files), check

    def code_inside(self, rng):
        code = {
            "class_name": "__lambda__",
            "config": {
                "value": keras.src.utils.python_utils.func_dump(escape)[0],
                "defaults": None,
                "closure": None,
            },
        }
        layer = {
            "module": "keras.layers",
            "class_name": "Lambda",
            "config": {"name": "code", "function": code},
            "registered_name": None,
        }
        changed = json.loads(json.dumps(self.config))
        layers = changed["config"]["layers"]
        kind = rng.choice(("layer", "activation", "function", "module"))
        self.label = f"code as {kind}"
        place = next(i for i, x in enumerate(layers) if x["config"]["name"] == "hidden")
        if kind == "layer":
            for key in ("name", "inbound_nodes"):
                layer[key] = layers[place][key]
            layers[place] = layer
        elif kind == "activation":
            layers[place]["config"]["layer"]["config"]["activation"] = code
        elif kind == "function":
            layers[place]["config"]["layer"]["config"]["kernel_initializer"] = {
                "module": "builtins",
                "class_name": "function",
                "config": rng.choice(("eval", "exec", "print")),
                "registered_name": "function",
            }
        else:
            layers[place]["config"]["posterior"] = {
                "module": rng.choice(("os", "subprocess", "shutil")),
                "class_name": rng.choice(("system", "Popen", "rmtree")),
                "config": {"args": f"touch {self.place.outside}/escaped"},
                "registered_name": None,
            }
        text = json.dumps(changed).encode()
        files = [(n, text if n == "config.json" else c) for n, c in self.files]
        return mutate.repacked(files), self.never

    def weights_changed(self, rng):
        buffer = io.BytesIO(dict(self.files)[WEIGHTS])
        with h5py.File(buffer, "a") as file:
            names = []
            file.visititems(lambda name, x: names.append(name) if hasattr(x, "shape") else None)
            check = self.never
            states = [name for name in names if "random_state" in name]
            kind = rng.choice(("state", "state", "more states", "shape", "gone", "text", "link"))
            name = rng.choice(states if "state" in kind else names)
            self.label = f"{name} {kind}"
            value = file[name][()]
            if kind == "more states":
                file[f"{name.rsplit('_', 1)[0]}_{rng.choice((1, 7, -1, 'x'))}"] = value
            else:
                del file[name]
            if kind == "state":
                value, fits = rng.choice(
                    (
                        (np.zeros(3, "uint32"), False),
                        (np.zeros((2, 2), "uint32"), False),
                        (np.uint32(0), False),
                        (np.array([0.5, np.nan]), False),
                        (np.array([2**63, 1], "uint64"), False),
                        (value.astype("int64"), True),
                        (value.astype("float64"), None),
                    )
                )
                self.label += f" {value!r}"
                file[name] = value
                if fits is not False:
                    check = self.same
            elif kind == "shape":
                file[name] = np.zeros((*value.shape, 2), value.dtype)
            elif kind == "text":
                file[name] = "text"
            elif kind == "link":
                file[name] = h5py.ExternalLink(str(self.place.folder / "secret.h5"), "/secret")
            elif kind == "gone" and name in states:
                check = self.loadable  # files without random states leave them as they are
        files = [(n, buffer.getvalue() if n == WEIGHTS else c) for n, c in self.files]
        return mutate.repacked(files), check


def escape(x):
    """What a file could bring along as code."""
    import pathlib

    pathlib.Path("escaped").write_text("code ran")
    return x


def described(model):
    """Return all there is in a model, and what it says with and without noise."""
    found = {
        f"{number} {variable.path.split('/')[-1]}": ops.convert_to_numpy(variable)
        for number, variable in enumerate(model.variables)
        if "metric" not in variable.path and "kl" not in variable.name.split("/")[-1]
    }
    with ibnn.noise_off(model):
        found["answer"] = ops.convert_to_numpy(model(INPUTS))
    return found


def agrees(said, changed, place):
    """Whether a model's config has at a place what a file has there."""
    for key in place:
        try:
            said, changed = said[key], changed[key]
        except (KeyError, IndexError, TypeError):
            return False
    if isinstance(said, bool):
        return said == bool(changed)
    # What is empty stands for the default, in Keras's own layers.
    return json.dumps(said) == json.dumps(changed) or said == changed or not changed

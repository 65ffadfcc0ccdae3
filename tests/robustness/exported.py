"""Exported folders: damaged and other files and manifests, before TensorFlow sees them."""

import importlib
import json
import shutil
import sys

import keras

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import dense, set_weights
from tests.robustness import mutate
from tests.robustness.harness import ROOT, Wrong, refusal
from tfp_ibnn.export.saved_model import MANIFEST

__all__ = ["Campaign", "served", "small_export"]


def served():
    """Return scripts/serve.py as a module."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module("serve")


def small_export(path, seed=0, **options):
    """Export a small network."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((4,), name="features")
    hidden = dense(5, "tanh")(inputs)
    model = set_weights(keras.Model(inputs, dense(3, "softmax")(hidden)), seed)
    return ibnn.export(ibnn.MonteCarlo(model, samples=4, seed=seed), path, **options)


class Reached(BaseException):
    """TensorFlow is about to read a folder."""


class Campaign:
    """A folder that is not what was written is refused, and TensorFlow does not read it."""

    def __init__(self, place):
        import tensorflow as tf

        self.place, self.serve = place, served()
        self.good = small_export(place.folder / "1", overwrite=True)
        self.copy = place.folder / "copy"
        self.names = sorted(
            x.relative_to(self.good).as_posix() for x in self.good.rglob("*") if x.is_file()
        )
        self.read, self.stop = [], False
        load = tf.saved_model.load

        def watched(path, *args, **kwargs):
            self.read.append(path)
            if self.stop:
                raise Reached
            return load(path, *args, **kwargs)

        tf.saved_model.load = watched

    def case(self, rng, number):
        """Damage a copy in one way, and start the service on it."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.good, self.copy)
        self.read.clear()
        self.stop = number % 25 != 0  # to load takes long: it is enough to see that it begins
        kinds = (self.untouched, self.bytes_changed, self.file_changed, self.manifest_changed)
        # Most of them: the untouched one is there to show that the check lets the good pass.
        kind = kinds[0] if number % 25 == 0 else kinds[1 + number % 3]
        harmless = kind(rng)
        try:
            self.serve.Service(self.copy, max_batch=4)
        except Reached:
            pass
        except Exception as error:
            if self.read:
                raise Wrong(f"refused, but only by TensorFlow: {error}") from error
            if harmless is True:
                raise Wrong(f"a whole folder was refused: {error}") from error
            return refusal(error, (ValueError, OSError))
        if harmless is False:
            raise Wrong("it was loaded")
        return "right"

    def untouched(self, rng):
        self.label = "untouched"
        return True

    def bytes_changed(self, rng):
        name = rng.choice(self.names)
        path = self.copy / name
        what, content = mutate.damaged(rng, path.read_bytes())
        self.label = f"{name} {what}"
        unchanged = content == path.read_bytes()
        path.write_bytes(content)
        if unchanged:
            return True
        # A manifest may differ where it is not looked at, such as in the name of the model.
        return None if name == MANIFEST else False

    def file_changed(self, rng):
        name = rng.choice(self.names)
        path = self.copy / name
        kind = rng.choice(
            ("gone", "more", "link", "folder", "link of a folder", "twice", "swapped", "pipe")
        )
        self.label = f"{name} {kind}"
        if kind == "gone":
            path.unlink()
        elif kind == "more":
            (path.parent / rng.choice(("x.pb", ".hidden", "saved_model.pbtxt"))).write_text("x")
        elif kind == "link":
            target = self.place.folder / "elsewhere"
            target.write_bytes(path.read_bytes())
            path.unlink()
            path.symlink_to(target)
            return None if name == MANIFEST else False
        elif kind == "folder":
            path.unlink()
            path.mkdir()
        elif kind == "link of a folder":
            target = self.place.empty("elsewhere_folder")
            variables = self.copy / "variables"
            shutil.copytree(variables, target, dirs_exist_ok=True)
            shutil.rmtree(variables)
            variables.symlink_to(target)
        elif kind == "twice":
            shutil.copy(path, path.with_name(path.name + "2"))
        elif kind == "swapped":
            other = self.copy / rng.choice([x for x in self.names if x != name])
            first, second = path.read_bytes(), other.read_bytes()
            path.write_bytes(second)
            other.write_bytes(first)
            return None if first == second else False
        else:
            path.unlink()
            path.symlink_to("/dev/zero")
        return False

    def manifest_changed(self, rng):
        path = self.copy / MANIFEST
        content = json.loads(path.read_text())
        if rng.random() < 0.4:
            name = rng.choice(
                (*mutate.tricks(self.place.outside), "", ".", "/", "a\x00b", "\ud800")
            )
            self.label = f"manifest names {name!r}"
            content["sha256"][name] = "0" * 64
            path.write_text(json.dumps(content))
            return False
        place, value = rng.choice(mutate.leaves(content)), rng.choice(mutate.JUNK)
        self.label = f"manifest {place} = {str(value)[:40]}"
        path.write_text(json.dumps(mutate.put(content, place, value)))
        return None

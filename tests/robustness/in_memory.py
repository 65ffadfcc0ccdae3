"""Models in memory: what they are called with, asked, told, and exported with."""

import warnings

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import classifier, data, dense, set_weights
from tests.robustness import mutate
from tests.robustness.exported import served
from tests.robustness.harness import Wrong, refusal

__all__ = ["Campaign"]

# What TensorFlow and Keras raise for what is no tensor, besides Python's own.
KINDS = (ValueError, TypeError, ArithmeticError, NotImplementedError, MemoryError)


class Campaign:
    """An answer is that of the same numbers as float32, or there is none."""

    def __init__(self, place):
        import tensorflow as tf

        self.place = place
        self.kinds = (*KINDS, tf.errors.OpError)
        self.x, self.y = data(6, 4), np.arange(6) % 3
        self.mc = ibnn.MonteCarlo(classifier(), samples=4, seed=0)
        self.mc.compile(run_eagerly=True)
        self.compiled = ibnn.MonteCarlo(classifier(), samples=4, seed=0)
        inputs = keras.Input((4,))
        outputs = ibnn.layers.GaussianHead()(dense(2)(inputs))
        self.regression = ibnn.MonteCarlo(
            set_weights(keras.Model(inputs, outputs)), samples=4, seed=0
        )
        self.regression.compile(run_eagerly=True)
        self.layer = dense(3)
        self.layer(self.x)
        image = keras.Input((5, 5, 2))
        noisy = ibnn.StochasticConv2D(3, 3, train_size=10)(image)
        pooled = keras.layers.GlobalAveragePooling2D()(noisy)
        self.conv = ibnn.MonteCarlo(
            set_weights(keras.Model(image, keras.layers.Softmax()(pooled))), samples=4, seed=0
        )
        self.conv.compile(run_eagerly=True)
        self.scores = self.mc.evaluate(self.x, self.y, verbose=0, return_dict=True)

    def case(self, rng, number):
        """Ask one question."""
        kinds = (self.predict, self.predict, self.evaluate, self.call, self.images, self.options)
        kind = kinds[number % len(kinds)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return kind(rng)
        except Wrong:
            raise
        except Exception as error:
            return refusal(error, self.kinds)

    def inputs(self, rng):
        """Return a name, an input, and the same as float32 if a model must or may answer it."""
        x = self.x[: rng.randint(1, 6)]
        spot = rng.randrange(len(x)), rng.randrange(4)

        def holed(value, dtype="float32"):
            array = x.astype(dtype)
            array[spot] = value
            return array

        ragged = [row.tolist()[: rng.randint(1, 3) if i % 2 else 4] for i, row in enumerate(x)]
        sizes = tuple(rng.choice((0, 1, 3, 4, 5)) for _ in range(rng.randint(0, 5)))
        whole = (10 * x).astype("int32")
        return rng.choice(
            (
                ("float64", x.astype("float64"), x),
                ("float16", x.astype("float16"), x.astype("float16").astype("float32")),
                ("whole numbers", whole, whole.astype("float32")),
                ("unsigned", np.abs(whole).astype("uint8"), np.abs(whole).astype("float32")),
                ("booleans", x > 0, (x > 0).astype("float32")),
                ("lists", x.tolist(), x),
                ("not contiguous", np.asfortranarray(x), x),
                ("big-endian", x.astype(">f4"), x),
                ("tensor", ops.convert_to_tensor(x), x),
                ("nan", holed(np.nan), None),
                ("inf", holed(np.inf), None),
                ("-inf", holed(-np.inf), None),
                ("nan in float16", holed(np.nan, "float16"), None),
                ("nan in a tensor", ops.convert_to_tensor(holed(np.nan)), None),
                ("nan in lists", holed(np.nan).tolist(), None),
                ("beyond float32", holed(1e300, "float64"), None),
                ("beyond float32 in lists", holed(1e300, "float64").tolist(), None),
                ("complex", x.astype("complex64") + 1j, None),
                ("text", x.astype("U8"), None),
                ("bytes", x.astype("S8"), None),
                ("objects", x.astype(object), x),
                ("None inside", [[None] * 4], None),
                ("dates", np.full((2, 4), np.datetime64("2020")), None),
                ("record", np.zeros((2, 4), [("a", "f4")]), None),
                ("ragged", ragged, None if len(x) > 1 else x),
                ("ragged objects", np.array([*map(np.array, ragged), None], object), None),
                (f"shape {sizes}", np.zeros(sizes, "float32"), "shape"),
                ("empty", x[:0], None),
                ("None", None, None),
                ("a word", "x", None),
                ("a number", 3.0, None),
                ("a dict", {"x": x}, "same"),
                ("a set", {1, 2}, None),
                ("two arrays", [x, x], None),
                ("a model", self.mc, None),
                ("a generator", (part for part in x), None),
                ("a function", len, None),
            )
        )

    def check(self, found, expected, name):
        """Raise unless two dicts of arrays are the same."""
        if expected is None:
            raise Wrong(f"{name} was answered")
        for key, value in expected.items():
            if found[key].shape != value.shape or not np.allclose(found[key], value, atol=1e-5):
                raise Wrong(f"{name}: {key} is not that of the same numbers")

    def predict(self, rng):
        model = rng.choice((self.mc, self.mc, self.regression, self.compiled))
        name, x, plain = self.inputs(rng)
        on_batch = rng.random() < 0.3
        self.label = f"predict{'_on_batch' if on_batch else ''} {name}"
        expected = plain
        if isinstance(plain, str):
            # A dict of the one input, or an axis more or less of size 1, is taken as Keras does.
            flat = np.asarray(x["x"] if plain == "same" else x)
            expected = flat.reshape(-1, 4) if flat.size and flat.size % 4 == 0 else None
        found = model.predict_on_batch(x) if on_batch else model.predict(x, verbose=0)
        if expected is not None:
            expected = model.predict(expected, verbose=0)
        self.check(found, expected, name)
        return "right"

    def evaluate(self, rng):
        y = self.y
        name, labels, fits = rng.choice(
            (
                ("float labels", y.astype("float32"), True),
                ("labels as a column", y[:, None], True),
                ("list", y.tolist(), True),
                ("int64", y.astype("int64"), True),
                ("beyond the classes", y + 1, False),
                ("negative", y - 1, False),
                ("half", y + 0.5, False),
                ("nan", np.where(y == 1, np.nan, y), False),
                ("inf", np.where(y == 1, np.inf, y), False),
                ("huge", y * 2**40, False),
                ("booleans", y == 1, None),
                ("text", y.astype("U3"), False),
                ("objects", y.astype(object), None),
                ("None inside", np.array([None] * 6), False),
                ("too few", y[:3], False),
                ("too many", np.tile(y, 2), False),
                ("none", None, False),
                ("empty", y[:0], False),
                ("two columns", np.stack([y, y], 1), False),
                ("one-hot", np.eye(3)[y], None),
                ("a number", 1, False),
                ("a dict", {"a": y}, None),
                ("complex", y.astype("complex64"), False),
            )
        )
        self.label = f"evaluate {name}"
        options = {}
        if rng.random() < 0.3:
            weight = rng.choice((np.nan, np.inf, "x", -1.0))
            self.label += f", sample_weight {weight}"
            options["sample_weight"] = np.full(6, weight)
            fits = None if weight == -1.0 else False
        found = self.mc.evaluate(self.x, labels, verbose=0, return_dict=True, **options)
        if fits is False:
            raise Wrong(f"{name} was scored: {found}")
        if fits and any(not np.isclose(found[key], self.scores[key]) for key in self.scores):
            raise Wrong(f"{name}: {found} is not {self.scores}")
        if not np.isfinite(list(found.values())).all():
            raise Wrong(f"the scores are not finite: {found}")
        return "right"

    def call(self, rng):
        name, x, plain = self.inputs(rng)
        target = rng.choice((self.layer, self.mc.inner, self.mc))
        self.label = f"{type(target).__name__}(x), {name}"
        with ibnn.noise_off(self.layer), ibnn.noise_off(self.mc.inner):
            found = target(x)
            finite = isinstance(x, np.ndarray) and x.dtype.kind in "fiub" and np.isfinite(x).all()
            if not finite or isinstance(plain, str | None):
                # A plain call computes what it is given, NaN included, as all of Keras does.
                return "right"
            expected = target(plain)
        found, expected = (
            [ops.convert_to_numpy(part) for part in keras.tree.flatten(result)]
            for result in (found, expected)
        )
        if not all(np.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)):
            raise Wrong(f"{name} is not the answer of the same numbers")
        return "right"

    def images(self, rng):
        shape = [rng.choice((0, 1, 2, 3, 5, 6)) for _ in range(rng.choice((2, 3, 4, 4, 4, 5)))]
        if rng.random() < 0.3:
            shape = [2, 5, 5, 2]
        x = np.full(shape, rng.choice((0.0, 1.0, np.nan, np.inf, 3e38)), "float32")
        self.label = f"image {shape} of {x.flat[0] if x.size else 'nothing'}"
        found = self.conv.predict(x, verbose=0)
        fits = len(shape) == 4 and shape[1:] == [5, 5, 2] and np.isfinite(x).all()
        if not fits and not (shape[0] == 0 and not len(found["mean"])):
            raise Wrong("it was answered")
        return "right"

    def options(self, rng):
        junk = rng.choice(mutate.JUNK)
        name = rng.choice(
            ("samples", "seed", "path", "input_signature", "model", "head", "sampling", "interval")
        )
        self.label = f"{name} = {str(junk)[:40]}"
        target = self.place.folder / "exported"
        if name in ("head", "sampling", "interval"):
            mc = ibnn.MonteCarlo(self.mc.inner, samples=2, **{name: junk})
            mc.compile(run_eagerly=True)
            self.finite(mc.predict(self.x, verbose=0))
        elif name == "model":
            ibnn.export(junk, target, overwrite=True)
            raise Wrong("it was exported")
        elif name == "path":
            if not isinstance(junk, str):
                ibnn.export(self.mc, junk)
                raise Wrong("it was exported")
            # A path like any other, and so tried below a folder where it does no harm.
            path = ibnn.export(self.mc, f"{target}/below/{junk}", overwrite=True)
            served().verify(path.resolve())
        elif name == "samples" and junk in (10**9, 2**63, 3, True):
            ibnn.MonteCarlo(self.mc.inner, samples=junk, chunk_size=1)
        else:
            ibnn.export(self.mc, target, overwrite=True, **{name: junk})
            if name == "input_signature" and junk is not None:
                raise Wrong("it was exported")
        return "right"

    def finite(self, found):
        """Raise unless all arrays are finite."""
        if not all(np.isfinite(value).all() for value in found.values()):
            raise Wrong("the answer is not finite")

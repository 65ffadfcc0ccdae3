"""Draws random legal Keras models: each is a function of its seed alone.

A model is a list of lines of Python, so that it can be shown, and shrunk, line by line.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

import tfp_ibnn as ibnn
from lib.legal_models import kinds, parts
from lib.legal_models.posteriors import draw_options, draw_posterior

__all__ = ["Case", "Head", "Line", "build", "data", "draw", "fill", "precision"]

LARGEST = 300
"""How many numbers a tensor has for one example, at most."""


class Line(NamedTuple):
    """One line of a model: name = source, in which {0}, {1}, ... are the names it uses."""

    name: str
    source: str
    uses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} = {self.expression}"

    @property
    def expression(self) -> str:
        return self.source.format(*self.uses)


class Head(NamedTuple):
    """What an output means: the tensor's name, "softmax", "sigmoid", ..., whether it is logits."""

    name: str
    kind: str
    from_logits: bool | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its use.

    Attributes:
        seed: of which it is a function.
        policy: of precision.
        lines: of the model.
        inputs: the names of its inputs.
        heads: its outputs.
        form: how the inputs are given: "list", "dict", or "subclass" for a model around all.
        posterior: an expression.
        convert: options of `to_stochastic`.
        predict: options of `MonteCarlo`.
        batch: number of examples.
        size: of the random weights.
        weighted: whether the examples have weights.
    """

    seed: int
    policy: str
    lines: tuple[Line, ...]
    inputs: tuple[str, ...]
    heads: tuple[Head, ...]
    form: str
    posterior: str
    convert: dict[str, Any]
    predict: dict[str, Any]
    batch: int
    size: float
    weighted: bool

    def model_code(self) -> list[str]:
        """Return the lines that make the model."""
        inputs = self.inputs[0]
        if len(self.inputs) > 1:
            inputs = f"[{', '.join(self.inputs)}]"
        if self.form == "dict":
            inputs = f"{{{', '.join(f'{name!r}: {name}' for name in self.inputs)}}}"
        names = [head.name for head in self.heads]
        outputs = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
        lines = [*map(str, self.lines), f"model = keras.Model({inputs}, {outputs})"]
        return [*lines, "model = parts.Network(model)"] if self.form == "subclass" else lines


@contextlib.contextmanager
def precision(policy: str) -> Iterator[None]:
    """Set floatx and the dtype policy, and forget the names of earlier layers."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def _names() -> dict[str, Any]:
    return {"keras": keras, "layers": layers, "ops": ops, "ibnn": ibnn, "parts": parts, "np": np}


def build(case: Case) -> keras.Model:
    """Return the model of a case, with its random weights; its precision must be set."""
    known = _names()
    for line in case.model_code():
        exec(line, known)
    model = known["model"]
    if case.form == "subclass":
        model(data(case, known["model"].inner))
    fill(model, case.seed, case.size)
    return model


def fill(model: keras.Model, seed: int, size: float) -> None:
    """Give a model random weights of a size."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        if not keras.backend.is_float_dtype(weight.dtype):
            continue
        value = size * rng.normal(size=weight.shape)
        value = np.exp(value) if "variance" in weight.name else value
        weight.assign(value.astype("float32").astype(weight.dtype))


def data(case: Case, model: keras.Model, number: int | None = None) -> Any:
    """Return random inputs of a functional model, in the form it takes them."""
    rng = np.random.default_rng(case.seed + 1)
    number = case.batch if number is None else number
    found = {}
    for x in model.inputs:
        shape = (number, *(3 if size is None else size for size in x.shape[1:]))
        if x.dtype == "int32":
            value = rng.integers(1, 6, shape)
            value[::2, -1:] = 0  # padding
            found[x.name] = value.astype("int32")
        else:
            found[x.name] = rng.normal(size=shape).astype(keras.config.floatx())
            if "_padded" in x.name:
                found[x.name][::2, -1:] = 0
    if isinstance(model.input, dict):
        return {name: found[x.name] for name, x in model.input.items()}
    return [*found.values()] if len(found) > 1 else next(iter(found.values()))


class _Builder:
    """Draws the lines of a model one by one, and keeps those that Keras takes."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.known = rng, _names()
        self.lines: list[Line] = []
        self.inputs: list[str] = []
        self.tensors: list[str] = []

    def add(self, source: str, *uses: str, prefix: str = "x") -> bool:
        """Add a line if Keras takes it, and its result is a small tensor or a layer."""
        line = Line(f"{prefix}{len(self.lines)}", source, uses)
        try:
            value = eval(line.expression, self.known)
        except Exception:  # whatever Keras has against it
            return False
        if isinstance(value, keras.KerasTensor):
            sizes = [3 if size is None else size for size in value.shape[1:]]
            is_known = bool(sizes) and value.shape[-1] is not None
            if not is_known or math.prod(sizes) > LARGEST or min(sizes) < 1:
                return False
            self.tensors.append(line.name)
        self.known[line.name] = value
        self.lines.append(line)
        return True

    def shape(self, name: str) -> tuple[int | None, ...]:
        return tuple(self.known[name].shape)

    def input(self, kind: str) -> None:
        """Add an input, and for tokens its embedding."""
        rng, number = self.rng, len(self.lines)
        channels = rng.choice((2, 3, 4))
        steps = rng.choice((3, 4, 5, None))
        shapes = {
            "flat": (channels,),
            "sequence": (steps, channels),
            "padded": (4, channels),
            "image": rng.choice(((4, 4, channels), (5, 3, channels))),
            "volume": (3, 3, 3, 2),
            "tokens": (4,),
        }
        name = f"x{number}_padded" if kind == "padded" else f"x{number}"
        dtype = ", dtype='int32'" if kind == "tokens" else ""
        self.add(f"keras.Input({shapes[kind]}, name={name!r}{dtype})")
        self.inputs.append(self.lines[-1].name)
        if kind == "tokens":
            self.add(f"layers.Embedding(6, {channels}, mask_zero=True)({{0}})", self.tensors.pop())
        if kind == "padded":
            self.add("layers.Masking()({0})", self.tensors.pop())

    def grow(self) -> None:
        """Try to add one layer, or a few that belong together."""
        rng, chance = self.rng, self.rng.random()
        last = self.tensors[-1] if rng.random() < 0.8 else rng.choice(self.tensors)
        if chance < 0.12:
            self._merge(last)
        elif chance < 0.2:
            self._share(last)
        else:
            rank = len(self.shape(last))
            makers = {2: kinds.FLAT, 3: kinds.SEQUENCE, 4: kinds.IMAGE, 5: kinds.VOLUME}
            source = rng.choice(makers.get(rank, kinds.POINTWISE))(rng, self.shape(last))
            self.add(source, last)

    def _merge(self, last: str) -> None:
        alike = [x for x in self.tensors if self.shape(x) == self.shape(last) and x != last]
        near = [x for x in self.tensors if self.shape(x)[:-1] == self.shape(last)[:-1]]
        if alike and self.rng.random() < 0.7:
            self.add(self.rng.choice(kinds.MERGES), self.rng.choice(alike), last)
        elif near:
            self.add("layers.Concatenate()([{0}, {1}])", self.rng.choice(near), last)

    def _share(self, last: str) -> None:
        """Use one layer twice."""
        layer = kinds.kernel_layer(self.rng, self.shape(last))
        if self.add(layer, prefix="shared"):
            name = self.lines[-1].name
            if self.add("{0}({1})", name, last):
                near = [x for x in self.tensors[:-1] if self.shape(x) == self.shape(last)]
                if self.add("{0}({1})", name, self.rng.choice((self.tensors[-1], *near))):
                    self.add("layers.Add()([{0}, {1}])", *self.tensors[-2:])

    def flatten(self) -> None:
        """Make the last tensor a vector."""
        last = self.tensors[-1]
        if len(self.shape(last)) > 2:
            sources = list(kinds.FLATTEN.get(len(self.shape(last)), ("layers.Flatten()({0})",)))
            self.rng.shuffle(sources)
            any(self.add(source, last) for source in sources)

    def join(self) -> None:
        """Add another input, and join it to the last tensor, both as vectors."""
        self.flatten()
        first = self.tensors[-1]
        self.input(self.rng.choice(("flat", "sequence", "tokens")))
        self.flatten()
        self.add("layers.Concatenate()([{0}, {1}])", first, self.tensors[-1])

    def head(self) -> Head:
        """Add an output."""
        rng = self.rng
        if rng.random() < 0.65:
            self.flatten()
        last, kind = self.tensors[-1], rng.choice(("softmax", "softmax", "sigmoid", "gaussian"))
        kind = "point" if rng.random() < 0.15 else kind
        units = rng.choice((2, 3)) if kind == "softmax" else rng.choice((1, 2))
        from_logits = rng.random() < 0.4 if kind in ("softmax", "sigmoid") else None
        activation = None if from_logits or kind in ("gaussian", "point") else kind
        if kind == "softmax" and not from_logits and rng.random() < 0.3:
            source = f"layers.Softmax()(layers.Dense({units}, name='head{len(self.lines)}')({{0}}))"
        elif kind == "gaussian":
            source = f"ibnn.layers.GaussianHead()(layers.Dense({2 * units})({{0}}))"
        else:
            source = f"layers.Dense({units}, activation={activation!r})({{0}})"
        if not self.add(source, last):
            raise ValueError("no head")
        return Head(self.lines[-1].name, kind, from_logits)


def _draw_model(rng: Random) -> tuple[_Builder, tuple[Head, ...]]:
    builder = _Builder(rng)
    kinds_of_input = ("flat", "flat", "sequence", "sequence", "image", "image", "tokens", "padded")
    builder.input("volume" if rng.random() < 0.05 else rng.choice(kinds_of_input))
    wanted, joined = rng.randint(3, 12), rng.random() < 0.15
    for number in range(3 * wanted):
        if len(builder.lines) >= wanted:
            break
        if joined and number == wanted // 2:
            builder.join()
        builder.grow()
    heads = [builder.head()]
    if rng.random() < 0.15:
        builder.tensors = builder.tensors[:-1]
        heads.append(builder.head())
    return builder, tuple(heads)


def _draw_prediction(rng: Random) -> dict[str, Any]:
    options: dict[str, Any] = {"samples": rng.randint(2, 5), "seed": rng.randrange(100)}
    options["sampling"] = rng.choice(("iid", "iid", "antithetic", "qmc"))
    if rng.random() < 0.5:
        options["chunk_size"] = rng.randint(1, 4)
    if rng.random() < 0.15:
        options["independent"] = True
    if rng.random() < 0.3:
        options["return_samples"] = True
    if rng.random() < 0.2:
        options["interval"] = 0.8
    if rng.random() < 0.2 and options["sampling"] == "iid":
        options["standard_error"] = True
    return options


def _draw_case(rng: Random, seed: int) -> Case:
    policies = ("float64",) * 11 + ("float32",) * 6 + ("mixed_bfloat16", "mixed_float16")
    policy = rng.choice(policies)
    with precision(policy):
        builder, heads = _draw_model(rng)
    forms = ("list",) * 8 + ("dict", "subclass")
    case = Case(
        seed=seed,
        policy=policy,
        lines=tuple(builder.lines),
        inputs=tuple(builder.inputs),
        heads=heads,
        form=rng.choice(forms),
        posterior=draw_posterior(rng),
        convert=draw_options(rng),
        predict=_draw_prediction(rng),
        batch=rng.choice((1, 2, 3, 4, 6)),
        size=rng.choice((0.3, 0.7, 1.0)),
        weighted=rng.random() < 0.4,
    )
    return trimmed(case)


def trimmed(case: Case) -> Case:
    """Return a case without the lines that its outputs do not need."""
    needed = {head.name for head in case.heads}
    lines = []
    for line in reversed(case.lines):
        if line.name in needed:
            lines.append(line)
            needed.update(line.uses)
    inputs = tuple(name for name in case.inputs if name in needed)
    return dataclasses.replace(case, lines=tuple(reversed(lines)), inputs=inputs)


def is_legal(case: Case) -> bool:
    """Whether Keras runs the model, and its outputs are finite."""
    try:
        with precision(case.policy):
            model = build(case)
            inner = model.inner if case.form == "subclass" else model
            inputs = data(case, inner)
            inner(keras.tree.map_structure(_symbol, inputs))
            outputs = model(inputs)
    except Exception:  # whatever Keras has against it
        return False
    return all(
        np.isfinite(np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))).all()
        for x in keras.tree.flatten(outputs)
    )


def _symbol(x: np.ndarray) -> keras.KerasTensor:
    """Return a symbol of known shape: of those, Keras refuses what is too short for a kernel."""
    return keras.KerasTensor(x.shape, str(x.dtype))


def draw(seed: int) -> Case:
    """Return the legal case of a seed."""
    rng = Random(f"legal model {seed}")
    while True:
        try:
            case = _draw_case(rng, seed)
        except ValueError:
            continue
        if is_legal(case):
            return case

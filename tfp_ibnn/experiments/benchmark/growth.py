"""How cost grows with samples, batch, channels and the depth of a flow."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
from keras import layers

from tfp_ibnn import conversion, models
from tfp_ibnn.experiments.benchmark import timing
from tfp_ibnn.experiments.benchmark.networks import (
    CLASSES,
    KINDS,
    TRAIN_SIZE,
    compiled,
    images,
    stepper,
    stochastic,
)
from tfp_ibnn.experiments.benchmark.record import Row, row
from tfp_ibnn.experiments.benchmark.settings import Settings
from tfp_ibnn.posteriors import NormalAffine, NormalInvConv, NormalPlanar1d, Posterior
from tfp_ibnn.prediction.monte_carlo import MonteCarlo

__all__ = ["exponents"]

LINEAR = 1.05
"""Largest exponent that counts as linear."""

SAMPLES = (8, 32, 128, 512)
BATCHES = (16, 64, 256, 1024)
CHANNELS = (32, 64, 128, 256)
DEPTHS = (1, 2, 4, 8)
_LAYER_BATCH = 32


def exponents(settings: Settings) -> Iterator[Row]:
    """Measure exponents: the slopes of cost against size on logarithmic axes."""
    keras.utils.set_random_seed(settings.seed)
    for axis in (_samples, _batch, _channels, _depth):
        yield from axis(settings)


def _samples(settings: Settings) -> Iterator[Row]:
    x, _ = images(100, settings.seed)
    plain = models.lenet()
    curves = {"own": lambda count: compiled(plain, x, count)}
    for kind in KINDS:
        model = stochastic("lenet", kind)
        curves[kind] = lambda count, model=model: compiled(
            MonteCarlo(model, count, from_logits=True), x
        )
    yield from _rows("samples", SAMPLES, curves, settings, dict.fromkeys(KINDS, LINEAR))


def _batch(settings: Settings) -> Iterator[Row]:
    def curve(make: Callable[[], keras.Model]) -> Callable[[int], timing.Action]:
        return lambda batch: stepper(make(), batch, 4, settings.seed)

    curves = {"own": curve(models.lenet)}
    curves |= {kind: curve(lambda kind=kind: stochastic("lenet", kind)) for kind in KINDS}
    yield from _rows("batch", BATCHES, curves, settings, dict.fromkeys(KINDS, LINEAR))


def _channels(settings: Settings) -> Iterator[Row]:
    curves = {
        "own": lambda count: _layer(count, None, settings),
        "gaussian": lambda count: _layer(count, NormalAffine(), settings),
        "flow": lambda count: _layer(count, NormalInvConv(), settings),
    }
    rows = list(_rows("channels", CHANNELS, curves, settings, {}))
    own = rows[0]["growth"]["own_exponent"]
    for found in rows:
        # No worse than the wrapped layer's own, to the same tolerance as what is to be linear.
        yield {**found, "target": round(own + LINEAR - 1, 3)}


def _depth(settings: Settings) -> Iterator[Row]:
    own = _layer(64, None, settings)  # which has no depth
    curves = {
        "own": lambda depth: own,
        "planar": lambda depth: _layer(64, NormalPlanar1d(depth=depth), settings),
        "convolutions": lambda depth: _layer(64, NormalInvConv(depth=depth), settings),
    }
    for found in _rows("depth", DEPTHS, curves, settings, {}):
        level = min(found["growth"]["own"])
        yield {**found, "growth": {**found["growth"], "own": [level] * len(DEPTHS)}}


def _layer(channels: int, posterior: Posterior | None, settings: Settings) -> timing.Action:
    """Return an action that trains one 3x3 convolution between equal channels on 8x8 maps."""
    inputs = keras.Input((8, 8, channels))
    x = layers.Conv2D(channels, 3, padding="same", activation="relu", name="conv")(inputs)
    outputs = layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    if posterior is not None:
        model = conversion.to_stochastic(model, {"conv": posterior}, TRAIN_SIZE)
    return stepper(model, _LAYER_BATCH, 8, settings.seed)


def _rows(
    axis: str,
    sizes: Sequence[int],
    curves: Mapping[str, Callable[[int], timing.Action]],
    settings: Settings,
    targets: Mapping[str, float],
) -> Iterator[Row]:
    """Time all curves at all sizes in turn; give a row for each but the layer's own."""
    actions = {(name, size): make(size) for name, make in curves.items() for size in sizes}
    times = timing.interleave(actions, max(4, settings.rounds // 3))
    found = {name: [times[name, size] for size in sizes] for name in curves}
    own = found.pop("own")
    for name, measured in found.items():
        yield row(
            f"growth.{axis}.{name}",
            f"growth with {axis}, {KINDS.get(name, name)}: exponent",
            _exponent(sizes, measured),
            targets.get(name),
            "exponent",
            growth={
                "axis": axis,
                "sizes": list(sizes),
                "seconds": [float(f"{min(case):.5g}") for case in measured],
                "own": [float(f"{min(case):.5g}") for case in own],
                "own_exponent": round(_exponent(sizes, own)["ratio"], 4),
            },
        )


def _exponent(sizes: Sequence[int], times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the exponent without the smallest size, at which fixed costs show most."""
    return timing.slope(sizes[1:], times[1:])

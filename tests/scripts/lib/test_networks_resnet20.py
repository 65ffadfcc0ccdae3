"""ResNet-20 with filter response normalization: against numpy, and as the other parts see it."""

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib.networks import FilterResponseNorm, resnet20
from tests.layer_checklist import numpy

ROWS = np.random.default_rng(0)


def normalized(x, gamma, beta, tau):
    """The paper's formula, in float64."""
    x = x.astype("float64")
    square = np.mean(x**2, axis=tuple(range(1, x.ndim - 1)), keepdims=True)
    return np.maximum(gamma * x / np.sqrt(square + 1e-6) + beta, tau)


@pytest.mark.parametrize("shape", [(3, 5, 4, 2), (2, 6, 3), (2, 3, 2, 4, 2), (3, 1, 1, 2)])
def test_normalization_is_that_of_the_paper(shape):
    layer, x = FilterResponseNorm(), ROWS.normal(2, 3, shape).astype("float32")
    layer.build(shape)
    weights = [ROWS.normal(size=shape[-1]).astype("float32") for _ in range(3)]
    layer.set_weights(weights)
    found = numpy(layer(x))
    np.testing.assert_allclose(found, normalized(x, *weights), rtol=1e-4, atol=1e-5)
    assert (found == weights[2]).any()
    # The size of the input has no effect on the output; one example has none on another.
    np.testing.assert_allclose(numpy(layer(100 * x)), found, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(numpy(layer(x[:1])), found[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_normalization_is_in_float32_under_mixed_precision(policy):
    layer = FilterResponseNorm(dtype=policy)
    x = keras.ops.cast(ROWS.normal(0, 300, (2, 6, 6, 3)), policy.removeprefix("mixed_"))
    found = layer(x)  # squares of 300 overflow in float16
    assert keras.backend.standardize_dtype(found.dtype) == policy.removeprefix("mixed_")
    assert all(v.dtype == "float32" for v in layer.weights)
    found = numpy(keras.ops.cast(found, "float32"))
    expected = normalized(numpy(keras.ops.cast(x, "float32")), 1.0, 0.0, 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)


def test_normalization_needs_positions_and_takes_half_precision():
    with pytest.raises(ValueError, match=r"positions .*got the shape \(4, 3\)"):
        FilterResponseNorm()(np.ones((4, 3), "float32"))
    layer = FilterResponseNorm(dtype="float16")
    found = layer(keras.ops.ones((2, 4, 3), "float16"))
    assert keras.backend.standardize_dtype(found.dtype) == "float16"
    np.testing.assert_allclose(numpy(found), 1, atol=1e-3)


@pytest.mark.once
def test_weights_are_as_many_as_by_hand():
    def layer(size, before, after):  # kernel; bias, gamma, beta and tau
        return size**2 * before * after + 4 * after

    by_hand, before = layer(3, 3, 16), 16
    for channels in (16, 32, 64):
        by_hand += layer(3, before, channels) + 5 * layer(3, channels, channels)
        by_hand += layer(1, before, channels) if before != channels else 0
        before = channels
    model = resnet20()
    assert model.count_params() == by_hand + 65 * 10 == 274_042
    convs = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    assert len(convs) == 19 + 2
    assert [x.name for x in convs if x.strides == (2, 2)] == [
        f"group{group}_block1_{name}" for group in (2, 3) for name in ("conv1", "shortcut")
    ]
    assert [x.output.shape[1:] for x in model.layers if x.name.endswith("3_2_silu")] == [
        (32, 32, 16),
        (16, 16, 32),
        (8, 8, 64),
    ]


def silu(x):
    return x / (1 + np.exp(-x))


def test_forward_pass_is_that_of_numpy():
    """With loops for convolutions, on images that become 2 by 2."""
    model = resnet20((8, 8, 3), 4)
    for v in model.weights:
        v.assign(ROWS.normal(0, 0.4, v.shape))
    weights = {v.path: numpy(v).astype("float64") for v in model.weights}

    def block(x, name):
        kernel = weights[f"{name}/kernel"]
        strides = 2 if x.shape[-1] != kernel.shape[-1] and name != "conv0" else 1
        size, height = len(kernel), x.shape[1]
        after = -(-height // strides)
        total = max((after - 1) * strides + size - height, 0)  # of TensorFlow's "same"
        sides = (total // 2, total - total // 2)
        x = np.pad(x, ((0, 0), sides, sides, (0, 0)))
        out = np.zeros((len(x), after, after, kernel.shape[-1]))
        for i, j in np.ndindex(after, after):
            window = x[:, i * strides : i * strides + size, j * strides : j * strides + size]
            out[:, i, j] = np.einsum("nhwc,hwcd->nd", window, kernel)
        out += weights[f"{name}/bias"]
        return normalized(out, *(weights[f"{name}_norm/{x}"] for x in ("gamma", "beta", "tau")))

    images = ROWS.normal(size=(2, 8, 8, 3))
    x = silu(block(images, "conv0"))
    for name in [f"group{g}_block{b}" for g in (1, 2, 3) for b in (1, 2, 3)]:
        change = block(silu(block(x, f"{name}_conv1")), f"{name}_conv2")
        x = block(x, f"{name}_shortcut") if x.shape != change.shape else x
        x = silu(x + change)
    expected = x.mean(axis=(1, 2)) @ weights["fc/kernel"] + weights["fc/bias"]
    np.testing.assert_allclose(numpy(model(images)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:These layers stay")  # the normalizations
def test_saved_and_converted(tmp_path):
    model, x = resnet20((8, 8, 3)), ROWS.normal(size=(2, 8, 8, 3)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numpy(loaded(x)), numpy(model(x)), atol=1e-6)
    sto = ibnn.to_stochastic(loaded, ibnn.NormalAffine(), train_size=100, seed=0)
    assert len(ibnn.stochastic_layers(sto)) == 22
    assert np.ptp([numpy(sto(x)) for _ in range(2)], axis=0).max() > 1e-4
    with ibnn.noise_off(sto):
        np.testing.assert_allclose(numpy(sto(x)), numpy(model(x)), atol=1e-5)

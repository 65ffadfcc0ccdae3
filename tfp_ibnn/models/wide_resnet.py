"""Wide residual networks, for small images."""

import keras
from keras import layers

from tfp_ibnn._core import checks
from tfp_ibnn.models import _blocks

__all__ = ["wide_resnet"]


def wide_resnet(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    *,
    depth: int = 28,
    width: int = 10,
    preprocessing: _blocks.Preprocessing = (),
    dropout: float = 0.0,
) -> keras.Model:
    """Return a wide residual network, WRN-28-10 unless told otherwise.

    Three groups of pre-activated blocks of 16, 32 and 64 times `width` channels. The layers are
    `conv0`, `group1_block1_conv1`, `group1_block1_conv2`, `group1_block1_shortcut` where the shape
    changes, and so on, and `fc`.

    Args:
        input_shape: height, width and channels; at least 8 pixels each way.
        num_classes: number of logits.
        depth: number of layers, 6n + 4 for n blocks a group: 10, 16, 22, 28, 34, 40.
        width: factor on the channels.
        preprocessing: layers to put in front, such as `ibnn.data.preprocessing(...)`.
        dropout: rate of dropout between the convolutions of a block.

    Example:
        >>> import tfp_ibnn as ibnn
        >>> ibnn.models.wide_resnet(depth=10, width=1).count_params()
        78330

    References:
        Zagoruyko and Komodakis, Wide Residual Networks, arXiv 1605.07146.
    """
    check_size(depth, width)
    inputs, x = _blocks.entrance(_blocks.image_shape(input_shape, "wide_resnet"), preprocessing)
    x = _blocks.convolution(16, 3, 1, "conv0")(x)
    for group in (1, 2, 3):
        for block in range(1, (depth - 4) // 6 + 1):
            channels, strides = 8 * 2**group * width, 2 if group > 1 and block == 1 else 1
            x = _block(x, channels, strides, dropout, f"group{group}_block{block}")
    x = _blocks.activated(x, "final_norm", "final_relu")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return _blocks.classifier(inputs, x, num_classes, "fc", "wide_resnet")


def check_size(depth: int, width: int) -> None:
    """Raise if there is no such network."""
    if checks.positive_integer("depth", depth) < 10 or (depth - 4) % 6:
        raise ValueError(f"`depth` must be 10, 16, 22, 28, ... (6n + 4); got {depth!r}.")
    checks.positive_integer("width", width)


def _block(
    x: keras.KerasTensor, channels: int, strides: int, dropout: float, name: str
) -> keras.KerasTensor:
    """Return x + f(x), with f of two convolutions; x is mapped where its shape changes."""
    active = _blocks.activated(x, f"{name}_1_norm", f"{name}_1_relu")
    if x.shape[-1] != channels or strides != 1:
        x = _blocks.convolution(channels, 1, strides, f"{name}_shortcut")(active)
    change = _blocks.convolution(channels, 3, strides, f"{name}_conv1")(active)
    change = _blocks.activated(change, f"{name}_2_norm", f"{name}_2_relu")
    change = _blocks.dropped(change, dropout, name)
    change = _blocks.convolution(channels, 3, 1, f"{name}_conv2")(change)
    return layers.Add(name=f"{name}_add")([x, change])

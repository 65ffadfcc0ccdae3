"""What is measured in processes of its own."""

import gc
from pathlib import Path

import keras

from lib.benchmark import comparison
from lib.benchmark import networks as nets

BATCH, STEPS = 32, 3
METHODS = {"reparameterization": "Reparameterization", "flipout": "Flipout"}


def memory(kind, noise, seed):
    """Train VGG16 and return bytes: `before` the training, at the `peak`, at `rest`, of a `step`.

    Linux keeps the largest resident size of a process. It is read when the network, its optimizer
    and the images are there, and after three steps; then again over three more, which find the
    graph in place: what a `step` holds is on top of what stays between two of them.
    """
    keras.utils.set_random_seed(seed)
    model = nets.prepare(nets.stochastic("vgg16", kind, noise=noise))
    x, y = nets.images(BATCH * STEPS, seed, nets.SHAPES["vgg16"])

    def largest():
        """Train, and return the resident size before it and the largest one."""
        gc.collect()  # the network that was converted, for one: 60 MiB
        before = begin_with_the_largest_size()
        with nets.a_few_images():
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return before, status("VmHWM")

    (before, peak), (rest, later) = largest(), largest()
    return {"before": before, "peak": peak, "rest": rest, "step": later - rest}


def begin_with_the_largest_size():
    """Forget the largest resident size, which imports may have had, and return the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(key):
    """Return a size in bytes that Linux keeps for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(kibibytes)


def tfp_layers(group, rounds, seed):
    """Return the rows of TensorFlow Probability's own layers in a group of cases.

    They are of Keras 2 (TF_USE_LEGACY_KERAS=1), and so is the deterministic LeNet.
    """
    import tf_keras

    tf_keras.utils.set_random_seed(seed)
    networks = {f"{group}.tfp_{name}": lenet(kind) for name, kind in METHODS.items()}
    text = "LeNet, 128 samples, TFP {}" if group == "prediction" else "LeNet step, TFP {}"
    labels = [text.format(kind) for kind in METHODS.values()]
    described = {name: (label, None) for name, label in zip(networks, labels, strict=True)}
    if group != "prediction":
        actions = {
            name: nets.stepper(model, comparison.BATCH, comparison.STEPS, seed, tf_keras)
            for name, model in {"deterministic": lenet(), **networks}.items()
        }
        return list(comparison.step_rows(actions, described, rounds))
    rounds = max(4, rounds // 2)
    return comparison.prediction_rows({}, described, lenet(), rounds, seed, networks)[0]


def lenet(kind=None):
    """Return LeNet in Keras 2, of a kind of TensorFlow Probability's layers, or deterministic."""
    import tensorflow_probability as tfp
    import tf_keras

    layers, options = tf_keras.layers, {}
    conv, dense = layers.Conv2D, layers.Dense
    if kind is not None:
        conv, dense = (getattr(tfp.layers, f"{name}{kind}") for name in ("Convolution2D", "Dense"))
        divergence = tfp.distributions.kl_divergence
        options["kernel_divergence_fn"] = lambda q, p, _: divergence(q, p) / nets.TRAIN_SIZE
    relu = {"activation": "relu", **options}
    images = [tf_keras.Input(nets.SHAPES["lenet"]), conv(6, 5, **relu), layers.MaxPooling2D(2)]
    images += [conv(16, 5, **relu), layers.AveragePooling2D(2), layers.Flatten()]
    return tf_keras.Sequential(
        [*images, dense(120, **relu), dense(84, **relu), dense(10, **options)]
    )

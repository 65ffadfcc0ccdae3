r"""Train and export the network of the page "Try it", which draws digits in a browser.

A small convolutional network with noise on the inputs of its layers, on MNIST. Its 32 sampled
networks, prediction sets and refusals go into digits.onnx, a score of unusual inputs into
unusual.onnx, and ten test images into digits.json. Three minutes on two cores.

Example:
    python scripts/try_page.py docs/try
"""

import argparse
import base64
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

DRAWS = 32
THRESHOLD = 0.9
COVERAGE = 0.999
USUAL = 0.99
BANK = 1000
HELD_OUT = 5000


def main(argv=None):
    options = parse(argv)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import numpy as np

    import tfp_ibnn as ibnn
    from lib import data

    keras.utils.set_random_seed(options.seed)
    (x, y), test = data.load("mnist", data_dir=options.data_dir)
    network = train(shifted(x[HELD_OUT:]), y[HELD_OUT:], options.epochs)
    average = ibnn.MonteCarlo(network, samples=DRAWS, seed=options.seed, return_samples=True)
    held_out = scaled(x[:HELD_OUT])
    sets = ibnn.Conformal(average, coverage=COVERAGE)
    sets.fit(held_out, y[:HELD_OUT])
    detector = ibnn.OODDetector(ibnn.MonteCarlo(network, samples=1, seed=0), score="knn", bank=BANK)
    detector.fit(scaled(x[HELD_OUT:]))
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    ibnn.export(sets, folder / "digits.onnx", format="onnx", threshold=THRESHOLD, overwrite=True)
    ibnn.export(detector, folder / "unusual.onnx", format="onnx", overwrite=True)
    scores = ibnn.exported_scores(folder / "digits.onnx", scaled(test[0]), test[1])
    facts = {
        "command": f"python scripts/try_page.py --seed {options.seed} --epochs {options.epochs}",
        "scores": {name: round(float(value), 4) for name, value in scores.items()},
        "unusual": round(float(np.quantile(detector.score(held_out, verbose=0), USUAL)), 4),
        "digits": [base64.b64encode(image).decode() for image in examples(*test)],
    }
    (folder / "digits.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts["scores"]))
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("output", nargs="?", default="docs/try", help="folder (default: docs/try)")
    add("--epochs", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--data-dir", help="cache folder of the data sets")
    return parser.parse_args(argv)


def train(x, y, epochs):
    """Return a network with noise on the inputs of its layers."""
    import keras
    from keras import layers

    import tfp_ibnn as ibnn

    inputs = keras.Input((28, 28, 1), name="image")
    hidden = layers.Conv2D(16, 5, strides=2, activation="relu")(inputs)
    hidden = layers.Conv2D(32, 3, strides=2, activation="relu")(hidden)
    hidden = layers.Dense(64, activation="relu")(layers.Flatten()(hidden))
    plain = keras.Model(inputs, layers.Dense(10)(hidden), name="digits")
    network = ibnn.to_stochastic(plain, ibnn.NormalAffine(), train_size=len(x))
    rate = keras.optimizers.schedules.CosineDecay(2e-3, max(1, epochs * (len(x) // 128)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    network.fit(scaled(x), y, batch_size=128, epochs=epochs, verbose=2)
    return network


def scaled(images):
    return images.astype("float32") / 255


def shifted(images):
    """Return images, each moved by up to two pixels, as people do not draw in the middle."""
    import numpy as np

    moves = np.random.default_rng(0).integers(-2, 3, (len(images), 2))
    return np.stack([np.roll(x, move, (0, 1)) for x, move in zip(images, moves, strict=True)])


def examples(x, y):
    """Return the first test image of each digit."""
    return [x[list(y).index(digit)].tobytes() for digit in range(10)]


if __name__ == "__main__":
    sys.exit(main())

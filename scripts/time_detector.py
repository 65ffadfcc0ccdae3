"""Time `OODDetector` by nearest neighbours: the 10,000 test images of CIFAR-10 on VGG16's features.

The bank holds the features of all 50,000 training images. Scores and the network's own predictions
take turns; each time is the minimum of the rounds. The weights are random, which changes no time.
--store keeps the result in results/benchmark/knn.json.

Examples:
    python scripts/time_detector.py
    python scripts/time_detector.py --rounds 5 --store
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

RESULTS = Path("results/benchmark/knn.json")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="default 3")
    add("--images", type=int, default=10_000, help="test images (default 10000)")
    add("--bank", type=int, default=50_000, help="training images (default 50000)")
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    add("--store", action="store_true", help=f"keep the result in {RESULTS}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help need not wait for the imports below, which take seconds

import keras

import tfp_ibnn as ibnn
from experiments import data, files, networks, provenance


def main(argv=None):
    options = parse(argv)
    (x, y), (x_test, _) = data.load("cifar10", options.data_dir)
    x, y, x_test = x[: options.bank] / 255, y[: options.bank], x_test[: options.images] / 255
    keras.utils.set_random_seed(0)
    model = networks.vgg16((32, 32, 3))
    mc = ibnn.MonteCarlo(ibnn.DeepEnsemble([model]), head="softmax", from_logits=True)
    detector = ibnn.OODDetector(mc, "knn", k=50)
    detector.fit(x.astype("float32"), y)
    x_test = x_test.astype("float32")
    times = {"network": [], "scores": []}
    for number in range(options.rounds + 1):
        for name, run in (
            ("network", lambda: model.predict(x_test, batch_size=128, verbose=0)),
            ("scores", lambda: detector.score(x_test, batch_size=128)),
        ):
            begun = time.perf_counter()
            run()
            if number:  # the first one compiles
                times[name].append(time.perf_counter() - begun)
    least = {name: min(seconds) for name, seconds in times.items()}
    ratio = least["scores"] / least["network"]
    print(f"network {least['network']:.2f} s, scores {least['scores']:.2f} s, ratio {ratio:.2f}")
    if options.store:
        about = {key: value for key, value in vars(options).items() if key != "data_dir"}
        files.write_json(RESULTS, {**provenance(about), "seconds": times, "ratio": ratio})


if __name__ == "__main__":
    main()

"""Times of an `OODDetector` by nearest neighbors."""

import time

import keras

import tfp_ibnn as ibnn
from lib import data, files, networks, provenance
from studies.detector_time import RESULTS


def execute(options):
    """Do what the command line says."""
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

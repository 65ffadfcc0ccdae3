r"""Measure how a saved model does on images unlike those that it was trained on.

    clean          the test images; always measured, the others are compared with them
    corruptions    noise, blur, light and compression, in five severities
    rotations      turned images
    fgsm           images changed against the model, in steps of the gradient's sign
    foreign        another dataset: does the uncertainty detect out-of-distribution (OOD) images?

The model is a model.keras of train_cifar.py, with a posterior, with dropout or with neither, from
either backend. The output folder receives robustness.json (all numbers, and what it takes to repeat
them), robustness.png and foreign.png.

Examples:
    python scripts/evaluate.py outputs/lenet/model.keras
    python scripts/evaluate.py outputs/lenet/model.keras --limit 1000 --shifts corruptions foreign \
        --corruptions gaussian_noise motion_blur --severities 1 3 5 --foreign mnist fashion_mnist \
        --output outputs/lenet_shifts
    python scripts/evaluate.py outputs/vgg/model.keras --backend tensorflow --shifts clean \
        --output outputs/vgg_clean --export outputs/vgg_saved_model
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(argv=None):
    options = vars(parse(argv))
    # Keras reads its backend when it is first imported.
    if backend := options.pop("backend"):
        os.environ["KERAS_BACKEND"] = backend
    model, export, data_dir = (options.pop(name) for name in ("model", "export", "data_dir"))
    output = options.pop("output") or Path(model).parent / "robustness"

    import lib
    from lib import robustness

    errors = (lib.RunError, lib.data.DataError, OSError)
    # What was not given is the library's own default.
    options = {name: value for name, value in options.items() if value is not None}
    try:
        options = {**beside(model, options.get("dataset")), **options}
        settings = robustness.Settings(**options)
    except errors as error:
        return fail(error, code=1)
    except ValueError as error:
        return fail(error, code=2)
    try:
        record = robustness.evaluate(model, settings, output, data_dir, export=export)
    except errors as error:
        return fail(error, code=1)
    print(f"\n{robustness.table(record['rows'])}\n\nWritten to {output}.")
    return 0


def beside(model, dataset):
    """Return the data in settings.json beside a model, if it is of this dataset."""
    from lib import RunError
    from lib.scoring import trained_on

    try:
        known = trained_on(model)
    except RunError:
        if dataset is None:
            raise
        return {}
    return known if dataset in (None, known["dataset"]) else {}


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a .keras file")
    add = parser.add_argument_group("model").add_argument
    add("--dataset", help="of the model (default: that in settings.json beside the model)")
    add(
        "--classes",
        type=int,
        help="how many of the first classes it knows, if not all (default: as in settings.json)",
    )
    add("--samples", type=int, help="draws, where the model has any (default 64)")
    add = parser.add_argument_group("shifts").add_argument
    add("--shifts", nargs="+", metavar="SHIFT", help="some of those above (default: all)")
    add("--corruptions", nargs="+", metavar="NAME", help="such as gaussian_noise (default: all)")
    add("--severities", nargs="+", type=int, metavar="N", help="1 to 5 (default: all)")
    add("--degrees", nargs="+", type=float, metavar="ANGLE", help="(default: 15, 30, ... 180)")
    add("--epsilons", nargs="+", type=float, metavar="STEP", help="of 255 (default: 1 2 4 8)")
    add(
        "--foreign",
        nargs="+",
        metavar="DATASET",
        help="cifar10, fashion_mnist, mnist or digits (default: fashion_mnist, for fashion_mnist "
        "mnist, for digits none)",
    )
    add = parser.add_argument_group("run and output").add_argument
    add("--limit", type=int, metavar="N", help="use only so many test images")
    add("--seed", type=int, help="of draws and corruptions (default 0)")
    add("--backend", choices=("tensorflow", "jax"), help="default: KERAS_BACKEND, or tensorflow")
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    add("--output", metavar="FOLDER", help="of the results (default: robustness beside the model)")
    add("--export", metavar="FOLDER", help="write a SavedModel of the averaged model there")
    return parser.parse_args(argv)


def fail(error, code):
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

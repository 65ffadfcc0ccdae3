r"""Export a saved model as a SavedModel, which TensorFlow runs without this library.

The model is a .keras file, from either backend: a stochastic model, such as the model.keras of
train_cifar.py, or a MonteCarlo, whose settings are kept. The folder answers with the averaged
prediction and its uncertainty; docs/serving.md shows how to query it, scripts/serve.py serves it.

Examples:
    python scripts/export.py outputs/lenet/model.keras saved_model/1
    python scripts/export.py model.keras saved_model/1 --samples 32 --seed 0 --overwrite
    python scripts/export.py model.keras saved_model/1 --head softmax --from-logits
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(argv=None):
    options = parse(argv)
    # Keras reads its backend when it is first imported, and TensorFlow alone writes SavedModels.
    os.environ["KERAS_BACKEND"] = "tensorflow"

    import keras

    import tfp_ibnn as ibnn

    meaning = {"head": options.head, "from_logits": options.from_logits}
    try:
        model = keras.saving.load_model(options.model)
        if not isinstance(model, (ibnn.MonteCarlo, ibnn.Conformal, ibnn.OODDetector)):
            model = ibnn.MonteCarlo(model, **meaning)
        elif any(value is not None for value in meaning.values()):
            return fail(
                f"--head and --from-logits are settled in a {type(model).__name__}.", code=2
            )
        ibnn.export(
            model,
            options.folder,
            samples=options.samples,
            seed=options.seed,
            overwrite=options.overwrite,
        )
    except Exception as error:  # whatever a file may hold
        return fail(error, code=1)
    print(f"Written to {options.folder}.")
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a .keras file")
    add("folder", help="new or empty; TensorFlow Serving wants a number as its name")
    add("--samples", type=from_(1), help="draws (default: the MonteCarlo's, or 128)")
    add("--seed", type=from_(0), help="of the draws (default: the MonteCarlo's, or a random one)")
    add(
        "--head",
        choices=("softmax", "sigmoid", "gaussian", "point"),
        help="what the output means (default: found out from the model)",
    )
    add(
        "--from-logits",
        action=argparse.BooleanOptionalAction,
        help="whether the output is logits (default: found out from the model)",
    )
    add("--overwrite", action="store_true", help="replace a SavedModel that is there")
    return parser.parse_args(argv)


def from_(least):
    def number(text):
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is not {least} or above")
        return value

    return number


def fail(error, code):
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"error: {lines[0]}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

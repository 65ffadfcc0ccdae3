r"""Export a saved model to a SavedModel, an ONNX or a LiteRT file, which run without this library.

The model is a .keras file, from either backend: a stochastic model, such as the model.keras of
train_cifar.py, or a MonteCarlo, whose settings are kept. What is written answers with the averaged
prediction and its uncertainty; docs/serving.md shows how to query it, scripts/serve.py serves a
SavedModel. In an environment with the package, `python -m tfp_ibnn export` does the same.

Examples:
    python scripts/export.py outputs/lenet/model.keras saved_model/1
    python scripts/export.py model.keras saved_model/1 --samples 32 --seed 0 --overwrite
    python scripts/export.py model.keras saved_model/1 --head softmax --from-logits
    python scripts/export.py model.keras model.onnx --format onnx --samples 32
    python scripts/export.py model.keras model.tflite --format litert --quantization int8 \
        --representative-data x.npy
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(argv=None):
    options = parse(argv)
    # Keras reads its backend when it is first imported, and TensorFlow alone writes SavedModels.
    os.environ["KERAS_BACKEND"] = "tensorflow"

    from tfp_ibnn.export.command import UsageError, run

    try:
        run(
            options.model,
            options.output,
            format=options.format,
            head=options.head,
            from_logits=options.from_logits,
            draws=options.samples,
            seed=options.seed,
            threshold=options.threshold,
            class_names=options.class_names,
            quantization=options.quantization,
            representative_data=options.representative_data,
            overwrite=options.overwrite,
        )
    except UsageError as error:
        return fail(error, code=2)
    except Exception as error:  # whatever a file may hold
        return fail(error, code=1)
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a .keras file")
    add(
        "output",
        help="a new file; or a folder, new or empty, which for TensorFlow Serving is named "
        "by a number",
    )
    add("--format", choices=("saved_model", "onnx", "litert"), default="saved_model")
    add(
        "--samples",
        "--draws",
        type=from_(1),
        help="draws (default: the MonteCarlo's, or 128; in ONNX and LiteRT at most 32, or all "
        "networks of an ensemble)",
    )
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
    add("--threshold", type=float, help="the confidence below which to refuse")
    add("--class-names", nargs="+", metavar="NAME", help="for the metadata")
    add("--quantization", choices=("dynamic", "float16", "int8"), help="of a LiteRT file")
    add(
        "--representative-data",
        metavar="FILE.npy",
        help="typical inputs, by which --quantization int8 chooses its ranges",
    )
    add("--overwrite", action="store_true", help="replace what is there")
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

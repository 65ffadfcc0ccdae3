r"""Train an implicit Bayesian network on real images, test it and report.

The data is fetched once, verified and cached. A deterministic network is trained or read, gets a
posterior, and is trained with `fit`. The output folder receives the log (CSV and TensorBoard), a
checkpoint an epoch, and at the end the scores, figures, the model (.keras and SavedModel) and a
model card. If a run is interrupted, the same command resumes it.

Examples:
    python scripts/train_cifar.py --output outputs/lenet
    python scripts/train_cifar.py --dataset fashion_mnist --posterior gaussian --epochs 20 \
        --pretrain-epochs 10 --prior-scale 0.2 --seed 1 --output outputs/fashion
    python scripts/train_cifar.py --model vgg16 --posterior my_posteriors.json --backend jax \
        --mixed-precision bfloat16 --kl-warmup 20 --output outputs/vgg
    python scripts/train_cifar.py --dataset digits --model mlp --posterior none --epochs 5 \
        --output outputs/digits_mlp
    python scripts/train_cifar.py --model vgg16 --devices 4 --batch-size 512 --output outputs/vgg4

A posterior file maps patterns of layer names to posteriors, the first match wins:
    {"conv2": {"posterior": "NormalInvConv", "depth": 3}, ".*": {"posterior": "NormalAffine"}}
"""

import argparse
import os
import sys
import tomllib
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# The settings of a run, which cannot be imported before the backend is chosen.
OPTIONS = Path(__file__).with_name("lib") / "settings.toml"
TYPES = {"count": int, "whole": int, "seed": int, "text": str, "pattern": str, "flag": bool}
# Those whose default depends on the network and the data.
BY_THE_LIBRARY = ("prior_scale", "beta")
# Of --help; options that no other group has are in the third.
GROUPS = {
    "data and network": "dataset classes train_size limit augment model dropout dropout_layers",
    "posterior": "posterior noise kl_reduction affine deterministic_layers flow_layers flow_depth "
    "base_components components mean_spread prior_scale learn_prior_scale initial_scale beta gamma",
    "training": "",
    "evaluation and logs": "samples validation evaluate_every evaluation_samples log_every "
    "elbo_passes",
}


def main(argv=None):
    options = vars(parse(argv))
    # Keras reads its backend when it is first imported.
    if backend := options.pop("backend"):
        os.environ["KERAS_BACKEND"] = backend
    output, data_dir = options.pop("output"), options.pop("data_dir")
    precision = options.pop("mixed_precision")
    options["precision"] = f"mixed_{precision}" if precision else "float32"

    try:
        import lib
    except ModuleNotFoundError as error:
        return fail(f"{error}: is the backend {backend or 'of Keras'!r} installed here?", code=2)

    where, jit = (options.pop("devices"), options.pop("distributed")), options.pop("jit")
    try:
        devices = lib.devices_for(*where)  # before the settings make any tensor
        if not jit:
            devices.jit_compile = False
        settings = lib.Settings.with_defaults(**options)
    except ValueError as error:
        return fail(error, code=2)
    try:
        lib.run(settings, output, data_dir, devices=devices)
    except (lib.RunError, lib.data.DataError, OSError) as error:
        return devices.abort(fail(error, code=1))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr)
        return devices.abort(130)
    except BaseException:
        if devices.shard[1] > 1:  # the others would wait for this process
            traceback.print_exc()
            devices.abort(1)
        raise
    if devices.is_first:
        print(f"Written to {output}: see MODEL_CARD.md there.")
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", required=True, help="folder of the run, new or to be resumed")
    options = tomllib.loads(OPTIONS.read_text(encoding="utf-8"))["train"]
    del options["precision"]  # --mixed-precision
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for name, option in options.items():
        group = next((t for t, names in GROUPS.items() if name in names.split()), "training")
        kind = TYPES.get(option["kind"] if isinstance(option["kind"], str) else "text", float)
        default = None if name in BY_THE_LIBRARY else option.get("default")
        more = {"type": kind, "default": default}
        if kind is bool:
            no = argparse.BooleanOptionalAction
            more = {"action": no if "default" not in option else "store_true"}
        groups[group].add_argument(f"--{name.replace('_', '-')}", **more, help=option["help"])
    add = parser.add_argument_group("backend and devices").add_argument
    add("--backend", choices=("tensorflow", "jax"), help="default: KERAS_BACKEND, or tensorflow")
    add(
        "--mixed-precision",
        nargs="?",
        const="bfloat16",
        choices=("bfloat16", "float16"),
        help="compute in 16 bits (bfloat16 if no kind is given)",
    )
    add(
        "--jit",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile training steps by XLA where Keras does, on GPUs and by JAX (default)",
    )
    add("--devices", type=int, help="GPUs, or else CPU devices, to share each batch (default 1)")
    add(
        "--distributed",
        action="store_true",
        help="with other processes, set by KERAS_DISTRIBUTION_... (JAX; docs/distributed.md)",
    )
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    return parser.parse_args(argv)


def fail(error, code):
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

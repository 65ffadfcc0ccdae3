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
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(argv=None):
    options = vars(parse(argv))
    # Keras reads its backend when it is first imported.
    if backend := options.pop("backend"):
        os.environ["KERAS_BACKEND"] = backend
    output, data_dir = options.pop("output"), options.pop("data_dir")
    precision = options.pop("mixed_precision")
    options["precision"] = f"mixed_{precision}" if precision else "float32"

    try:
        import experiments
        from tfp_ibnn import data
    except ModuleNotFoundError as error:
        return fail(f"{error}: is the backend {backend or 'of Keras'!r} installed here?", code=2)

    where, jit = (options.pop("devices"), options.pop("distributed")), options.pop("jit")
    try:
        devices = experiments.devices_for(*where)  # before the settings make any tensor
        if not jit:
            devices.jit_compile = False
        settings = experiments.Settings(**options)
    except ValueError as error:
        return fail(error, code=2)
    try:
        experiments.run(settings, output, data_dir, devices=devices)
    except (experiments.RunError, data.DataError, OSError) as error:
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
    add("--output", required=True, help="folder of the run, new or to be gone on with")
    add("--dataset", default="cifar10", help="cifar10, fashion_mnist, mnist, digits, four_clusters")
    add("--model", default="lenet", help="lenet, vgg16, mlp, mlp_64_64, wide_resnet_16_4, ...")
    add(
        "--posterior",
        default="flow",
        help="none, gaussian, flow, mixture, a JSON file or its content (default flow)",
    )
    add("--noise", default="channel", help="channel or position (default channel)")
    add("--kl-reduction", default="sum", help="over positions: sum (the ELBO) or mean")
    add("--affine", default="last", help="order of the flow's affine map: last or first")
    add("--deterministic-layers", help="pattern of layers without a posterior")
    add("--flow-layers", help="pattern of the layers with a flow (default: the report's)")
    add("--flow-depth", type=int, help="of each flow (default 3 1x1 convolutions, 2 planar flows)")
    add("--base-components", type=int, default=1, help="Gaussians under the flows (default 1)")
    add("--components", type=int, default=4, help="of a mixture (default 4)")
    add("--mean-spread", type=float, help="of the mixture's means at the start")
    add("--prior-scale", type=float, default=0.5, help="of the prior (default 0.5)")
    add("--learn-prior-scale", action="store_true", help="train the prior's scales as well")
    add("--initial-scale", type=float, help="of the posterior at the start")
    add("--beta", type=float, default=1.0, help="weight of the KL (default 1: the ELBO)")
    add("--gamma", type=float, default=0.0, help="weight of the entropy (default 0)")
    add("--kl-warmup", type=int, default=0, help="epochs in which beta rises from 0 (default 0)")
    add("--epochs", type=int, default=50, help="of training (default 50)")
    add("--pretrain-epochs", type=int, default=0, help="of the deterministic network before")
    add("--pretrained", help="deterministic network to start from, a .keras file")
    add("--freeze-network", action="store_true", help="then train nothing but the posteriors")
    add("--train-samples", type=int, default=1, help="draws for each training example")
    add("--samples", type=int, default=128, help="draws at test time (default 128)")
    add("--optimizer", default="nesterov", help="nesterov, sgd or adam (default nesterov)")
    add("--pretrain-optimizer", help="in the pretraining (default: the same)")
    add("--learning-rate", type=float, default=0.02, help="of the network (default 0.02)")
    add("--stochastic-learning-rate", type=float, help="of the posteriors (default: the same)")
    add("--pretrain-learning-rate", type=float, help="in the pretraining (default: the same)")
    add("--schedule", default="cosine", help="of the rates: cosine or constant")
    add("--warmup-epochs", type=int, default=0, help="in which the rates rise from 0 (default 0)")
    add("--weight-decay", type=float, default=0.0, help="of the network's weights")
    add("--batch-size", type=int, default=128)
    add("--dropout", type=float, default=0.0, help="rate; with --posterior none: MC dropout")
    add(
        "--augment",
        action=argparse.BooleanOptionalAction,
        help="shift and mirror images (default: for cifar10)",
    )
    add("--validation", type=int, default=0, help="test on so many held-out training images")
    add("--evaluate-every", type=int, default=0, help="log test scores every so many epochs")
    add("--evaluation-samples", type=int, default=16, help="draws in these scores (default 16)")
    add("--log-every", type=int, default=1, help="epochs from checkpoint to checkpoint (default 1)")
    add("--classes", type=int, help="use only the first so many classes")
    add("--train-size", type=int, help="draw so many training images by the seed, test on the rest")
    add("--limit", type=int, help="use only so many images")
    add("--elbo-passes", type=int, default=0, help="over the training images, to estimate the ELBO")
    add("--seed", type=int, default=0, help="of weights, noise, augmentation and order")
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
        help="with other processes, as KERAS_DISTRIBUTION_... say (JAX; docs/distributed.md)",
    )
    add("--data-dir", help="cache of the data (default: TFP_IBNN_DATA, or the user's cache)")
    return parser.parse_args(argv)


def fail(error, code):
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

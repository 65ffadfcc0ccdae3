"""Compare a posterior for each layer with one over all layers: step times and ELBOs.

Times: a training step of LeNet and of an MLP (784-256-128-10), batch 128, random images, as ratios
to the deterministic network; all cases take turns in one run, and the minimum counts. ELBOs: the
network is trained on some images of Fashion-MNIST, then its weights stay, and each posterior is
trained alone with beta = 1: these are bounds of one evidence, so that their differences are nats.
Either backend, CPU or GPU; --json keeps the numbers with command, versions and hardware.

Examples:
    python scripts/study.py joint_time --json results/benchmark/joint_tensorflow.json
    KERAS_BACKEND=jax python scripts/study.py joint_time --json results/benchmark/joint_jax.json
    python scripts/study.py joint_time --networks lenet --epochs 0
"""

from studies.command import DATA_DIR, Command

NETWORKS = ("lenet", "mlp")


def options(add):
    add("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    add("--rounds", type=int, default=8, help="repeats of each step's time (default 8)")
    add("--steps", type=int, default=16, help="steps in one execution (default 16)")
    add("--images", type=int, default=5000, help="of Fashion-MNIST (default 5000)")
    add(
        "--epochs", type=int, default=20, help="to train each posterior; 0: times only (default 20)"
    )
    add("--seed", type=int, default=0, help="default 0")
    add("--data-dir", help=DATA_DIR)
    add("--json", help="file for the numbers")


STUDY = Command("joint_time", options)

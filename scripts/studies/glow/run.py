"""Glow steps as posteriors, each without some of their remedies."""

import json
from pathlib import Path

import keras
import matplotlib

matplotlib.use("Agg")
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib import figures, provenance
from studies.glow import VARIANTS, Variant
from tfp_ibnn import plots
from tfp_ibnn.flows import ActNorm, AffineCoupling, CouplingBijector, Flow, FlowBijector
from tfp_ibnn.flows import InvertibleConv1x1 as BoundedConv
from train_digits import LOSS, TRAIN_SIZE, load, network, predict

if keras.backend.backend() == "jax":
    from tensorflow_probability.substrates.jax import bijectors as tfb
else:
    from tensorflow_probability import bijectors as tfb

UNBOUNDED = 1e6
"""A limit so wide that `limit * tanh(x / limit)` is x."""
PRIOR = {"prior_scale": 0.5, "initial_scale": None, "beta": 1.0}


class PlainConv(BoundedConv):
    """The LU convolution with its entries as they are, not enlarged by sqrt(channels)."""

    def build(self, input_shape):
        super().build(input_shape)
        size = self.channels
        self.enlarged = np.where(np.eye(size), 1.0, size**0.5).astype("float32")
        self.factors.assign(self.factors / self.enlarged)

    def parameter(self, weight, condition=None):
        value = super().parameter(weight, condition)
        return value * self.enlarged if weight is self.factors else value


class FreeConvBijector(FlowBijector):
    """y = W x with no structure in W."""

    parameter_ndims = {"matrix": 2}

    def _forward(self, x):
        return ops.matmul(x, ops.transpose(self.matrix))

    def _forward_log_det_jacobian(self, x):
        return ops.slogdet(self.matrix)[1]


class FreeConv(Flow):
    """A free matrix that starts orthogonal."""

    def build(self, input_shape):
        super().build(input_shape)
        size = self.channels
        self.matrix = self.add_parameter("matrix", (size, size), "orthogonal")

    def bijector(self):
        return FreeConvBijector(matrix=ops.convert_to_tensor(self.matrix))


class AblatedCoupling(AffineCoupling):
    """Affine coupling with Glow's scale, sigmoid(s + 2), or with its entries as they are."""

    enlarged, shrinking = True, False

    def build(self, input_shape):
        super().build(input_shape)
        if not self.enlarged:
            kernel = self.network.kernel
            kernel.assign(kernel / kernel.shape[0] ** 0.5)

    def bijector(self):
        def network(kept):
            shift, raw = self.network(kept) if self.enlarged else self.plain(kept)
            return shift, ops.log_sigmoid(raw + 2) if self.shrinking else raw

        return CouplingBijector(
            network=network,
            kept=self.kept_channels,
            moved=self.moved_channels,
            dtype=self.dtype,
        )

    def plain(self, kept):
        """Return what the network does, by weights that nothing divides."""
        of = self.network
        hidden = ops.relu(ops.matmul(kept, of.kernel) + of.bias)
        shift, raw = (ops.matmul(hidden, of.output_kernel[i]) + of.output_bias[i] for i in (0, 1))
        return shift, of.limit * ops.tanh(raw / of.limit)


class AblatedStep(Flow):
    """A Glow step of a given variant."""

    min_channels = 2

    def __init__(self, variant=(), swap=False, **kwargs):
        super().__init__(**kwargs)
        self.variant, self.swap = Variant(*variant), swap
        kind = self.variant
        wide = {} if kind.bounded else {"limit": UNBOUNDED}
        conv = FreeConv if not kind.lu else BoundedConv if kind.enlarged else PlainConv
        ablated = kind.shrinking or not kind.enlarged
        coupling = AblatedCoupling if ablated else AffineCoupling
        self.actnorm = ActNorm(dtype=self.dtype, **wide)
        self.conv = conv(dtype=self.dtype, **(wide if kind.lu else {}))
        self.coupling = coupling(swap=swap, dtype=self.dtype, **wide)
        if ablated:
            self.coupling.enlarged, self.coupling.shrinking = kind.enlarged, kind.shrinking

    def build(self, input_shape):
        super().build(input_shape)
        for part in (self.actnorm, self.conv, self.coupling):
            part.build(input_shape)

    def bijector(self):
        return tfb.Chain([part.bijector() for part in (self.coupling, self.conv, self.actnorm)])

    def get_config(self):
        return {**super().get_config(), "variant": tuple(self.variant), "swap": self.swap}


def posterior(variant):
    steps = [AblatedStep(variant, swap=i % 2 == 1) for i in range(3)]
    return ibnn.FlowPosterior(steps, affine=variant.affine, **PRIOR)


def whiten(layer):
    """Set each ActNorm of a layer's posterior from draws of the noise that reaches it."""
    own = layer.posterior
    draws = keras.random.normal((1024, own.channels), seed=0)
    if own.order == "first":
        draws = own.affine.bijector().forward(draws)
    for step in own.flows:
        step.actnorm.adapt(draws)
        draws = step.bijector().forward(draws)


def run(start, variant, data, options):
    keras.utils.set_random_seed(options.seed)
    x_train, x_test, y_train, y_test = data
    glow = posterior(variant)
    model = ibnn.to_stochastic(
        start, {"conv2|fc1": glow, ".*": ibnn.NormalAffine(**PRIOR)}, train_size=TRAIN_SIZE
    )
    layers = [model.get_layer(name) for name in ("conv2", "fc1")]
    if variant.whiten:
        for layer in layers:
            whiten(layer)
    model.compile(
        ibnn.two_speed(keras.optimizers.Adam(options.lr), stochastic_lr=options.stochastic_lr),
        LOSS,
    )
    before = describe(model, layers, x_test, y_test)
    per_epoch = -(-TRAIN_SIZE // options.batch_size)
    losses = model.fit(
        x_train,
        y_train,
        batch_size=options.batch_size,
        epochs=-(-options.steps // per_epoch),
        callbacks=[keras.callbacks.TerminateOnNaN()],
        verbose=0,
    ).history["loss"]
    finite = bool(np.all(np.isfinite(losses)))
    return {
        "start": before,
        "end": describe(model, layers, x_test, y_test) if finite else None,
        "highest_loss": max(losses) if finite else None,
        "steps": len(losses) * per_epoch,
        "finite": finite,
        "losses": [round(loss, 5) if np.isfinite(loss) else None for loss in losses],
    }


def describe(model, layers, x, y):
    """Return accuracy, and KL, mean and standard deviation of z over both Glow layers."""
    with np.errstate(all="ignore"):
        summaries = [
            [ops.convert_to_numpy(p) for p in layer.posterior.summary()] for layer in layers
        ]
        z = np.concatenate([z for z, _, _ in summaries], axis=-1)
        return {
            "accuracy": float(np.mean(predict(model, x, 8, None).argmax(-1) == y)),
            "kl": float(sum(np.mean(kl) for _, kl, _ in summaries)),
            "off_center": float(np.sqrt(np.mean((z.mean(0) - 1) ** 2))),
            "z_std": float(np.mean(z.std(0))),
        }


def execute(options):
    """Do what the command line says."""
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    data = load()
    keras.utils.set_random_seed(options.seed)
    start = network()
    start.compile(keras.optimizers.Adam(1e-3), LOSS)
    start.fit(data[0], data[2], batch_size=32, epochs=30, verbose=0)
    accuracy = float(np.mean(start.predict(data[1], verbose=0).argmax(-1) == data[3]))
    print(f"deterministic network: accuracy {accuracy:.4f}", flush=True)

    results = {}
    for name in options.only or VARIANTS:
        results[name] = run(start, VARIANTS[name], data, options)
        print(name, {**results[name], "losses": "..."}, flush=True)
        record = {
            "deterministic_accuracy": accuracy,
            "variants": results,
            **provenance(vars(options)),
        }
        (output / "glow_ablation.json").write_text(json.dumps(record, indent=2) + "\n")
    (output / "glow_ablation.md").write_text(table(results))
    print(table(results))
    print("Written:", output, save_figure(results, output))


def table(results):
    def cell(row, when, key, form):
        return form.format(row[when][key]) if row[when] else "-"

    head = (
        "| variant | accuracy, converted | KL | noise off center | z std | "
        "highest loss | accuracy, trained | KL | noise off center | z std |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    columns = (
        ("accuracy", "{:.3f}"),
        ("kl", "{:.3g}"),
        ("off_center", "{:.2f}"),
        ("z_std", "{:.2f}"),
    )
    lines = []
    for name, row in results.items():
        start = [cell(row, "start", key, form) for key, form in columns]
        end = [cell(row, "end", key, form) for key, form in columns]
        highest = (
            f"{row['highest_loss']:.3g}" if row["finite"] else f"not finite by step {row['steps']}"
        )
        lines.append(f"| {name} | " + " | ".join([*start, highest, *end]) + " |\n")
    return head + "".join(lines)


def save_figure(results, folder):
    curves = {name: np.asarray(row["losses"], float) for name, row in results.items()}

    def draw(ax, name):
        losses = curves[name]
        ax.plot(curves.get("as shipped", losses), color="0.75", lw=1)
        ax.plot(losses, color=plots.COLORS[0], lw=1)
        if not np.all(np.isfinite(losses)):
            ax.axvline(len(losses), color=plots.COLORS[1], lw=2)
            ax.text(len(losses), 0.5, " not finite", color=plots.COLORS[1], va="center",
                    transform=ax.get_xaxis_transform())  # fmt: skip
        ax.set_title(name, fontsize=10)
        ax.set(xlabel="epoch", ylabel="loss")
        if np.any(np.isfinite(losses)):
            ax.set_yscale("log")
        ax.label_outer()

    cells = [(name,) for name in curves]
    columns = min(3, len(cells))
    cells += [None] * (-len(cells) % columns)
    grid = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    options = {"sharex": True, "sharey": True, "grid_lines": "both"}
    figure = figures.facets(grid, draw, (11, 0.4 + 2.2 * len(grid)), **options)
    return figures.save({"glow_ablation.png": figure}, folder)[0]

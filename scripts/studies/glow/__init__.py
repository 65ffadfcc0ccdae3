"""Find out what breaks Glow steps as posteriors: take this library's remedies away one at a time.

Three Glow steps serve as the posterior of two layers of a small digits network, trained at the
learning rates of the original report (Adam, 2e-4 for the weights, 2e-3 for the posteriors, batch
128). Each variant lacks one remedy, some lack several. Writes a table (JSON and Markdown)
and a figure of the loss over the epochs.

Examples:
    python scripts/study.py glow
    python scripts/study.py glow --steps 200 --only "as shipped" "no remedy"
    KERAS_BACKEND=jax python scripts/study.py glow --stochastic-lr 0.02
"""

from typing import NamedTuple

from studies.command import Command


class Variant(NamedTuple):
    """What a variant does without."""

    affine: str = "last"  # "first": the flow sees noise of mean 1, not 0
    whiten: bool = False  # set ActNorm from the first draws, as Glow does from data
    bounded: bool = True  # False: log-scales may take any value
    shrinking: bool = False  # coupling scale sigmoid(s + 2), which starts at 0.88
    lu: bool = True  # False: a free matrix, its determinant by slogdet
    enlarged: bool = True  # False: an optimizer's step acts on the entries of matrices directly


VARIANTS = {
    "as shipped": Variant(),
    "affine map first": Variant(affine="first"),
    "affine map first, whitened": Variant(affine="first", whiten=True),
    "shrinking coupling": Variant(shrinking=True),
    "unbounded log-scales": Variant(bounded=False),
    "free matrix": Variant(lu=False),
    "entries not enlarged": Variant(enlarged=False),
    "not enlarged, unbounded": Variant(bounded=False, enlarged=False),
    "no remedy": Variant("first", True, False, True, False, False),
}


def options(add):
    add("--steps", type=int, default=1000, help="of training (default 1000)")
    add("--batch-size", type=int, default=128, help="examples in a step (default 128)")
    add("--lr", type=float, default=2e-4, help="of the weights (default 2e-4)")
    add("--stochastic-lr", type=float, default=2e-3, help="of the posteriors (default 2e-3)")
    add("--seed", type=int, default=0, help="of weights, noise and order (default 0)")
    add("--output", default="outputs/glow", help="folder (default outputs/glow)")
    known = ", ".join(VARIANTS)
    add("--only", nargs="+", choices=list(VARIANTS), metavar="VARIANT", help=f"some of: {known}")


STUDY = Command("glow", options)

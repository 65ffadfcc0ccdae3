"""What both backends share."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensor = Any
"""A tensor of the active backend (`tf.Tensor` or `jax.Array`)."""
Function = Callable[..., Any]
Variables = Sequence[keras.Variable]

NETWORK = "network"
"""The scope of what sampled networks compute, in graphs that are to be converted."""

REPLICA_STRIDE = 0x5851F42D
"""Distance between the seeds of two replicas: seeds that users and layers choose lie close."""

NAMES = """
    KEY_DTYPE SCANS_EPOCHS SeedGenerator check_exports compiled fori_loop freeze_graph gradient
    is_eager jit_pays jvp litert_of load_function matmul mean normal pullback replica_count
    replica_id save_functions set_diagonal tanh tfb tfd tfp times traced_once words
""".split()
"""What the file of each backend defines."""

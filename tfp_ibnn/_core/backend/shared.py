"""What both backends share."""

from typing import Any

__all__ = ["REPLICA_STRIDE", "Tensor"]

Tensor = Any
"""A tensor of the active backend (`tf.Tensor` or `jax.Array`)."""

REPLICA_STRIDE = 0x5851F42D
"""Distance between the seeds of two replicas: seeds that users and layers choose lie close."""

"""From many networks to one: a posterior in a single pass."""

from tfp_ibnn.distillation.distill import distill as distill

"""A posterior or an ensemble in a single-pass network, or in a smaller one."""

from tfp_ibnn.distillation.distill import distill as distill
from tfp_ibnn.distillation.pruning import prune as prune

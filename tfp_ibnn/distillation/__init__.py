"""Distillation of a posterior or an ensemble into a single-pass network."""

from tfp_ibnn.distillation.distill import distill as distill

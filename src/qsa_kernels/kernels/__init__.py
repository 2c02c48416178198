"""Triton kernels: jitted functions only."""

"""What an E4M3 cache does to the answers of a real model: measures with intervals, beside the self-noise."""

from qsa_kernels.measure.quality.record import Plan, record_tables

__all__ = ["Plan", "record_tables"]

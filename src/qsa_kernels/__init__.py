"""Sparse paged grouped-query attention with a calibrated E4M3 K/V cache."""

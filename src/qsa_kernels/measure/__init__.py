"""Measurements: each function returns a tidy table and draws nothing."""

"""Latency of arms, measured so that placement, decoder, run-to-run noise and drift can be told apart.

`protocol` takes samples, `statistics` judges them, `plan` says what is measured, `session` and `recorder` do it on a
device in fresh processes, `results` turns a finished run into tables.
"""

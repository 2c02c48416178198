"""Settings that have to be in place before torch or triton is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from qsa_kernels.report import device

device.prepare("auto")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if not marker:
        return
    import torch

    from qsa_kernels.hardware import interpreting

    if interpreting() or not torch.cuda.is_available():
        pytest.skip(": ".join(["needs a CUDA device", *marker.args]))

"""Which machine the operator's tests run on: a CUDA device, or the Triton interpreter on the CPU."""

import pytest
import torch

from qsa_kernels.hardware import interpreting

ON_GPU = torch.cuda.is_available() and not interpreting()


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors live: "cuda", or "cpu", where kernels run in the interpreter."""
    return "cuda" if ON_GPU else "cpu"

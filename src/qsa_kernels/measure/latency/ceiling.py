"""What bytes over time are held against: how fast the device copies."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from qsa_kernels.measure.latency import protocol

_BYTES = 1 << 30
_SAMPLES = 9


def measure() -> dict[str, Any]:
    """Copy bandwidth of the present device, bytes read and written a second, in GB/s.

    A kernel copies: what a graph makes of `torch.Tensor.copy_` is a job for the copy engines, which are slower than the
    multiprocessors.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    protocol.require_measurable()
    timer = protocol.CudaGraphTimer()
    source = torch.full((_BYTES // 4,), 57.0, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    prepared = timer.prepare([lambda: torch.neg(source, out=target)])
    times = [timer.sample(prepared, primed=False) for _ in range(_SAMPLES)]
    return {
        "copy_gb_per_s": 2 * _BYTES / float(np.median(times)) * 1e-3,
        "bytes": 2 * _BYTES,
        "times_us": times,
        "device": timer.device,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }

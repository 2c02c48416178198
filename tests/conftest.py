"""Settings that have to be in place before torch or triton is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from qsa_kernels.report import device

device.prepare("auto")

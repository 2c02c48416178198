"""Worker process of a recorded run."""

from qsa_kernels.measure.latency.recorder import main

main()

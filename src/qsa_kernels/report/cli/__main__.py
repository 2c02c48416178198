"""`python -m qsa_kernels.report.cli`, for where the `qsa` script is not on the path."""

from qsa_kernels.report.cli import main

main()

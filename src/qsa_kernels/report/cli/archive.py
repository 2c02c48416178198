"""`qsa archive`: the built book as one zip."""

from __future__ import annotations

import typer

NAME = "qsa-kernels-book.zip"


def archive() -> None:
    """Pack the built book into one zip with SHA-256 checksums; the same pages give the same bytes."""
    from qsa_kernels.report import archive as packer
    from qsa_kernels.report import repository

    build = repository.root() / "_build"
    target = packer.write(build / "html", build / NAME)
    typer.echo(f"wrote {target}, SHA-256 {repository.sha256(target)}")

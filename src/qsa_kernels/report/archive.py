"""One file that holds the built book, the same bytes for the same pages."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

from qsa_kernels.report import repository

CHECKSUMS = "SHA256SUMS"
# The earliest date that a zip can hold; the true ones would differ between two builds.
_DATE = (1980, 1, 1, 0, 0, 0)


def write(html: Path, target: Path) -> Path:
    """Pack a built book with a list of checksums that `sha256sum --check` reads; returns `target`.

    Args:
        html: folder of the built book.
        target: the zip to write; one that is there is replaced only by a complete one.

    Raises:
        FileNotFoundError: no index.html in `html`.
    """
    if not (html / "index.html").is_file():
        raise FileNotFoundError(f"no index.html in {html}: run 'make report' first")
    # Sphinx's note to itself, of no use to a reader
    files = sorted(path for path in html.rglob("*") if path.is_file() and path.name != ".buildinfo")
    names = {path.relative_to(html).as_posix(): path for path in files}
    sums = "".join(f"{repository.sha256(path)}  {name}\n" for name, path in names.items())
    folder = target.stem
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=target.parent, prefix=".archive-")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name, path in names.items():
                _add(archive, f"{folder}/{name}", path.read_bytes())
            _add(archive, f"{folder}/{CHECKSUMS}", sums.encode())
        os.chmod(part, 0o644)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    return target


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o100644 << 16
    # the system that packs is part of the file otherwise
    entry.create_system = 3
    archive.writestr(entry, data)

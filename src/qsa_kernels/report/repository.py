"""Where the checkout is, and which state of it is running."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import qsa_kernels

NOT_AVAILABLE = "not available"


def root() -> Path:
    """The folder that holds notebooks/, data/ and book/: QSA_ROOT, else the checkout that the package lies in.

    Raises:
        FileNotFoundError: the package is installed without its checkout, and QSA_ROOT names none.
    """
    given = os.environ.get("QSA_ROOT")
    folder = Path(given).resolve() if given else Path(qsa_kernels.__file__).resolve().parents[2]
    if not (folder / "notebooks").is_dir():
        raise FileNotFoundError(
            f"no notebooks/ in {folder}: install the checkout with 'pip install -e .', or set QSA_ROOT to it"
        )
    return folder


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_sha256(files: Iterable[Path], base: Path) -> str:
    """Hex SHA-256 over names (relative to `base`) and contents of `files`, whatever their order."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(base).as_posix()}\0{sha256(path)}\n".encode())
    return digest.hexdigest()


def package_sha256() -> str:
    """Hash of the source files of `qsa_kernels` as they are on disk now."""
    folder = Path(qsa_kernels.__file__).resolve().parent
    return combined_sha256(folder.rglob("*.py"), folder)


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=root(), capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def commit() -> str:
    """Hash of the commit that is checked out, or "not available" outside of git."""
    return _git("rev-parse", "HEAD") or NOT_AVAILABLE


def is_dirty() -> bool | str:
    """Whether tracked or new files differ from the commit, or "not available" outside of git."""
    changes = _git("status", "--porcelain")
    return NOT_AVAILABLE if changes is None else bool(changes)


def provenance() -> dict[str, Any]:
    """Commit, dirty flag and package hash, under the names that manifests give them."""
    return {"commit": commit(), "dirty": is_dirty(), "package_sha256": package_sha256()}


def describe_commit(commit: str, dirty: bool | str) -> str:
    """Commit and state of the files in words, for the lines under figures."""
    if commit == NOT_AVAILABLE:
        return f"commit {NOT_AVAILABLE}"
    return f"commit {commit[:10]}{' with local changes' if dirty is True else ''}"

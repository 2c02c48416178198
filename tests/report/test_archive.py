"""The book as one file: complete, checkable, and the same bytes for the same pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile

import pytest

from qsa_kernels.report import archive


@pytest.fixture
def html(tmp_path):
    folder = tmp_path / "html"
    (folder / "book/ü").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>first</h1>")
    (folder / "book/ü/cells.csv").write_text("rows\n3\n")
    (folder / ".buildinfo").write_text("state of this machine")
    return folder


def test_two_archives_of_the_same_pages_are_the_same_bytes(html, tmp_path):
    first = archive.write(html, tmp_path / "one/book.zip").read_bytes()
    copy = shutil.copytree(html, tmp_path / "copy")
    for path in copy.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    (copy / "index.html").chmod(0o600)
    assert archive.write(copy, tmp_path / "two/book.zip").read_bytes() == first
    (copy / "index.html").write_text("<h1>second</h1>")
    assert archive.write(copy, tmp_path / "two/book.zip").read_bytes() != first


def test_the_checksums_cover_every_file_and_hold(html, tmp_path):
    with zipfile.ZipFile(archive.write(html, tmp_path / "book.zip")) as packed:
        assert packed.testzip() is None
        packed.extractall(tmp_path / "out")
    folder = tmp_path / "out/book"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"index.html", "book/ü/cells.csv", "SHA256SUMS"}
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 0
    (folder / "index.html").write_text("changed")
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode != 0


def test_without_a_book_nothing_is_written(tmp_path):
    target = tmp_path / "book.zip"
    target.write_bytes(b"old")
    with pytest.raises(FileNotFoundError, match="make report"):
        archive.write(tmp_path, target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]

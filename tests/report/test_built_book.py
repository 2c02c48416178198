"""The whole book, built again from the pages that are there; `make test-pages` asks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsa_kernels.report import book

CHECKOUT = Path(__file__).resolve().parents[2]
BUILT = CHECKOUT / "_build/html"

pytestmark = [
    pytest.mark.skipif("QSA_REBUILD" not in os.environ, reason="takes a minute; 'make test-pages' sets QSA_REBUILD"),
    pytest.mark.skipif(not (BUILT / "index.html").is_file(), reason="no book is built; run 'make report'"),
    pytest.mark.timeout(300),
]


def test_building_again_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("QSA_ROOT", str(CHECKOUT))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    again = book.build(tmp_path / "html").parent
    assert book.differences(BUILT, again) == []


def test_whatever_may_differ_says_why():
    assert all(len(reason) > 20 for reason in book.VARYING.values())

"""`qsa overlay` as people call it: what it accepts, and every damaged copy that it must refuse."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from qsa_kernels import scales
from qsa_kernels.measure import calibration
from qsa_kernels.report import cli, repository
from qsa_kernels.scales import QWEN4_EXP
from qsa_kernels.weightfile import INDEX_NAME

PREFIX = "model.language_model.layers"
EXAMPLE = repository.root() / "data" / "overlays" / "example"
OVERLAY = EXAMPLE / "example-model-kvscales.safetensors"


Qsa = Callable[..., tuple[int, str, str]]


@pytest.fixture
def qsa(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Qsa:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qsa", "overlay", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), output.out, output.err

    return run


def key(layer: int, kind: str) -> str:
    return f"{PREFIX}.{layer}.self_attn.{kind}_scale"


def header(edit: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """Rewrite the header of the file and leave its data."""

    def damage(content: bytes) -> bytes:
        end = 8 + struct.unpack("<Q", content[:8])[0]
        record = json.loads(content[8:end])
        edit(record)
        text = json.dumps(record).encode()
        return struct.pack("<Q", len(text)) + text + content[end:]

    return damage


def text(old: str, new: str) -> Callable[[bytes], bytes]:
    """Replace text in the header, without parsing it."""

    def damage(content: bytes) -> bytes:
        end = 8 + struct.unpack("<Q", content[:8])[0]
        changed = content[8:end].replace(old.encode(), new.encode(), 1)
        assert changed != content[8:end]
        return struct.pack("<Q", len(changed)) + changed + content[end:]

    return damage


def values(edit: Callable[[dict[str, np.ndarray]], object]) -> Callable[[bytes], bytes]:
    """Rewrite the file with other tensors."""

    def damage(content: bytes) -> bytes:
        tensors = dict(load(content))
        edit(tensors)
        return save(tensors)

    return damage


def scalar(number: float) -> np.ndarray:
    return np.array(number, np.float32)


def entry(layer: int, kind: str, **changes: object) -> Callable[[bytes], bytes]:
    """Change the header entry of one scale."""
    return header(lambda record: record[key(layer, kind)].update(changes))


def put(layer: int, kind: str, value: np.ndarray) -> Callable[[bytes], bytes]:
    """Replace or add one tensor."""
    return values(lambda tensors: tensors.update({key(layer, kind): value}))


def shift(tensors: dict[str, np.ndarray]) -> None:
    """Layer ids counted from 1."""
    for layer in QWEN4_EXP.layers:
        for kind in "kv":
            tensors[key(layer + 1, kind)] = tensors.pop(key(layer, kind))


def rename(tensors: dict[str, np.ndarray]) -> None:
    """One of the namings that other stacks use."""
    tensors[f"{PREFIX}.3.self_attn.k_proj.k_scale"] = tensors.pop(key(3, "k"))


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "last-byte-missing": (lambda c: c[:-1], "needs bytes 2636 to 2640, the file ends at byte 2639"),
    "half-of-the-data-missing": (lambda c: c[:-48], f"truncated: {key(31, 'k')} needs bytes"),
    "cut-inside-the-header": (lambda c: c[:900], "the header should end at byte 2544, the file ends at byte 900"),
    "cut-after-the-length": (lambda c: c[:8], "the header should end at byte 2544, the file ends at byte 8"),
    "one-byte-too-many": (lambda c: c + b"\0", "bytes 2640 to 2641 at the end belong to no tensor"),
    "header-length-doubled": (
        lambda c: struct.pack("<Q", 5072) + c[8:],
        "the header should end at byte 5080, the file ends at byte 2640",
    ),
    "header-length-short": (lambda c: struct.pack("<Q", 2000) + c[8:], "header (bytes 8 to 2008)"),
    "header-not-utf8": (lambda c: c[:100] + b"\xff" + c[101:], "bytes 8 to 2544): no UTF-8 text from byte 92 on"),
    "duplicate-key": (text(key(7, "v"), key(7, "k")), f"duplicate key '{key(7, 'k')}'"),
    "duplicate-metadata-key": (text('"format":"pt"', '"format":"pt","format":"pt"'), "duplicate key 'format'"),
    "two-tensors-on-the-same-bytes": (entry(3, "v", data_offsets=[0, 4]), f"{key(3, 'v')}: bytes"),
    "a-gap-between-tensors": (header(lambda h: h.pop(key(3, "k"))), "before it belong to no tensor"),
    "bytes-beyond-the-end": (entry(47, "v", data_offsets=[400, 404]), key(47, "v")),
    "negative-offset": (entry(47, "v", data_offsets=[-4, 0]), key(47, "v")),
    "huge-shape": (entry(11, "k", shape=[2**40, 2**40]), f"{key(11, 'k')}: F32 of shape"),
    "no-dtype": (
        header(lambda h: h[key(11, "k")].pop("dtype")),
        f"{key(11, 'k')}: expected dtype, shape and data_offsets",
    ),
    "unknown-dtype": (entry(11, "k", dtype="F33"), f"{key(11, 'k')}: unknown dtype 'F33'"),
    "integer-dtype": (entry(11, "k", dtype="I32"), f"{key(11, 'k')}: expected dtype float32, got I32"),
    "half-precision": (put(19, "v", np.array(0.03, np.float16)), f"{key(19, 'v')}: expected dtype"),
    "bf16-dtype": (entry(19, "v", dtype="BF16", shape=[2]), f"{key(19, 'v')}: expected dtype float32, got BF16"),
    "one-element-a-head": (put(23, "k", np.full(2, 0.03, np.float32)), f"{key(23, 'k')}: expected shape"),
    "no-element": (put(23, "k", np.full(0, 0.03, np.float32)), f"{key(23, 'k')}: expected shape"),
    "shape-one-by-one": (entry(23, "k", shape=[1, 1]), f"{key(23, 'k')}: expected shape [] or [1], got [1, 1]"),
    "zero": (put(27, "v", scalar(0.0)), f"{key(27, 'v')}: expected a finite scale > 0, got 0.0"),
    "negative": (put(27, "v", scalar(-1.0)), f"{key(27, 'v')}: expected a finite scale > 0, got -1.0"),
    "nan": (put(27, "v", scalar(np.nan)), f"{key(27, 'v')}: expected a finite scale > 0, got nan"),
    "infinite": (put(27, "v", scalar(np.inf)), f"{key(27, 'v')}: expected a finite scale > 0, got inf"),
    "one-missing": (values(lambda v: v.pop(key(7, "k"))), f"missing {key(7, 'k')}"),
    "only-values": (values(lambda v: [v.pop(name) for name in list(v) if "k_scale" in name]), f"missing {key(3, 'k')}"),
    "other-naming": (values(rename), f"missing {key(3, 'k')}"),
    "layer-without-a-cache": (put(4, "k", scalar(0.03)), f"unexpected {key(4, 'k')}"),
    "layers-counted-from-one": (values(shift), f"missing {key(3, 'k')}"),
    "foreign-tensor": (values(lambda v: v.update({"lm_head.weight": scalar(0.03)})), "unexpected lm_head.weight"),
    "other-contract": (
        header(lambda h: h["__metadata__"].update(qsa_kv_scale_contract="e4m3fn(x*scale)")),
        "__metadata__: expected the scale contract",
    ),
    "metadata-of-numbers": (
        header(lambda h: h["__metadata__"].update(format=3)),
        "__metadata__: expected an object of texts",
    ),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_copies_are_refused_by_key_or_byte_range(
    qsa: Qsa, tmp_path: Path, damage: Callable[[bytes], bytes], named: str
) -> None:
    copy = tmp_path / "model-kvscales.safetensors"
    copy.write_bytes(damage(OVERLAY.read_bytes()))
    code, out, err = qsa("check", copy)
    assert code == 1
    assert out == ""
    assert named in err
    assert copy.name in err


def test_there_are_enough_damaged_copies() -> None:
    assert len(DAMAGED) >= 20


PACK_DAMAGE: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "exchanged": (lambda v: v.update({key(7, "k"): v[key(7, "v")], key(7, "v"): v[key(7, "k")]}), key(7, "v")),
    "edited": (lambda v: v.update({key(7, "k"): scalar(0.02)}), key(7, "k")),
    "all-ones": (lambda v: v.update({name: scalar(1.0) for name in v}), key(47, "v")),
}


@pytest.mark.parametrize(("edit", "named"), PACK_DAMAGE.values(), ids=PACK_DAMAGE.keys())
def test_a_pack_that_does_not_match_its_manifest_is_refused(
    qsa: Qsa, tmp_path: Path, edit: Callable[[dict], object], named: str
) -> None:
    pack = Path(shutil.copytree(EXAMPLE, tmp_path / "pack"))
    copy = pack / OVERLAY.name
    copy.write_bytes(values(edit)(copy.read_bytes()))
    code, _, err = qsa("check", pack)
    assert code == 1
    assert "SHA-256 of the overlay" in err
    assert f"{named}: max_abs" in err


class TestCheck:
    def test_the_example_has_2640_bytes_and_passes(self, qsa: Qsa) -> None:
        assert OVERLAY.stat().st_size == 2640
        for path in (OVERLAY, EXAMPLE):
            code, out, err = qsa("check", path)
            assert (code, err) == (0, "")
            assert "24/24 scales load" in out

    def test_another_base_is_refused(self, qsa: Qsa, tmp_path: Path) -> None:
        code, _, err = qsa("check", EXAMPLE, "--base-index-sha256", "da" * 32)
        assert code == 1
        assert "bound to base index" in err
        (tmp_path / INDEX_NAME).write_text("{}")
        assert qsa("check", EXAMPLE, "--base-index", tmp_path)[0] == 1
        assert (
            "is not the SHA-256" in qsa("check", EXAMPLE, "--base-index", tmp_path, "--base-index-sha256", "da" * 32)[2]
        )

    def test_another_geometry(self, qsa: Qsa) -> None:
        code, _, err = qsa("check", OVERLAY, "--layers", "3,7")
        assert code == 1
        assert f"unexpected {key(11, 'k')}" in err
        assert "layers: expected layer ids" in qsa("check", OVERLAY, "--layers", "three")[2]
        assert qsa("check", OVERLAY, "--prefix", "model.layers")[0] == 1

    def test_unit_scales_pass_with_a_warning(self, qsa: Qsa, tmp_path: Path) -> None:
        path = tmp_path / "o.safetensors"
        path.write_bytes(calibration.overlay_bytes(dict.fromkeys(QWEN4_EXP.names(), 1.0), negative_control=True))
        code, out, err = qsa("check", path)
        assert code == 0
        assert "24/24" in out
        assert "uncalibrated" in err

    def test_no_file(self, qsa: Qsa, tmp_path: Path) -> None:
        assert "no such file" in qsa("check", tmp_path / "absent.safetensors")[2]
        assert INDEX_NAME in qsa("check", tmp_path)[2]


class TestShow:
    def test_prints_every_scale_and_its_envelope(self, qsa: Qsa) -> None:
        code, out, err = qsa("show", OVERLAY)
        assert (code, err) == (0, "")
        for layer, kind, scale in scales.load_overlay(OVERLAY, QWEN4_EXP).items():
            assert f"{scale:.10g}" in out, (layer, kind)
            assert f"{448 * scale:.10g}" in out, (layer, kind)
        assert "24 scales from 0.01712472178 to 0.08412388712" in out

    def test_warns_of_unit_scales(self, qsa: Qsa, tmp_path: Path) -> None:
        path = tmp_path / "o.safetensors"
        path.write_bytes(values(lambda v: v.update({key(7, "k"): scalar(1.0)}))(OVERLAY.read_bytes()))
        assert f"1 scales are exactly 1.0: {key(7, 'k')}" in qsa("show", path)[2]
        path.write_bytes(calibration.overlay_bytes(dict.fromkeys(QWEN4_EXP.names(), 1.0), negative_control=True))
        err = qsa("show", path)[2]
        assert "negative control" in err
        assert "uncalibrated" in err


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    name = f"{PREFIX}.3.self_attn.k_proj.weight"
    (folder / "model-00001.safetensors").write_bytes(save({name: np.zeros(2, np.float32)}))
    index = {"metadata": {"total_size": 8}, "weight_map": {name: "model-00001.safetensors"}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    paths = []
    for rank in range(2):
        observer = calibration.Observer([3])
        observer.observe(3, torch.tensor([0.5, 4.0 + rank]), torch.tensor([0.25, 3.0 - rank]))
        paths.append(tmp_path / f"rank{rank}.json")
        observer.write(paths[-1])
    return paths


class TestBuild:
    def test_from_shards_to_a_checkpoint_that_checks(
        self, qsa: Qsa, base: Path, shards: list[Path], tmp_path: Path
    ) -> None:
        options = [part for path in shards for part in ("--shard", path)]
        code, out, err = qsa("build", "--base", base, "--output", tmp_path / "derived", *options)
        assert (code, err) == (0, "")
        assert f"2 scales under {PREFIX}" in out
        assert qsa("check", tmp_path / "derived", "--layers", "3", "--base-index", base)[0] == 0
        loaded = scales.load_checkpoint(tmp_path / "derived", scales.Geometry((3,), PREFIX))
        assert loaded[3] == scales.LayerScales(scales.scale_for(5.0), scales.scale_for(3.0))
        again = qsa("build", "--base", base, "--output", tmp_path / "derived", *options)
        assert again[0] == 1
        assert "exists already" in again[2]

        report = tmp_path / "derived" / calibration.REPORT_NAME
        assert (
            qsa("build", "--base", base, "--output", tmp_path / "second", "--report", report, "--report", report)[0]
            == 0
        )
        assert (tmp_path / "second" / scales.OVERLAY_NAME).read_bytes() == (
            tmp_path / "derived" / scales.OVERLAY_NAME
        ).read_bytes()

    def test_negative_control(self, qsa: Qsa, base: Path, shards: list[Path], tmp_path: Path) -> None:
        with pytest.warns(scales.UncalibratedScales):
            code, *_ = qsa(
                "build",
                "--base",
                base,
                "--output",
                tmp_path / "d",
                "--shard",
                shards[0],
                "--unit-scale-negative-control",
            )
        assert code == 0
        assert "negative control" in qsa("show", tmp_path / "d", "--layers", "3")[2]

    def test_example(self, qsa: Qsa, tmp_path: Path) -> None:
        assert qsa("build", "--example", "--output", tmp_path / "example")[0] == 0
        assert (tmp_path / "example" / OVERLAY.name).read_bytes() == OVERLAY.read_bytes()

    def test_a_pack_for_another_base_is_refused(self, qsa: Qsa, base: Path, tmp_path: Path) -> None:
        code, _, err = qsa("build", "--pack", EXAMPLE, "--base", base, "--output", tmp_path / "derived")
        assert code == 1
        assert "bound to base index" in err
        assert not (tmp_path / "derived").exists()

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ([], "expected exactly one of --shard, --report, --pack and --example; got none"),
            (["--example", "--pack", "x"], "got --pack, --example"),
            (["--report", "r.json"], "--base: expected the checkpoint"),
            (["--report", "absent.json", "--base", "b"], "absent.json: no such file"),
            (["--example", "--unit-scale-negative-control"], "only together with --shard"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(
        self, qsa: Qsa, tmp_path: Path, options: list[str], reason: str
    ) -> None:
        code, _, err = qsa("build", "--output", tmp_path / "out", *options)
        assert code == 1
        assert reason in err
        assert not (tmp_path / "out").exists()

"""Scales: the gate between an overlay file and a cache, and what it refuses (faults B10 to B12, B36, B37)."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from qsa_kernels import scales
from qsa_kernels.cache import PagedKVCache
from qsa_kernels.scales import QWEN4_EXP, Geometry, KVScales, LayerScales, ScaleSlots
from qsa_kernels.weightfile import INDEX_NAME, WeightFileError, read_header

SMALL = Geometry((3, 7), "model.layers")
BASE = "da5ca9c3b65e48e151329e64e141c2fa700bf2f99aec53cc014e4b52a6ff7a84"
FP32_MAX = float(np.finfo(np.float32).max)
OTHER_BASE = "0f" * 32


def unequal(geometry: Geometry) -> dict[str, np.ndarray]:
    """Scales that are all different and no powers of two."""
    return {key: np.array(0.0171 + 0.0013 * i, np.float32) for i, key in enumerate(geometry.names())}


def write(path: Path, values: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    path.write_bytes(save(values, metadata=metadata))
    return path


def write_manifest(path: Path, geometry: Geometry, *, base: str = BASE, **changes: object) -> None:
    """The published layout, for an overlay whose scales belong to the maxima 448 times the scale."""
    content = load(path.read_bytes())
    record = {
        "schema_version": 1,
        "artifact_id": "test",
        "scale_contract": scales.CONTRACT,
        "loader_contract": scales.LOADER_CONTRACT,
        "base_checkpoint": {"repo_id": "test/base", "index_sha256": base},
        "scale_file": {
            "filename": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "tensor_names": list(content),
            "tensor_count": len(content),
        },
        "tensors": [
            {"layer": layer, "kind": kind, "max_abs": 448 * float(content[geometry.key(layer, kind)])}
            for layer in geometry.layers
            for kind in ("k", "v")
        ],
        **changes,
    }
    (path.parent / scales.MANIFEST_NAME).write_text(json.dumps(record))


class TestGeometry:
    def test_the_public_model_has_24_scales(self) -> None:
        keys = QWEN4_EXP.names()
        assert len(keys) == 24
        assert keys[:2] == tuple(f"model.language_model.layers.3.self_attn.{kind}_scale" for kind in "kv")
        assert keys[-1] == "model.language_model.layers.47.self_attn.v_scale"
        assert [layer for layer in range(48) if (layer + 1) % 4 == 0] == list(QWEN4_EXP.layers)

    @pytest.mark.parametrize(
        ("layers", "prefix"), [((), "m"), ((7, 3), "m"), ((3, 3), "m"), ((-1, 3), "m"), ((3,), ""), ((3,), "m.")]
    )
    def test_impossible_ones_are_refused(self, layers: tuple[int, ...], prefix: str) -> None:
        with pytest.raises(ValueError, match=r"layers: expected|prefix: expected"):
            Geometry(layers, prefix)


class TestScaleFor:
    @pytest.mark.parametrize(("max_abs", "reported"), [(7.671875, "0.0171247218"), (37.6875, "0.0841238871")])
    def test_gives_the_published_ends(self, max_abs: float, reported: str) -> None:
        assert f"{scales.scale_for(max_abs):.10f}" == reported

    @given(st.floats(min_value=2**-149, max_value=FP32_MAX, width=32))
    def test_is_the_smallest_that_covers(self, max_abs: float) -> None:
        scale = scales.scale_for(max_abs)
        below = float(np.nextafter(np.float32(scale), np.float32(0)))
        assert float(np.float32(scale)) == scale
        assert Fraction(scale) * 448 >= Fraction(max_abs) > Fraction(below) * 448

    @pytest.mark.parametrize("max_abs", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300])
    def test_needs_a_finite_positive_maximum(self, max_abs: float) -> None:
        with pytest.raises(ValueError, match="max_abs"):
            scales.scale_for(max_abs)


class TestLoading:
    def test_reads_each_scale_into_its_own_place(self, tmp_path: Path) -> None:
        values = unequal(QWEN4_EXP)
        loaded = scales.load_overlay(write(tmp_path / "o.safetensors", values), QWEN4_EXP)
        for layer, kind, scale in loaded.items():
            assert scale == float(values[QWEN4_EXP.key(layer, kind)])
        assert loaded[7].k_scale != loaded[7].v_scale
        assert not loaded.uncalibrated
        assert loaded.base_index_sha256 is None

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(min_value=2**-149, max_value=FP32_MAX, width=32), min_size=4, max_size=4))
    def test_any_positive_finite_scales_survive_bit_for_bit(
        self, tmp_path_factory: pytest.TempPathFactory, numbers: list[float]
    ) -> None:
        values = {key: np.array(number, np.float32) for key, number in zip(SMALL.names(), numbers, strict=True)}
        path = write(tmp_path_factory.mktemp("round") / "o.safetensors", values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", scales.UncalibratedScales)
            loaded = scales.load_overlay(path, SMALL)
        got = np.array([scale for _, _, scale in loaded.items()], np.float32)
        np.testing.assert_array_equal(got.view(np.uint32), np.array(numbers, np.float32).view(np.uint32))

    def test_shape_one_and_empty_metadata_are_fine(self, tmp_path: Path) -> None:
        values = {key: value.reshape(1) for key, value in unequal(SMALL).items()}
        text = save(values)
        length = struct.unpack("<Q", text[:8])[0]
        header = b'{"__metadata__":{},' + text[9 : 8 + length].rstrip()
        path = tmp_path / "o.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + text[8 + length :])
        assert read_header(path).metadata == {}
        assert scales.load_overlay(path, SMALL)[3].k_scale == float(values[SMALL.key(3, "k")][0])

    def test_all_ones_load_with_a_visible_note(self, tmp_path: Path) -> None:
        path = write(tmp_path / "o.safetensors", {key: np.array(1, np.float32) for key in QWEN4_EXP.names()})
        with pytest.warns(scales.UncalibratedScales, match="all 24 scales are exactly 1.0: uncalibrated"):
            assert scales.load_overlay(path, QWEN4_EXP).uncalibrated

    def test_23_of_24_name_the_missing_one_and_the_count(self, tmp_path: Path) -> None:
        values = unequal(QWEN4_EXP)
        del values[QWEN4_EXP.key(7, "k")]
        with pytest.raises(ValueError, match="loaded 23/24 scales") as caught:
            scales.load_overlay(write(tmp_path / "o.safetensors", values), QWEN4_EXP)
        assert "missing model.language_model.layers.7.self_attn.k_scale" in str(caught.value)

    @pytest.mark.parametrize(
        "rename",
        [
            pytest.param(lambda key: key.replace("self_attn.k_scale", "self_attn.k_proj.k_scale"), id="k_proj"),
            pytest.param(lambda key: key.replace("language_model.", ""), id="other-prefix"),
            pytest.param(lambda key: f"unrelated.{key}", id="longer-prefix"),
        ],
    )
    def test_another_naming_is_refused_not_guessed(self, tmp_path: Path, rename: Callable[[str], str]) -> None:
        renamed = {rename(key): value for key, value in unequal(QWEN4_EXP).items()}
        lost = [key for key in QWEN4_EXP.names() if key not in renamed]
        with pytest.raises(WeightFileError, match=f"loaded {24 - len(lost)}/24 scales") as caught:
            scales.load_overlay(write(tmp_path / "o.safetensors", renamed), QWEN4_EXP)
        assert [problem for problem in caught.value.problems if problem.startswith("missing")] == [
            f"missing {key}" for key in lost
        ]

    def test_an_empty_overlay_lists_all_24(self, tmp_path: Path) -> None:
        with pytest.raises(WeightFileError, match="loaded 0/24 scales") as caught:
            scales.load_overlay(write(tmp_path / "o.safetensors", {}), QWEN4_EXP)
        assert sum(problem.startswith("missing") for problem in caught.value.problems) == 24

    def test_every_problem_comes_in_one_message(self, tmp_path: Path) -> None:
        values = unequal(QWEN4_EXP)
        del values[QWEN4_EXP.key(3, "v")]
        values[QWEN4_EXP.key(11, "k")] = np.array(-1, np.float32)
        values[QWEN4_EXP.key(15, "v")] = np.array(0.02, np.float16)
        values["model.language_model.layers.4.self_attn.k_scale"] = np.array(0.02, np.float32)
        with pytest.raises(WeightFileError) as caught:
            scales.load_overlay(write(tmp_path / "o.safetensors", values), QWEN4_EXP)
        for part in ("21/24", "layers.3.self_attn.v_scale", "layers.11.", "layers.15.", "F16", "layers.4."):
            assert part in str(caught.value)


class TestForeignFiles:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            pytest.param(b"", "empty", id="empty"),
            pytest.param(b"\x10" + bytes(6), "truncated: 7 bytes", id="seven-bytes"),
            pytest.param(struct.pack("<Q", 99), "truncated: the header should end at byte 107", id="length-only"),
            pytest.param(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer", id="lfs"),
            pytest.param(b"\xff" * 8, "not safetensors|truncated", id="length-ff"),
            pytest.param(b"\xff" * 8 + b"abc" * 40, "not safetensors", id="length-ff-and-more"),
            pytest.param(pickle.dumps({"a": 1.0}, protocol=4), "pickle", id="pickle"),
            pytest.param(b"<html><body>404</body></html>", "HTML", id="error-page"),
            pytest.param(b"GGUF" + bytes(60), "GGUF", id="gguf"),
            pytest.param(struct.pack("<Q", 4) + b"{]  ", "no JSON", id="broken-header"),
            pytest.param(struct.pack("<Q", 20_000) + b'{"a":' * 4000, "nested too deeply|no JSON", id="deep-header"),
        ],
    )
    def test_reason_and_file_are_named(self, tmp_path: Path, content: bytes, reason: str) -> None:
        path = tmp_path / "model-kvscales.safetensors"
        path.write_bytes(content)
        with pytest.raises(WeightFileError, match=reason) as caught:
            scales.load_overlay(path, QWEN4_EXP)
        assert path.name in str(caught.value)

    def test_zip(self, tmp_path: Path) -> None:
        path = tmp_path / "model-kvscales.safetensors"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.pkl", b"x")
        with pytest.raises(WeightFileError, match="zip archive"):
            scales.load_overlay(path, QWEN4_EXP)

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"absent\.safetensors: no such file"):
            scales.load_overlay(tmp_path / "absent.safetensors", QWEN4_EXP)

    def test_nothing_is_unpickled(self, tmp_path: Path) -> None:
        class Payload:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return (Path.touch, (str(tmp_path / "executed"),))

        path = tmp_path / "o.safetensors"
        path.write_bytes(pickle.dumps(Payload()))
        with pytest.raises(WeightFileError):
            scales.load_overlay(path, QWEN4_EXP)
        assert not (tmp_path / "executed").exists()

    @pytest.mark.parametrize("claimed", [2**31, 2**40, 2**63])
    def test_a_claimed_size_allocates_nothing(self, tmp_path: Path, claimed: int) -> None:
        path = tmp_path / "o.safetensors"
        path.write_bytes(struct.pack("<Q", claimed) + b"{" + bytes(200))
        tracemalloc.start()
        with pytest.raises(WeightFileError, match="truncated"):
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000


class TestValues:
    @pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
    def test_invalid_ones_name_key_and_value(self, tmp_path: Path, value: float) -> None:
        values = unequal(SMALL) | {SMALL.key(7, "v"): np.array(value, np.float32)}
        with pytest.raises(
            ValueError, match=r"invalid model\.layers\.7\.self_attn\.v_scale: expected a finite scale > 0"
        ):
            scales.load_overlay(write(tmp_path / "o.safetensors", values), SMALL)
        with pytest.raises(ValueError, match=r"v_scale: expected a finite scale > 0"):
            LayerScales(0.5, value)

    @pytest.mark.parametrize("shape", [(2,), (4,), (1, 1), (1, 1, 4), (0,)])
    def test_other_shapes_are_refused_with_the_shape(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        values = unequal(SMALL) | {SMALL.key(7, "v"): np.full(shape, 0.02, np.float32)}
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            scales.load_overlay(write(tmp_path / "o.safetensors", values), SMALL)
        assert f"layers.7.self_attn.v_scale: expected shape [] or [1], got {list(shape)}" in str(caught.value)

    @pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8])
    def test_other_dtypes_are_refused(self, tmp_path: Path, dtype: type) -> None:
        values = unequal(SMALL) | {SMALL.key(3, "k"): np.array(1, dtype)}
        with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.k_scale: expected dtype float32, got"):
            scales.load_overlay(write(tmp_path / "o.safetensors", values), SMALL)

    def test_a_number_that_fp32_cannot_hold_is_refused(self) -> None:
        with pytest.raises(ValueError, match="k_scale: expected an FP32 number"):
            LayerScales(0.1, 0.25)


class TestSlots:
    def weights(self, geometry: Geometry = SMALL) -> list[tuple[str, torch.Tensor]]:
        values = [(key, torch.from_numpy(value.reshape(1))) for key, value in unequal(geometry).items()]
        return [
            ("model.layers.3.self_attn.k_proj.weight", torch.zeros(2, 2)),
            *values,
            ("lm_head.weight", torch.ones(1)),
        ]

    def test_a_stream_fills_them_and_keeps_the_rest(self) -> None:
        slots = ScaleSlots(SMALL)
        assert set(slots._slots.values()) == {-1.0}
        rest = [key for key, _ in slots.take(self.weights())]
        assert rest == ["model.layers.3.self_attn.k_proj.weight", "lm_head.weight"]
        assert slots.loaded == set(SMALL.names())
        assert isinstance(slots.finalise(), KVScales)
        assert slots.scales(7).v_scale == float(unequal(SMALL)[SMALL.key(7, "v")])

    def test_a_forward_is_refused_until_finalised(self) -> None:
        slots = ScaleSlots(SMALL)
        list(slots.take(self.weights()))
        with pytest.raises(RuntimeError, match=r"layer 3: the K/V scales are not finalised \(4/4 loaded\)"):
            slots.scales(3)
        slots.finalise()
        assert slots.scales(3).k_scale > 0

    def test_finalise_waits_for_the_end_of_the_stream(self) -> None:
        slots = ScaleSlots(SMALL)
        stream = slots.take(self.weights())
        next(stream)
        with pytest.raises(RuntimeError, match="weights are still being loaded"):
            slots.finalise()
        list(stream)
        slots.finalise()

    def test_missing_ones_name_count_and_keys(self) -> None:
        slots = ScaleSlots(SMALL)
        list(slots.take(self.weights()[:-2]))
        with pytest.raises(WeightFileError, match="loaded 3/4 scales") as caught:
            slots.finalise()
        assert "missing model.layers.7.self_attn.v_scale" in str(caught.value)
        with pytest.raises(RuntimeError, match="not finalised"):
            slots.scales(3)

    @pytest.mark.parametrize(
        ("key", "value", "reason"),
        [
            ("model.layers.3.self_attn.k_scale", torch.tensor(0.02), "came twice"),
            ("model.layers.5.self_attn.k_scale", torch.tensor(0.02), "unexpected"),
            ("model.layers.3.self_attn.v_proj.output_scale", torch.tensor(0.02), "unexpected"),
        ],
    )
    def test_surplus_ones_are_refused(self, key: str, value: torch.Tensor, reason: str) -> None:
        slots = ScaleSlots(SMALL)
        list(slots.take([*self.weights(), (key, value)]))
        with pytest.raises(WeightFileError, match=reason) as caught:
            slots.finalise()
        assert key in str(caught.value)

    def test_nothing_may_come_later(self) -> None:
        slots = ScaleSlots(SMALL)
        list(slots.take(self.weights()))
        slots.finalise()
        with pytest.raises(RuntimeError, match="finalised; no weight may come after that"):
            slots.load("model.layers.3.self_attn.k_scale", torch.tensor(0.5))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_dtypes_are_refused(self, dtype: torch.dtype) -> None:
        slots = ScaleSlots(Geometry((0,), "m"))
        slots.load("m.0.self_attn.k_scale", torch.tensor(0.5, dtype=dtype))
        slots.load("m.0.self_attn.v_scale", torch.tensor(0.25))
        with pytest.raises(WeightFileError, match=r"m\.0\.self_attn\.k_scale: expected dtype float32, got"):
            slots.finalise()

    def test_a_plain_number_is_no_weight(self) -> None:
        with pytest.raises(TypeError, match="expected an FP32 tensor"):
            ScaleSlots(SMALL).load(SMALL.key(3, "k"), 0.5)  # type: ignore[arg-type]

    def test_a_layer_without_scales_is_named(self) -> None:
        slots = ScaleSlots(SMALL)
        list(slots.take(self.weights()))
        with pytest.raises(ValueError, match="layer 4 has no scales; layers with scales: 3, 7"):
            slots.finalise()[4]


class TestBinding:
    @pytest.fixture
    def overlay(self, tmp_path: Path) -> Path:
        path = tmp_path / "model-kvscales.safetensors"
        # maxima that are exact FP16 numbers, so that each scale follows from its maximum
        maxima = {key: 8.0 + 1.5 * i for i, key in enumerate(SMALL.names())}
        write(path, {key: np.array(scales.scale_for(value), np.float32) for key, value in maxima.items()})
        write_manifest(path, SMALL, tensors=[
            {"layer": layer, "kind": kind, "max_abs": maxima[SMALL.key(layer, kind)]}
            for layer in SMALL.layers for kind in ("k", "v")
        ])  # fmt: skip
        return path

    def change(self, overlay: Path, edit: Callable[[dict], object]) -> None:
        file = overlay.parent / scales.MANIFEST_NAME
        record = json.loads(file.read_text())
        edit(record)
        file.write_text(json.dumps(record))

    def test_a_pack_loads_for_its_base(self, overlay: Path) -> None:
        assert scales.load_pack(overlay.parent, SMALL, BASE).base_index_sha256 == BASE
        assert scales.load_overlay(overlay, SMALL).base_index_sha256 == BASE

    def test_another_base_is_refused(self, overlay: Path) -> None:
        with pytest.raises(WeightFileError, match=f"bound to base index {BASE}, expected {OTHER_BASE}"):
            scales.load_overlay(overlay, SMALL, OTHER_BASE)

    def test_no_binding_is_refused_where_one_is_asked_for(self, overlay: Path) -> None:
        (overlay.parent / scales.MANIFEST_NAME).unlink()
        with pytest.raises(WeightFileError, match="not bound to a base index"):
            scales.load_overlay(overlay, SMALL, BASE)

    def test_exchanged_k_and_v_do_not_follow_from_the_maxima(self, overlay: Path) -> None:
        values = load(overlay.read_bytes())
        k, v = SMALL.key(7, "k"), SMALL.key(7, "v")
        values[k], values[v] = values[v], values[k]
        write(overlay, values)
        self.change(
            overlay, lambda record: record["scale_file"].update(sha256=hashlib.sha256(overlay.read_bytes()).hexdigest())
        )
        with pytest.raises(WeightFileError) as caught:
            scales.load_overlay(overlay, SMALL)
        assert all(any(key in problem and "max_abs" in problem for problem in caught.value.problems) for key in (k, v))

    @pytest.mark.parametrize(
        ("edit", "named"),
        [
            (lambda record: record["scale_file"].update(sha256="00" * 32), "SHA-256 of the overlay"),
            (lambda record: record["scale_file"].update(tensor_count=5), "tensor count"),
            (lambda record: record["scale_file"]["tensor_names"].pop(), "does not name model.layers."),
            (lambda record: record["scale_file"]["tensor_names"].append("x"), "names x"),
            (lambda record: record["tensors"].pop(), "no max_abs of layer 7 v"),
            (lambda record: record["tensors"].append({"layer": 5, "kind": "k", "max_abs": 1.0}), "layer 5 k too many"),
            (lambda record: record["tensors"].append(record["tensors"][0]), "listed twice"),
            (lambda record: record["tensors"][0].update(max_abs=9.0), "layers.3.self_attn.k_scale: max_abs 9.0"),
            (lambda record: record["tensors"][0].update(max_abs=-9.0), "tensors.0.max_abs"),
            (lambda record: record["tensors"][0].update(kind="q"), "tensors.0.kind"),
            (lambda record: record.update(schema_version=2), "schema_version"),
            (lambda record: record.update(scale_contract="x*scale"), "scale_contract"),
            (lambda record: record.pop("base_checkpoint"), "base_checkpoint"),
            (lambda record: record["base_checkpoint"].update(index_sha256="xyz"), "index_sha256"),
        ],
    )
    def test_a_manifest_that_disagrees_is_refused(
        self, overlay: Path, edit: Callable[[dict], object], named: str
    ) -> None:
        self.change(overlay, edit)
        with pytest.raises(WeightFileError) as caught:
            scales.load_overlay(overlay, SMALL)
        assert scales.MANIFEST_NAME in str(caught.value)
        assert named in str(caught.value)

    def test_a_manifest_that_is_no_json_is_refused(self, overlay: Path) -> None:
        (overlay.parent / scales.MANIFEST_NAME).write_text('{"schema_version": 1, "schema_version": 1}')
        with pytest.raises(WeightFileError, match="duplicate key 'schema_version'"):
            scales.load_overlay(overlay, SMALL)

    @pytest.mark.parametrize("digest", ["", "DA" * 32, "0" * 63])
    def test_the_asked_digest_must_be_one(self, overlay: Path, digest: str) -> None:
        with pytest.raises(ValueError, match="base_index_sha256: expected 64"):
            scales.load_overlay(overlay, SMALL, digest)


class TestCheckpoint:
    """Index and files must agree about every scale (fault B37)."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write(
            tmp_path / "model-00001.safetensors",
            {"model.layers.3.self_attn.k_proj.weight": np.zeros((2, 2), np.float32)},
        )
        write(tmp_path / "model-kvscales.safetensors", unequal(SMALL))
        weight_map = dict.fromkeys(SMALL.names(), "model-kvscales.safetensors")
        weight_map["model.layers.3.self_attn.k_proj.weight"] = "model-00001.safetensors"
        (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
        return tmp_path

    def weight_map(self, folder: Path, **changes: str | None) -> None:
        record = json.loads((folder / INDEX_NAME).read_text())
        for key, name in changes.items():
            if name is None:
                del record["weight_map"][key]
            else:
                record["weight_map"][key] = name
        (folder / INDEX_NAME).write_text(json.dumps(record))

    def test_a_sound_one_loads(self, folder: Path) -> None:
        assert scales.load_checkpoint(folder, SMALL)[3].k_scale == float(unequal(SMALL)[SMALL.key(3, "k")])

    def refused(self, folder: Path, *parts: str) -> None:
        with pytest.raises(WeightFileError) as caught:
            scales.load_checkpoint(folder, SMALL)
        assert all(part in str(caught.value) for part in parts), str(caught.value)

    def test_indexed_but_not_in_the_file(self, folder: Path) -> None:
        values = unequal(SMALL)
        del values[SMALL.key(3, "k")]
        write(folder / "model-kvscales.safetensors", values)
        self.refused(folder, "missing model.layers.3.self_attn.k_scale", "model-kvscales.safetensors, which lacks it")

    def test_in_the_file_but_not_indexed(self, folder: Path) -> None:
        self.weight_map(folder, **{SMALL.key(3, "k"): None})
        self.refused(folder, "model.layers.3.self_attn.k_scale is in model-kvscales.safetensors but not in the index")

    def test_in_two_files(self, folder: Path) -> None:
        write(folder / "model-00002.safetensors", {SMALL.key(7, "v"): np.array(0.5, np.float32)})
        self.refused(folder, f"{SMALL.key(7, 'v')} is in more than one file", "model-00002.safetensors")

    def test_absent_file(self, folder: Path) -> None:
        self.weight_map(folder, **{"lm_head.weight": "model-00009.safetensors"})
        self.refused(folder, "model-00009.safetensors", "lm_head.weight", "absent")

    def test_absent_overlay(self, folder: Path) -> None:
        (folder / "model-kvscales.safetensors").unlink()
        self.refused(folder, "model-kvscales.safetensors", "absent", "layers.3.self_attn.k_scale")

    def test_scale_of_a_layer_that_has_none(self, folder: Path) -> None:
        write(folder / "model-00002.safetensors", {"model.layers.4.self_attn.k_scale": np.array(0.5, np.float32)})
        self.weight_map(folder, **{"model.layers.4.self_attn.k_scale": "model-00002.safetensors"})
        self.refused(folder, "unexpected model.layers.4.self_attn.k_scale in model-00002.safetensors")

    def test_spread_over_two_files(self, folder: Path) -> None:
        values = unequal(SMALL)
        write(folder / "model-00002.safetensors", {SMALL.key(7, "v"): values.pop(SMALL.key(7, "v"))})
        write(folder / "model-kvscales.safetensors", values)
        self.weight_map(folder, **{SMALL.key(7, "v"): "model-00002.safetensors"})
        self.refused(folder, "spread over model-00002.safetensors, model-kvscales.safetensors")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate key 'a'"),
            ('{"weight_map": {"a": "../x.safetensors"}}', "a: expected the name of a file beside the index"),
            ('{"weight_map": {"a": 3}}', "a: expected the name of a file"),
            ('{"weight_map": []}', "expected an object 'weight_map'"),
            ("[]", "expected a JSON object"),
            ('{"weight_map": {}, "x": NaN}', "NaN is no JSON number"),
            ("version https://git-lfs", "no JSON"),
        ],
    )
    def test_broken_index(self, folder: Path, text: str, reason: str) -> None:
        (folder / INDEX_NAME).write_text(text)
        self.refused(folder, INDEX_NAME, reason)

    def test_no_index(self, folder: Path) -> None:
        (folder / INDEX_NAME).unlink()
        self.refused(folder, INDEX_NAME, "no such file")


def test_an_e4m3_cache_takes_its_scales_only_from_a_finalised_set() -> None:
    slots = ScaleSlots(SMALL)
    shape = {"num_pages": 2, "page_size": 4, "kv_heads": 1, "head_dim": 16}
    with pytest.raises(RuntimeError, match="not finalised"):
        PagedKVCache(**shape, kv_cache_dtype="fp8_e4m3", scales=slots.scales(3))
    for key, value in unequal(SMALL).items():
        slots.load(key, value)
    slots.finalise()
    cache = PagedKVCache(**shape, kv_cache_dtype="fp8_e4m3", scales=slots.scales(3))
    assert cache.arguments()["k_scale"] == slots.scales(3).k_scale != cache.arguments()["v_scale"]
    for instead in (None, 1.0, (0.5, 0.25)):
        with pytest.raises((TypeError, ValueError), match="scales: expected"):
            PagedKVCache(**shape, kv_cache_dtype="fp8_e4m3", scales=instead)  # type: ignore[arg-type]

"""Calibration: the observer against brute force, the files that follow from it, and the effects that are measured."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from qsa_kernels import e4m3, scales
from qsa_kernels.measure import calibration, scale_effects
from qsa_kernels.measure.calibration import BIN_WIDTH, CalibrationReport, Observer, TensorStatistics
from qsa_kernels.measure.smollm2 import LayerCapture
from qsa_kernels.scales import QWEN4_EXP, Geometry
from qsa_kernels.weightfile import INDEX_NAME, WeightFileError

EXAMPLE = Path(__file__).resolve().parents[2] / "data" / "overlays" / "example"
LAYERS = (3, 7)
GEOMETRY = Geometry(LAYERS, "model.language_model.layers")


def forwards(count: int = 6, seed: int = 0) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """K and V of some forwards: FP16, with zeros, outliers and unequal sizes of K and V."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        layers = {}
        for layer in LAYERS:
            k = torch.randn(5 + number, 2, 16, generator=generator) * (1 + layer)
            v = torch.randn(5 + number, 2, 16, generator=generator).pow(3) * 0.1
            k[0, 0, :3] = 0
            layers[layer] = (k.half(), v.half())
        made.append(layers)
    return made


def observed(batches: list[dict[int, tuple[torch.Tensor, torch.Tensor]]]) -> Observer:
    observer = Observer(LAYERS)
    for batch in batches:
        for layer, (k, v) in batch.items():
            observer.observe(layer, k, v)
    return observer


def report(seed: int = 0, **options: bool) -> CalibrationReport:
    return calibration.summarize([observed(forwards(seed=seed))], source="test", **options)


class TestStatistics:
    def test_agree_with_brute_force(self) -> None:
        batches = forwards()
        statistics = observed(batches).statistics[7, "v"]
        values = torch.cat([batch[7][1].flatten() for batch in batches]).double().abs().numpy()
        nonzero = values[values > 0]
        expected = np.zeros(4096, np.int64)
        for value in nonzero:
            expected[min(max(math.floor((math.log2(value) + 24) / (40 / 4096)), 0), 4095)] += 1
        assert statistics.count == values.size
        assert statistics.nonzero_count == nonzero.size
        assert statistics.max_abs == values.max()
        np.testing.assert_array_equal(statistics.histogram, expected)

    @pytest.mark.parametrize(
        ("value", "expected"), [(2.0**-24, 0), (1.0, 2457), (2.0**-30, 0), (2.0**15.999, 4095), (2.0**17, 4095)]
    )
    def test_bins(self, value: float, expected: int) -> None:
        assert TensorStatistics.of(torch.tensor([value, 0.0])).histogram.argmax() == expected

    @pytest.mark.parametrize("share", [0.5, 0.999, 0.9999, 1.0])
    def test_percentiles_are_upper_edges_of_the_right_bin(self, share: float) -> None:
        values = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
        exact = float(np.quantile(values.abs().double().numpy(), share, method="inverted_cdf"))
        assert exact <= TensorStatistics.of(values).percentile(share) <= exact * 2 ** (BIN_WIDTH * 1.0001)

    def test_share_above_is_a_tight_upper_bound(self) -> None:
        values = torch.tensor([0.1] * 90 + [3.0] * 9 + [5.0])
        statistics = TensorStatistics.of(values)
        assert statistics.share_above(5.0) == 0.0
        assert statistics.share_above(4.0) == pytest.approx(0.01)
        assert statistics.share_above(1.0) == pytest.approx(0.10)

    @settings(max_examples=25, deadline=None)
    @given(st.permutations(range(6)), st.lists(st.integers(0, 2), min_size=6, max_size=6))
    def test_shards_in_any_split_and_order_give_identical_scales(self, order: list[int], owner: list[int]) -> None:
        batches = forwards()
        shards = [observed([batches[i] for i in order if owner[i] == rank]) for rank in range(3)]
        merged = calibration.summarize(shards, source="test")
        single = calibration.summarize([observed(batches)], source="test")
        assert merged.scale() == single.scale()
        assert [t.histogram for t in merged.tensors] == [t.histogram for t in single.tensors]

    def test_size_does_not_grow_with_the_data(self) -> None:
        observer = observed(forwards(2))
        before = sum(s.histogram.nbytes for s in observer.statistics.values())
        for batch in forwards(20):
            observer.observe(3, *batch[3])
        assert sum(s.histogram.nbytes for s in observer.statistics.values()) == before


class TestRefusals:
    @pytest.mark.parametrize("kind", ["k", "v"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_non_finite_values_name_the_layer_and_change_nothing(self, kind: str, value: float) -> None:
        observer = Observer(LAYERS)
        k, v = torch.ones(4, 1, 8), torch.ones(4, 1, 8)
        (k if kind == "k" else v)[2, 0, 5] = value
        with pytest.raises(ValueError, match=f"layer 7 {kind}: 1 of 32 values are not finite"):
            observer.observe(7, k, v)
        assert all(statistics.count == 0 for statistics in observer.statistics.values())

    def test_unknown_layer(self) -> None:
        with pytest.raises(ValueError, match=r"layer 5: expected one of \(3, 7\)"):
            Observer(LAYERS).observe(5, torch.ones(1), torch.ones(1))

    def test_codes_instead_of_values(self) -> None:
        with pytest.raises(TypeError, match=r"layer 3 v: expected a floating tensor, got torch\.uint8"):
            Observer(LAYERS).observe(3, torch.ones(1), torch.ones(1, dtype=torch.uint8))

    def test_no_values(self) -> None:
        with pytest.raises(ValueError, match="layer 3 k: expected values"):
            Observer(LAYERS).observe(3, torch.ones(0), torch.ones(1))

    def test_a_layer_that_was_never_seen(self) -> None:
        observer = Observer(LAYERS)
        observer.observe(3, torch.ones(1), torch.ones(1))
        with pytest.raises(ValueError, match="layer 7 k: never observed"):
            calibration.summarize([observer], source="test")

    def test_a_tensor_that_is_always_zero(self) -> None:
        observer = observed(forwards(1))
        observer.statistics[7, "v"] = TensorStatistics.of(torch.zeros(9))
        with pytest.raises(ValueError, match="layer 7 v: all values are zero"):
            calibration.summarize([observer], source="test")

    def test_shards_of_different_layers(self) -> None:
        with pytest.raises(ValueError, match="expected the same layers in all"):
            calibration.summarize([Observer((3,)), Observer((3, 7))], source="test")

    def test_no_shard(self) -> None:
        with pytest.raises(ValueError, match="at least one observer"):
            calibration.summarize([], source="test")


class TestReport:
    def test_the_scale_covers_everything_and_nothing_saturates(self) -> None:
        made = report()
        for layer in LAYERS:
            for kind, number in (("k", 0), ("v", 1)):
                values = torch.cat([batch[layer][number].flatten() for batch in forwards()])
                scale = made.scale()[layer, kind]
                assert scale == scales.scale_for(float(values.abs().max()))
                assert e4m3.count_clipped(values, scale) == 0
                assert e4m3.count_clipped(values, 0.999 * scale) > 0
        assert (made.table()["saturation_ratio"] == 0).all()

    def test_shard_stability(self) -> None:
        small, large = Observer((0,)), Observer((0,))
        small.observe(0, torch.tensor([2.0]), torch.tensor([1.0]))
        large.observe(0, torch.tensor([8.0]), torch.tensor([1.0]))
        k, v = calibration.summarize([small, large], source="test").tensors
        assert (k.shard_scale_min_over_global, k.shard_scale_max_over_global) == (0.25, 1.0)
        assert (v.shard_scale_min_over_global, v.shard_scale_max_over_global) == (1.0, 1.0)

    def test_negative_control_is_marked(self) -> None:
        made = report(unit_scale_negative_control=True)
        assert made.unit_scale_negative_control
        assert set(made.scale().values()) == {1.0}
        assert made.max_abs() == report().max_abs()

    def test_envelope_takes_maxima_and_keeps_the_first_distribution(self) -> None:
        first, second = report(0), report(1)
        both = calibration.envelope([first, second])
        for pair, maximum in both.max_abs().items():
            assert maximum == max(first.max_abs()[pair], second.max_abs()[pair])
            assert both.scale()[pair] == scales.scale_for(maximum)
        assert [t.histogram for t in both.tensors] == [t.histogram for t in first.tensors]
        assert both.scale() == calibration.envelope([second, first]).scale()

    def test_envelope_refuses_a_negative_control(self) -> None:
        with pytest.raises(ValueError, match="negative control has no place"):
            calibration.envelope([report(), report(unit_scale_negative_control=True)])

    def test_reports_and_observations_survive_storage(self, tmp_path: Path) -> None:
        made = calibration.envelope([report(0), report(1)])
        made.write(tmp_path / "report.json")
        assert CalibrationReport.read(tmp_path / "report.json") == made
        observer = observed(forwards())
        observer.write(tmp_path / "shard.json")
        again = calibration.summarize([Observer.read(tmp_path / "shard.json")], source="test")
        assert again == report()

    def test_storage_does_not_replace(self, tmp_path: Path) -> None:
        report().write(tmp_path / "report.json")
        with pytest.raises(FileExistsError):
            report().write(tmp_path / "report.json")

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"scale": 0.5}, "gives the scale"),
            ({"max_abs": 1e-6}, "lies below the highest bin"),
            ({"finite_count": 1}, "are not finite"),
            ({"nonzero_count": 1}, "does not add up"),
            ({"histogram": {"9999": 1}}, "no numbers from 0 to 4095"),
            ({"layer": 9}, "layer 9 v: missing"),
            ({"kind": "q"}, "tensors.0.kind"),
            ({"count": "many"}, "tensors.0.count"),
        ],
    )
    def test_a_report_that_contradicts_itself_is_refused(self, tmp_path: Path, change: dict, named: str) -> None:
        record = json.loads(report().model_dump_json())
        record["tensors"][0].update(change)
        (tmp_path / "report.json").write_text(json.dumps(record))
        with pytest.raises(WeightFileError) as caught:
            CalibrationReport.read(tmp_path / "report.json")
        assert named in str(caught.value)


class TestOverlayFile:
    def test_24_scales_make_2640_bytes(self) -> None:
        values = dict.fromkeys(QWEN4_EXP.names(), 0.5)
        assert len(calibration.overlay_bytes(values)) == 2640
        shorter = Geometry(QWEN4_EXP.layers, "model.layers").names()
        assert len(calibration.overlay_bytes(dict.fromkeys(shorter, 0.5))) == 2280

    def test_is_what_the_library_would_write_up_to_the_order_of_the_metadata(self) -> None:
        values = {key: float(np.float32(0.017 + 0.001 * i)) for i, key in enumerate(QWEN4_EXP.names())}
        metadata = {"format": "pt", "qsa_kv_scale_contract": scales.CONTRACT, "negative_control": "true"}
        ours = calibration.overlay_bytes(values, negative_control=True)
        theirs = save({key: np.array(value, np.float32) for key, value in values.items()}, metadata=metadata)
        end = 8 + int.from_bytes(ours[:8], "little")
        assert ours[:8] == theirs[:8]
        assert ours[end:] == theirs[end:]
        assert json.loads(ours[8:end]) == json.loads(theirs[8:end])
        assert calibration.overlay_bytes(dict(reversed(values.items())), negative_control=True) == ours

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 0.1, 1e-60])
    def test_what_is_no_fp32_scale_is_refused_with_its_key(self, value: float) -> None:
        with pytest.raises(ValueError, match=r"b\.k_scale: expected"):
            calibration.overlay_bytes({"a.k_scale": 0.5, "b.k_scale": value})

    def test_the_example_is_what_the_code_builds(self, tmp_path: Path) -> None:
        built = calibration.build_example(tmp_path / "example")
        stored = {path.name: path.read_bytes() for path in EXAMPLE.iterdir()}
        assert stored == {path.name: path.read_bytes() for path in (tmp_path / "example").iterdir()}
        assert len(stored["example-model-kvscales.safetensors"]) == 2640
        envelope = [round(448 * scale, 4) for _, _, scale in built.items()]
        assert (min(envelope), max(envelope)) == (7.6719, 37.6875)
        assert "example" in json.loads(stored["kvscales-manifest.json"])["artifact_id"]

    def test_a_pack_needs_every_maximum(self, tmp_path: Path) -> None:
        maxima = report().max_abs()
        maxima[9, "k"] = maxima.pop((3, "v"))
        with pytest.raises(ValueError, match="layer 3 v: missing; layer 9 k: unexpected"):
            calibration.build_pack(tmp_path / "pack", GEOMETRY, maxima, artifact_id="x", base=calibration.EXAMPLE_BASE)
        assert not any(tmp_path.iterdir())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small base checkpoint: attention layers 3 and 7, a draft layer, a tokenizer file and a subfolder."""
    folder = tmp_path / "base"
    (folder / "extra").mkdir(parents=True)
    (folder / "extra" / "note.txt").write_text("x")
    (folder / "config.json").write_text("{}")
    names = [f"model.language_model.layers.{layer}.self_attn.k_proj.weight" for layer in LAYERS]
    names += ["mtp.layers.0.self_attn.k_proj.weight", "lm_head.weight"]
    (folder / "model-00001.safetensors").write_bytes(save({name: np.zeros((2, 2), np.float32) for name in names}))
    index = {"metadata": {"total_size": 64}, "weight_map": dict.fromkeys(names, "model-00001.safetensors")}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
    }


class TestDerivedCheckpoint:
    def test_links_index_and_provenance(self, base: Path, tmp_path: Path) -> None:
        before = contents(base)
        loaded = calibration.derive_checkpoint(base, tmp_path / "derived", report())
        derived = tmp_path / "derived"
        digest = hashlib.sha256((base / INDEX_NAME).read_bytes()).hexdigest()
        assert contents(base) == before
        assert {p.name for p in derived.iterdir() if p.is_symlink()} == {
            "extra",
            "config.json",
            "model-00001.safetensors",
        }
        assert (derived / "model-00001.safetensors").resolve() == base / "model-00001.safetensors"

        text = (derived / INDEX_NAME).read_text()
        index = json.loads(text)
        assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
        overlay = derived / scales.OVERLAY_NAME
        assert index["metadata"]["total_size"] == 64 + overlay.stat().st_size
        assert {k for k, name in index["weight_map"].items() if name == overlay.name} == set(GEOMETRY.names())

        provenance = json.loads((derived / scales.PROVENANCE_NAME).read_text())
        assert provenance["base_index_sha256"] == digest == loaded.base_index_sha256
        assert provenance["scale_file_sha256"] == hashlib.sha256(overlay.read_bytes()).hexdigest()
        record = derived / provenance["calibration_report"]
        assert provenance["calibration_report_sha256"] == hashlib.sha256(record.read_bytes()).hexdigest()
        assert provenance["checkpoint_layer_prefix"] == GEOMETRY.prefix
        assert provenance["tensor_count"] == 4
        assert provenance["unit_scale_negative_control"] is False

        assert scales.load_checkpoint(derived, GEOMETRY, digest)[7].v_scale == report().scale()[7, "v"]
        with pytest.raises(WeightFileError, match="bound to base index"):
            scales.load_checkpoint(derived, GEOMETRY, "00" * 32)

    def test_negative_control_stays_marked(self, base: Path, tmp_path: Path) -> None:
        with pytest.warns(scales.UncalibratedScales):
            loaded = calibration.derive_checkpoint(base, tmp_path / "d", report(unit_scale_negative_control=True))
        assert loaded.negative_control
        assert json.loads((tmp_path / "d" / scales.PROVENANCE_NAME).read_text())["unit_scale_negative_control"] is True

    def test_existing_output_is_left_alone(self, base: Path, tmp_path: Path) -> None:
        (tmp_path / "derived").mkdir()
        with pytest.raises(FileExistsError, match="derived exists already; nothing was written"):
            calibration.derive_checkpoint(base, tmp_path / "derived", report())
        assert not any((tmp_path / "derived").iterdir())

    def test_existing_scales_are_refused(self, base: Path, tmp_path: Path) -> None:
        index = json.loads((base / INDEX_NAME).read_text())
        index["weight_map"]["model.language_model.layers.3.self_attn.k_proj.k_scale"] = "model-00001.safetensors"
        (base / INDEX_NAME).write_text(json.dumps(index))
        with pytest.raises(WeightFileError, match=r"has the scale .*layers\.3\.self_attn\.k_proj\.k_scale already"):
            calibration.derive_checkpoint(base, tmp_path / "derived", report())

    def test_existing_overlay_is_refused(self, base: Path, tmp_path: Path) -> None:
        (base / scales.OVERLAY_NAME).write_bytes(b"x")
        with pytest.raises(WeightFileError, match=r"has a file model-kvscales\.safetensors already"):
            calibration.derive_checkpoint(base, tmp_path / "derived", report())

    @pytest.mark.parametrize("failing", ["replace", "rename"])
    def test_a_failure_leaves_nothing(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        def fail(*_: object) -> Iterator[None]:
            raise OSError("disk full")

        monkeypatch.setattr(os, "rename", fail) if failing == "rename" else monkeypatch.setattr(
            calibration, "_write_json", fail
        )
        before = contents(base)
        with pytest.raises(OSError, match="disk full"):
            calibration.derive_checkpoint(base, tmp_path / "derived", report())
        assert {p.name for p in tmp_path.iterdir()} == {"base"}
        assert contents(base) == before

    def test_no_index(self, tmp_path: Path) -> None:
        (tmp_path / "base").mkdir()
        with pytest.raises(WeightFileError, match="no such file"):
            calibration.derive_checkpoint(tmp_path / "base", tmp_path / "derived", report())

    @pytest.mark.parametrize(
        ("names", "reason"),
        [
            ([], "the layer prefix is unknown"),
            (
                ["a.layers.3.self_attn.k_proj.weight", "b.layers.3.self_attn.k_proj.weight"],
                "is ambiguous: a.layers, b.layers",
            ),
            (
                ["a.layers.3.self_attn.k_proj.weight", "a.layers.4.self_attn.k_proj.weight"],
                r"layers \[7\] are no attention",
            ),
        ],
    )
    def test_the_prefix_must_be_certain(self, names: list[str], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            calibration.infer_geometry(dict.fromkeys(names, "x.safetensors"), LAYERS)

    def test_the_longest_set_gives_the_prefix(self) -> None:
        names = ["mtp.layers.0.self_attn.k_proj.weight", *(f"m.layers.{i}.self_attn.k_proj.weight" for i in (3, 7))]
        assert calibration.infer_geometry(dict.fromkeys(names, "x"), LAYERS) == Geometry(LAYERS, "m.layers")

    def test_a_pack_is_materialised_for_its_base_alone(self, base: Path, tmp_path: Path) -> None:
        digest = hashlib.sha256((base / INDEX_NAME).read_bytes()).hexdigest()
        for name, bound in (("pack", digest), ("foreign", "0f" * 32)):
            calibration.build_pack(
                tmp_path / name,
                GEOMETRY,
                report().max_abs(),
                artifact_id=name,
                base=scales.BaseCheckpoint(repo_id="test/base", index_sha256=bound),
            )
        loaded = calibration.materialise_pack(base, tmp_path / "derived", tmp_path / "pack", GEOMETRY)
        assert [scale for *_, scale in loaded.items()] == list(report().scale().values())
        with pytest.raises(WeightFileError, match="bound to base index"):
            calibration.materialise_pack(base, tmp_path / "other", tmp_path / "foreign", GEOMETRY)
        assert not (tmp_path / "other").exists()


@pytest.fixture
def capture() -> LayerCapture:
    """One layer of no particular model: 48 tokens, three query heads a KV head, keys larger than values."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(48, heads, 16, generator=generator).half() for heads in (6, 2, 2))
    return LayerCapture(3, q, k * 4, v)


@pytest.fixture
def made(capture: LayerCapture) -> CalibrationReport:
    return calibration.summarize(scale_effects.observe({"alice": [capture]}), source="test")


class TestEffects:
    def test_choices_are_what_they_say(self, made: CalibrationReport) -> None:
        choices = scale_effects.scale_choices(made)
        k, v = made.scale()[3, "k"], made.scale()[3, "v"]
        assert k != v
        assert set(choices) == set(scale_effects.CHOICES)
        assert choices["exchanged"] == {(3, "k"): v, (3, "v"): k}
        assert choices["double"][3, "k"] == 2 * k
        assert choices["half"][3, "v"] == v / 2
        assert choices["p99.9"][3, "k"] < k * 1.01

    def test_saturation_counts_each_code(self, capture: LayerCapture, made: CalibrationReport) -> None:
        exact = scale_effects.saturation({"alice": [capture]}, made.scale())
        assert exact["saturated_codes"].tolist() == [0, 0]
        assert exact["max_over_envelope"].between(0.999999, 1.0).all()
        half = scale_effects.saturation({"alice": [capture]}, scale_effects.scale_choices(made)["half"])
        expected = [int((x.float().abs() > x.float().abs().max() / 2).sum()) for x in (capture.k, capture.v)]
        assert half["saturated_codes"].tolist() == expected
        summed = scale_effects.saturation_by_text(half)
        assert summed["saturated_ppm"].tolist() == [
            1e6 * n / x.numel() for n, x in zip(expected, (capture.k, capture.v), strict=True)
        ]

    def test_attention_error_against_a_plain_softmax(self, capture: LayerCapture, made: CalibrationReport) -> None:
        def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = []
            for head in range(6):
                scores = capture.q[:, head].double() @ k[:, head // 3].double().T / 4
                scores.masked_fill_(torch.ones(48, 48).triu(1).bool(), -math.inf)
                rows.append(scores.softmax(-1) @ v[:, head // 3].double())
            return torch.stack(rows)

        exact = attend(capture.k, capture.v)
        table = scale_effects.attention_error({"alice": [capture]}, scale_effects.scale_choices(made))
        errors = table.set_index("choice")["rms_relative"]
        for choice, chosen in scale_effects.scale_choices(made).items():
            stored = [
                e4m3.decode(e4m3.encode(x, chosen[3, kind])).double() * chosen[3, kind]
                for kind, x in (("k", capture.k), ("v", capture.v))
            ]
            expected = float((attend(*stored) - exact).norm() / exact.norm())
            assert errors[choice] == pytest.approx(expected, rel=1e-3)
        assert errors["half"] > 1.5 * errors["calibrated"]
        assert errors["double"] == pytest.approx(errors["calibrated"], rel=0.02)

    def test_ratios(self, capture: LayerCapture, made: CalibrationReport) -> None:
        table = scale_effects.attention_error({"alice": [capture]}, scale_effects.scale_choices(made))
        ratios = scale_effects.error_ratios(table).set_index("choice")
        errors = table.set_index("choice")["rms_relative"]
        assert ratios.loc["unit", "geometric_mean_ratio"] == pytest.approx(errors["unit"] / errors["calibrated"])
        assert scale_effects.overall_ratio(table, "unit") == pytest.approx(errors["unit"] / errors["calibrated"])
        assert ratios.loc["calibrated", "geometric_mean_ratio"] == 1.0

    def test_code_use(self, capture: LayerCapture, made: CalibrationReport) -> None:
        table = scale_effects.code_use({"alice": [capture]}, {"unit": dict.fromkeys(made.scale(), 1.0)})
        values = capture.v.float().abs()
        expected = float(((values > 0) & (values < 2**-6)).sum() / (values > 0).sum())
        assert table.set_index("kind").loc["v", "share_below_normal"] == pytest.approx(expected)
        assert (table["share_saturated"] == 0).all()

    def test_a_kernel_reads_the_calibrated_cache(self, capture: LayerCapture, made: CalibrationReport) -> None:
        cells = scale_effects.kernel_check(capture, made.scale(), topk=40)
        assert cells["status"].tolist() == ["passed", "passed"], cells["reason"].tolist()
        assert (cells["rms_relative"] > 0).all()

    def test_published_pack_agrees_to_the_reported_digits(self) -> None:
        pack = scale_effects.published_pack().set_index("quantity")
        for quantity in ("smallest scale", "largest scale"):
            assert f"{pack.loc[quantity, 'here']:.10f}" == f"{pack.loc[quantity, 'value']:.10f}"
        assert pack.loc["size of the overlay", "here"] == pack.loc["size of the overlay", "value"] == 2.64
        assert pack.loc["scales", "here"] == 24


def test_example_values_are_valid_for_the_public_geometry() -> None:
    content = load((EXAMPLE / "example-model-kvscales.safetensors").read_bytes())
    assert tuple(sorted(content)) == tuple(sorted(QWEN4_EXP.names()))
    assert all(value.shape == () and value.dtype == np.float32 for value in content.values())

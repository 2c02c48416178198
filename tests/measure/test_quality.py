"""The quality measures: statistics on made-up numbers, readers against the reference, and one tiny run of the model."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from qsa_kernels import e4m3
from qsa_kernels.measure import error, smollm2
from qsa_kernels.measure.quality import Plan, caches, effects, forward, needles, record, record_tables, reported
from qsa_kernels.measure.quality.caches import ARMS, BASELINE, CALIBRATED, NOISE, CacheArm, OperatorReader, TorchReader
from qsa_kernels.measure.quality.forward import Distance, Overlap, Trace
from qsa_kernels.measure.smollm2 import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, LayerCapture
from qsa_kernels.reference import reference_attention
from qsa_kernels.report import tables as schemas

TOKENS = 40
K_SCALE, V_SCALE = 0.0123, 0.0071  # unequal, no powers of two; nothing below saturates

PLAN = Plan(
    calibration_tokens=64,
    other_text="san-mateo-es",
    context_tokens=(64,),
    documents_per_text=1,
    topk_blocks=3,
    needle_texts=("alice",),
    needle_tokens=(64,),
    depth_percent=(10, 90),
    resamples=200,
    seed=3,
    kernel_layers=(7,),
    kernel_tokens=6,
)


def scales(k_scale: float, v_scale: float) -> dict[tuple[int, str], float]:
    """K and V scale of every layer, as FP32 numbers."""
    pair = {"k": float(np.float32(k_scale)), "v": float(np.float32(v_scale))}
    return {(layer, kind): scale for layer in range(LAYERS) for kind, scale in pair.items()}


@pytest.fixture(scope="module")
def arms() -> dict[str, CacheArm]:
    quantised = CacheArm(CALIBRATED, caches.finalised(scales(K_SCALE, V_SCALE)))
    return {BASELINE: CacheArm(BASELINE, None), NOISE: CacheArm(NOISE, None), CALIBRATED: quantised}


@pytest.fixture(scope="module")
def layer() -> LayerCapture:
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(TOKENS, Q_HEADS, HEAD_DIM, generator=generator).half()
    k, v = (torch.randn(TOKENS, KV_HEADS, HEAD_DIM, generator=generator).half() for _ in range(2))
    return LayerCapture(0, q, k, v)


class TestEffects:
    def test_interval_covers_the_mean_and_is_that_of_the_normal_theory(self) -> None:
        values = np.random.default_rng(5).normal(0.03, 0.01, size=400)
        mean, low, high = effects.interval(values, resamples=4000, seed=1)
        expected = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
        assert mean == pytest.approx(values.mean())
        assert (high - low) / 2 == pytest.approx(expected, rel=0.05)

    def test_one_document_has_no_interval(self) -> None:
        mean, low, high = effects.interval(np.array([0.5]), resamples=200, seed=1)
        assert mean == 0.5
        assert math.isnan(low)
        assert math.isnan(high)

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [
            (0.02, 0.03, "worse"),
            (-0.03, -0.02, "better"),
            (-0.01, 0.01, "same"),
            (0.005, 0.009, "same"),
            (-0.02, 0.03, "no difference seen"),
            (0.005, 0.03, "undecided"),
            (math.nan, math.nan, "undecided"),
        ],
    )
    def test_verdict(self, low: float, high: float, verdict: str) -> None:
        assert effects.judged(low, high, noise=0.01) == verdict

    def test_differences_are_paired_by_document(self) -> None:
        """Documents that differ a thousand times more than the arms do: only pairing sees the effect."""
        table = documents(shift={"half": 0.02, "unit": 0.0})
        found = effects.effects(table, resamples=500, seed=1)
        rows = found[found["measure"] == effects.PERPLEXITY].set_index(["arm", "against"])
        half = rows.loc[("half", BASELINE)]
        assert half["value"] == pytest.approx(100 * math.expm1(0.02), rel=1e-2)
        assert half["verdict"] == "worse"
        assert half["high"] - half["low"] < 0.05
        assert rows.loc[("unit", BASELINE), "verdict"] == "same"
        assert rows.loc[("half", CALIBRATED), "verdict"] == "worse"
        assert (rows["documents"] == 12).all()
        schemas.validate(found, "quality_effects")

    def test_two_machines(self) -> None:
        here = documents(shift={"half": 0.02})
        same = effects.agreement(here, documents(shift={"half": 0.02}, seed=9), resamples=500, seed=1)
        assert set(same["status"]) == {"passed"}
        other = effects.agreement(here, documents(shift={"half": 0.03}, seed=9), resamples=500, seed=1)
        failed = other[other["status"] == "failed"]
        assert set(failed["arm"]) == {"half"}
        assert failed["difference"].iloc[0] == pytest.approx(1.0, rel=0.05)
        schemas.validate(other, "quality_devices")

    def test_machines_without_a_document_in_common(self) -> None:
        other = documents().assign(start_token=77)
        assert effects.agreement(documents(), other, resamples=500, seed=1).empty


def documents(shift: dict[str, float] | None = None, seed: int = 2) -> pd.DataFrame:
    """Losses of 12 documents that differ widely; arms that differ by `shift` and a little noise."""
    generator = np.random.default_rng(4)
    jitter = np.random.default_rng(seed)
    rows = []
    for number in range(12):
        base = generator.uniform(2, 5)
        for arm in ARMS:
            noise = 0.0 if arm == BASELINE else jitter.normal(0, 2e-4)
            if arm != NOISE:
                noise *= 0.1
            rows.append(
                {
                    "text": f"text {number % 4}",
                    "start_token": 100 * (number // 4),
                    "context_tokens": 64,
                    "arm": arm,
                    "nll_nats": base + noise + (shift or {}).get(arm, 0.0),
                    "kl_nats": abs(noise),
                    "disagreement_percent": 0.0,
                }
            )
    return pd.DataFrame(rows)


class TestOverlap:
    def test_by_hand(self) -> None:
        baseline = torch.tensor([[[1, 1, 0, 0], [0, 1, 1, 0]]], dtype=torch.bool)
        selection = torch.tensor([[[1, 0, 1, 0], [0, 1, 1, 0]]], dtype=torch.bool)
        overlap = Overlap()
        overlap.add(selection, baseline)
        assert overlap.result() == {
            "rows": 2,
            "mean_row_jaccard": pytest.approx((1 / 3 + 1) / 2),
            "fp16_recall": pytest.approx((1 / 2 + 1) / 2),
            "micro_jaccard": pytest.approx(3 / 5),
        }

    def test_merging_is_adding(self) -> None:
        generator = torch.Generator().manual_seed(1)
        pairs = [torch.rand(2, 3, 5, 8, generator=generator) < 0.5 for _ in range(2)]
        whole, parts = Overlap(), Overlap()
        for pair in pairs:
            pair[..., 0] = True
            whole.add(*pair)
            part = Overlap()
            part.add(*pair)
            parts.merge(part)
        assert parts.result() == whole.result()


class TestSelection:
    def test_the_best_complete_blocks_are_taken(self) -> None:
        """Block b scores b: the newest complete blocks win, and the tokens after the last complete one never count."""
        tokens, topk = 19, 2
        k = torch.zeros(tokens, 1, HEAD_DIM)
        k[:, 0, 0] = torch.arange(tokens) // forward.BLOCK
        q = torch.zeros(tokens, 2, HEAD_DIM)
        q[..., 0] = 1.0
        chosen, rows = forward.selected_blocks(q, k, topk=topk)
        assert rows.tolist() == list(range(11, 19))
        for row, line in zip(rows.tolist(), chosen[0], strict=True):
            complete = (row + 1) // forward.BLOCK
            assert line.nonzero().flatten().tolist() == [complete - 2, complete - 1]

    def test_every_kv_head_selects_with_its_own_queries(self) -> None:
        k = torch.zeros(16, 2, HEAD_DIM)
        k[:4, :, 0], k[8:12, :, 0] = 1.0, -1.0
        q = torch.zeros(16, 6, HEAD_DIM)
        q[:, :3, 0], q[:, 3:, 0] = 1.0, -1.0
        chosen, _ = forward.selected_blocks(q, k, topk=1)
        assert chosen[:, -1].nonzero().tolist() == [[0, 0], [1, 2]]

    def test_e4m3_keys_are_encoded_with_the_scale(self) -> None:
        """Two means that differ by less than half a step of the codes change places or tie; in FP16 they do not."""
        k = torch.zeros(12, 1, HEAD_DIM)
        k[:4, 0, 0], k[4:8, 0, 0] = 1.0, 1.0 + 2**-8
        q = torch.ones(12, 1, HEAD_DIM)
        exact, _ = forward.selected_blocks(q, k, topk=1)
        rounded, _ = forward.selected_blocks(q, k, topk=1, scale=1.0)
        assert exact[0, -1].tolist() == [False, True, False]
        values = e4m3.decode(e4m3.encode(torch.tensor([1.0, 1.0 + 2**-8]), 1.0))
        assert values[0] == values[1]
        assert int(rounded[0, -1].sum()) == 1

    def test_no_row_has_a_choice(self) -> None:
        with pytest.raises(ValueError, match="topk: expected fewer than the 4 blocks of 16 tokens, got 4"):
            forward.selected_blocks(torch.zeros(16, 1, HEAD_DIM), torch.zeros(16, 1, HEAD_DIM), topk=4)


class TestReaders:
    @pytest.mark.parametrize("name", [BASELINE, NOISE, CALIBRATED])
    @pytest.mark.parametrize("shape", ["causal", "scattered"])
    def test_plain_torch_is_the_reference_but_for_rounding(
        self, arms: dict[str, CacheArm], layer: LayerCapture, name: str, shape: str
    ) -> None:
        indices = caches.causal(TOKENS, torch.device("cpu"))
        if shape == "scattered":
            generator = torch.Generator().manual_seed(7)
            indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.3, -1, indices)
            indices[:, 0] = 0
        arm = arms[name]
        cache, table = OperatorReader(arm, indices).stored(0, layer.k, layer.v)
        expected = reference_attention(
            layer.q,
            logical_indices=indices,
            block_table=table,
            token_to_req=torch.zeros(TOKENS, dtype=torch.int32),
            **cache.arguments(),
        )
        output = TorchReader(arm, indices)(0, layer.q, layer.k, layer.v)
        assert error.gate(error.measure(output, expected), error.measure(expected.half(), expected)) == ("passed", "")

    def test_the_other_order_is_another_order(self, arms: dict[str, CacheArm], layer: LayerCapture) -> None:
        """In FP32 the two orders differ, else the self-noise would be that of nothing."""
        indices = caches.causal(TOKENS, torch.device("cpu"))
        q, k, v = (tensor.float() for tensor in (layer.q, layer.k, layer.v))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "half", lambda tensor: tensor)
            first, second = (TorchReader(arms[name], indices)(0, q, k, v) for name in (BASELINE, NOISE))
        assert not torch.equal(first, second)
        assert error.measure(first, second)["rms_relative"] < 1e-6

    def test_kernels_agree_on_samples(self, arms: dict[str, CacheArm], layer: LayerCapture) -> None:
        found = record.kernel_check(trace(layer), arms, layers=[0], tokens=9)
        assert found["status"].tolist() == ["passed", "passed"]
        assert found["differing_values"].tolist() == [0, 0]
        schemas.validate(found, "quality_kernel")

    def test_another_codec_is_noticed(
        self, arms: dict[str, CacheArm], layer: LayerCapture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(record.e4m3, "encode", lambda x, scale: torch.zeros_like(x, dtype=torch.uint8))
        found = record.kernel_check(trace(layer), arms, layers=[0], tokens=9).set_index("arm")
        assert found.loc[BASELINE, "status"] == "passed"
        assert found.loc[CALIBRATED, "status"] == "failed"
        assert "differ" in found.loc[CALIBRATED, "reason"]

    def test_scales_are_not_exchanged(self, arms: dict[str, CacheArm], layer: LayerCapture) -> None:
        indices = caches.causal(TOKENS, torch.device("cpu"))
        swapped = replace(arms[CALIBRATED], scales=caches.finalised(scales(V_SCALE, K_SCALE)))
        exact = TorchReader(arms[BASELINE], indices)(0, layer.q, layer.k, layer.v)
        right, wrong = (
            error.measure(TorchReader(arm, indices)(0, layer.q, 300 * layer.k, layer.v), exact)["rms_relative"]
            for arm in (arms[CALIBRATED], swapped)
        )
        assert right != wrong

    def test_an_incomplete_set_of_scales_is_refused(self) -> None:
        incomplete = scales(K_SCALE, V_SCALE)
        del incomplete[12, "v"]
        with pytest.raises(ValueError, match=r"59/60 scales\n- missing model\.layers\.12\.self_attn\.v_scale"):
            caches.finalised(incomplete)


def trace(layer: LayerCapture) -> Trace:
    return Trace(torch.zeros(TOKENS, 8), [layer], [layer.q])


def test_distance_is_that_of_one_long_vector() -> None:
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randn(4, 2, 5, 7, generator=generator)
    distance = Distance()
    for output, reference in pairs:
        distance.add(output, reference)
    whole = error.measure(pairs[:, 0], pairs[:, 1])
    found = distance.result()
    assert found["relative_l2"] == pytest.approx(whole["rms_relative"])
    assert 1 - found["cosine"] == pytest.approx(whole["cosine_distance"])
    assert found["rmse"] == pytest.approx(float((pairs[:, 0] - pairs[:, 1]).double().square().mean().sqrt()))


def test_predictions_by_hand() -> None:
    base = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [1.0, 1.0, 1.0]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [9.0, 9.0, 9.0]]).log()
    found = forward.predictions(torch.tensor([0, 2, 1]), base, other)
    assert found["nll_nats"] == pytest.approx((math.log(4) + math.log(2)) / 2)
    assert found["kl_nats"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert found["disagreement_percent"] == 50.0


class TestPlan:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"other_text": "alice"}, "other_text: expected calibration texts among tom-sawyer.*got alice"),
            ({"needle_texts": ("moby-dick",)}, "needle_texts: expected evaluation texts among .*got moby-dick"),
            ({"topk_blocks": 16}, "topk_blocks: expected fewer than the 16 blocks of a document, got 16"),
            ({"depth_percent": (0, 0)}, "depth_percent: expected distinct percentages"),
            ({"depth_percent": (50,)}, "depth_percent: expected 2 to 7 depths, got 1"),
            ({"kernel_layers": (30,)}, r"kernel_layers: expected layers from 0 to 29, got \[30\]"),
        ],
        ids=["calibration-text", "unknown-text", "too-many-blocks", "same-depths", "one-depth", "no-such-layer"],
    )
    def test_what_cannot_be_is_refused(self, change: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            replace(PLAN, **change)  # type: ignore[arg-type]


class TestFilesThatAreNotTheKnownOnes:
    """Nothing is measured, and the message names the file."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        copy = Path(shutil.copytree(smollm2.TEXTS, tmp_path / "texts"))
        for function in (smollm2.texts, smollm2.load_text):
            monkeypatch.setitem(function.__kwdefaults__, "folder", copy)  # type: ignore[arg-type]
        return copy

    def test_truncated_text(self, folder: Path) -> None:
        (folder / "opticks.txt").write_bytes((folder / "opticks.txt").read_bytes()[:-9])
        with pytest.raises(ValueError, match=r"opticks\.txt: text 'opticks' is not the indexed one"):
            record_tables("cpu", PLAN)

    def test_missing_text(self, folder: Path) -> None:
        (folder / "opticks.txt").unlink()
        with pytest.raises(FileNotFoundError, match=r"opticks\.txt: the file of text 'opticks' is missing"):
            record_tables("cpu", PLAN)

    def test_truncated_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF")
        monkeypatch.setattr(smollm2, "model_file", lambda: smollm2.check_model_file(model))
        monkeypatch.setattr(smollm2, "load_model", smollm2.load_model.__wrapped__)
        with pytest.raises(
            ValueError, match=r"model\.gguf: the model file is truncated: expected 98362432 bytes, got 4"
        ):
            record_tables("cpu", PLAN)


class TestReported:
    def test_every_figure_has_a_source(self) -> None:
        table = reported.published()
        assert table["source_url"].str.startswith("https://").all()
        assert set(table["kind"]) == {"reported"}
        assert table["id"].is_unique

    def test_figures_are_the_published_ones(self) -> None:
        values = reported.published().set_index("id")["value"]
        assert values["mean_row_jaccard"] == "0.990783"
        assert values["relative_l2"] == "0.0324132"
        assert values["retrieval_e4m3"] == "6 of 6"
        assert values["tools_fp16"] == "10 of 12"


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    return record_tables("cpu", PLAN)


@pytest.mark.slow
class TestModel:
    """One tiny run, and what only the tokenizer can show."""

    def test_tables_satisfy_their_schemas(self, tables: dict[str, pd.DataFrame]) -> None:
        for name, table in tables.items():
            schemas.validate(table, name)
            assert (table["status"] == "passed").all(), name

    def test_every_arm_goes_through_every_document(self, tables: dict[str, pd.DataFrame]) -> None:
        counts = tables["quality_documents"].groupby("arm").size()
        assert counts.to_dict() == dict.fromkeys(ARMS, 4)
        base = tables["quality_documents"].query("arm == @BASELINE")
        assert (base["kl_nats"] == 0).all()

    def test_saturation_is_seen_and_self_noise_is_small(self, tables: dict[str, pd.DataFrame]) -> None:
        loss = tables["quality_documents"].groupby("arm")["kl_nats"].mean()
        assert loss["half"] > 2 * loss[CALIBRATED] > 200 * loss[NOISE]

    def test_layers_below_add_to_the_error(self, tables: dict[str, pd.DataFrame]) -> None:
        table = tables["quality_attention"].query("arm == @CALIBRATED")
        wide = table.pivot_table(index="layer", columns="inputs", values="relative_l2")
        assert wide.loc[0, "own forward"] == pytest.approx(wide.loc[0, "same inputs"])
        assert wide.loc[LAYERS - 1, "own forward"] > wide.loc[LAYERS - 1, "same inputs"]

    def test_quantised_indexer_keys_cost_overlap(self, tables: dict[str, pd.DataFrame]) -> None:
        contract = reported.overall(tables, kv_cache=CALIBRATED, indexer_keys="fp16")
        quantised = reported.overall(tables, kv_cache=CALIBRATED, indexer_keys="e4m3")
        assert quantised["mean_row_jaccard"] < contract["mean_row_jaccard"] < 1

    def test_the_public_figures_stand_in_a_column_of_their_own(self, tables: dict[str, pd.DataFrame]) -> None:
        table = reported.beside(reported.published(), tables, None)
        schemas.validate(table, "quality_reported")
        assert (table["this_model_on_a_GPU_recorded"] == reported.NOT_MEASURED).all()
        tools = table[table["quantity"].str.startswith("tool")]
        assert set(tools["status"]) == {"not_measured"}
        assert (table.loc[table["status"] == "passed", "this_model_here"] != reported.NOT_MEASURED).all()

    def test_haystack(self) -> None:
        stack = needles.haystack("alice", number=1, tokens=64, depths=[90, 0, 50])
        tokenizer = smollm2.load_model().tokenizer
        assert stack.depths == [0, 50, 90]
        assert len({*stack.right}) == 3
        context = int(stack.positions[stack.last[0]]) + 1
        for last, right in zip(stack.last, stack.right, strict=True):
            listed = stack.indices[last]
            read = tokenizer.decode(stack.ids[listed[listed >= 0].long()])
            question = read[read.rindex("What") :]
            assert read.count("What is the password") == 1
            assert question.endswith("is")
            place = question.split("The password of the ")[1].split(" is")[0]
            answer = tokenizer.decode([stack.answers[right]])
            assert f"The password of the {place} is{answer}." in read
        assert stack.positions[stack.last].max() + 1 == stack.positions.max() + 1 >= context
        assert len({len(smollm2.token_ids(answer)) for answer in needles.ANSWERS}) == 1

    def test_answers_are_single_tokens(self) -> None:
        assert [len(smollm2.token_ids(answer)) for answer in needles.ANSWERS] == [1] * len(needles.ANSWERS)

    def test_the_kernels_run_in_the_forward(self) -> None:
        """Interpreted, on a few tokens: what a GPU run does, with the same logits but for rounding."""
        document = forward.documents(3, 1)[0]
        model, indices = caches.model_on(torch.device("cpu")), caches.causal(3, torch.device("cpu"))
        arm = CacheArm(BASELINE, None)
        plain, kernel, noise = (
            forward.log_probabilities(model, forward.forward(model, document.ids, reader).hidden)
            for reader in (
                TorchReader(arm, indices),
                OperatorReader(arm, indices),
                TorchReader(CacheArm(NOISE, None), indices),
            )
        )
        assert (kernel - plain).abs().max() < 50 * (noise - plain).abs().max()
        assert torch.equal(kernel.argmax(-1), plain.argmax(-1))

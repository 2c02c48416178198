"""K/V capacity of Qwen4Exp counted in whole blocks: pool bytes to tokens and back, without rounding errors.

Every quantity is an integer or a `Fraction`; floats appear only in the returned tables. The geometry and the block
rule are restated from the sources in `data/reported/capacity.csv`; whatever the rule does not cover is refused, not
extrapolated. `capacity_reported` sets it against the published figures.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

GIB = 2**30
MIB = 2**20

ITEMSIZE: dict[str, int] = {"auto": 2, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}
DTYPES = ("auto", "fp8_e4m3")
SUPPORTED_TP = (1, 2, 4)
MAX_MTP = 5
BLOCK_MULTIPLE = 16

CONCURRENCIES = (1, 4, 8)
CONTEXTS = (1024, 4096, 16384, 32768, 65536, 131072)
OUTPUT_TOKENS = 256

TOPK_WORKSPACE_SHAPE = (8192, 2051)
TOPK_ITEMSIZE = 4


def _whole(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """An integer argument, with bool, float and text refused by name."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a whole number, got the truth value {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {type(value).__name__} {value!r}") from None
    if number < minimum or (maximum is not None and number > maximum):
        limit = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name}: expected a whole number {limit}, got {number}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__} {value!r}")
    return bool(value)


def _itemsize(kv_cache_dtype: Any) -> int:
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype: expected one of {', '.join(ITEMSIZE)}, got {kv_cache_dtype!r}")
    if kv_cache_dtype not in ITEMSIZE:
        raise ValueError(
            f"kv_cache_dtype: expected one of {', '.join(ITEMSIZE)}, got {kv_cache_dtype!r}; "
            "no public block size is known for another format"
        )
    return ITEMSIZE[kv_cache_dtype]


def pool_bytes_from_gib(pool_gib: int | float | Decimal | Fraction) -> int:
    """Whole bytes in a pool size given in GiB per rank, rounded down.

    Args:
        pool_gib: size of the K/V pool of one rank in GiB; zero or more, finite.

    Raises:
        TypeError: for bool, text or anything else that is not a number.
        ValueError: for NaN, infinities and negative sizes.
    """
    if isinstance(pool_gib, (bool, np.bool_)) or not isinstance(pool_gib, (int, float, Decimal, Fraction, np.number)):
        raise TypeError(f"pool_gib: expected a number of GiB, got {type(pool_gib).__name__} {pool_gib!r}")
    number = pool_gib.item() if isinstance(pool_gib, np.number) else pool_gib
    if not math.isfinite(number):
        raise ValueError(f"pool_gib: expected a finite number of GiB, got {pool_gib!r}")
    if number < 0:
        raise ValueError(f"pool_gib: expected zero or more GiB, got {pool_gib!r}")
    return math.floor(Fraction(number) * GIB)


@dataclass(frozen=True)
class ModelGeometry:
    """The sizes of a hybrid model that decide its cache layout.

    Args:
        name: the model.
        qsa_layers: attention layers with K/V pages, without the draft layer.
        gdn_layers: recurrent layers; their states share the attention blocks.
        q_heads, kv_heads, head_dim: attention heads and elements a head.
        index_dim, index_itemsize, compress_ratio: one compressed index key of `index_dim` elements for every
            `compress_ratio` tokens; its element size in bytes does not follow the K/V type.
        gdn_key_heads, gdn_value_heads, gdn_head_dim: recurrent heads and elements a head.
        conv_kernel, conv_itemsize, state_itemsize: convolution taps, and bytes of a convolution and of a recurrent
            element.
        other_state_groups: groups of states beside the recurrent ones (the per-layer embedding).
        ring_blocks: blocks that hold the ring of raw index keys of one request.

    Raises:
        ValueError: when the recurrent layers do not fill whole groups, or the compressed keys are not whole bytes a
            token.
    """

    name: str
    qsa_layers: int
    gdn_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    index_dim: int
    index_itemsize: int
    compress_ratio: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    conv_kernel: int
    conv_itemsize: int
    state_itemsize: int
    other_state_groups: int
    ring_blocks: int

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name":
                _whole(field, value, minimum=0 if field in ("other_state_groups", "ring_blocks") else 1)
        if self.gdn_layers % self.qsa_layers:
            raise ValueError(
                f"gdn_layers: {self.gdn_layers} recurrent layers do not fill whole groups of {self.qsa_layers}"
            )
        if self.index_dim * self.index_itemsize % self.compress_ratio or BLOCK_MULTIPLE % self.compress_ratio:
            raise ValueError(
                f"compress_ratio: {self.compress_ratio} tokens do not share one index key of "
                f"{self.index_dim * self.index_itemsize} bytes evenly"
            )

    @property
    def state_groups(self) -> int:
        """Groups of states of one request that take blocks of their own."""
        return self.gdn_layers // self.qsa_layers + self.other_state_groups

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of compressed index keys per token and layer."""
        return self.index_dim * self.index_itemsize // self.compress_ratio


QWEN4_EXP = ModelGeometry(
    name="Qwen4Exp",
    qsa_layers=12,
    gdn_layers=36,
    q_heads=24,
    kv_heads=2,
    head_dim=256,
    index_dim=128,
    index_itemsize=2,
    compress_ratio=4,
    gdn_key_heads=16,
    gdn_value_heads=48,
    gdn_head_dim=128,
    conv_kernel=4,
    conv_itemsize=2,
    state_itemsize=4,
    other_state_groups=1,
    ring_blocks=1,
)


@dataclass(frozen=True)
class BlockLayout:
    """One pool of equal blocks on one rank, for one K/V type.

    Args:
        kv_cache_dtype: the K/V type.
        layers: attention layers that own a page in every block.
        block_tokens: tokens a block holds.
        kv_bytes_per_token, index_bytes_per_token: bytes a token takes in one layer.
        fixed_blocks: blocks that every request takes whatever its length.
        max_model_len: tokens of the longest request.
    """

    kv_cache_dtype: str
    layers: int
    block_tokens: int
    kv_bytes_per_token: int
    index_bytes_per_token: int
    fixed_blocks: int
    max_model_len: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of a long request takes on one rank."""
        return self.layers * (self.kv_bytes_per_token + self.index_bytes_per_token)

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    def token_blocks(self, length: int) -> int:
        """Blocks that the tokens of one request of `length` tokens take."""
        return -(-_whole("length", length, minimum=1) // self.block_tokens)

    def request_blocks(self, length: int) -> int:
        """Blocks that one request of `length` tokens takes, fixed ones included."""
        return self.token_blocks(length) + self.fixed_blocks

    @property
    def blocks_per_request(self) -> int:
        return self.request_blocks(self.max_model_len)

    @property
    def request_bytes(self) -> int:
        return self.blocks_per_request * self.block_bytes

    def blocks(self, pool_bytes: int) -> int:
        """Whole blocks in a pool of `pool_bytes` bytes."""
        return _whole("pool_bytes", pool_bytes, minimum=0) // self.block_bytes

    def tokens_in_blocks(self, blocks: int) -> int:
        """Tokens as vLLM reports them: concurrent requests of `max_model_len`, times `max_model_len`, rounded down."""
        return _whole("blocks", blocks, minimum=0) * self.max_model_len // self.blocks_per_request

    def tokens(self, pool_bytes: int) -> int:
        """Reported tokens of a pool of `pool_bytes` bytes."""
        return self.tokens_in_blocks(self.blocks(pool_bytes))

    def requests(self, pool_bytes: int) -> int:
        """Requests of `max_model_len` tokens that fit a pool of `pool_bytes` bytes at the same time."""
        return self.blocks(pool_bytes) // self.blocks_per_request

    def blocks_for_tokens(self, tokens: int) -> int:
        """Fewest blocks that are reported as at least `tokens` tokens."""
        return -(-_whole("tokens", tokens, minimum=0) * self.blocks_per_request // self.max_model_len)

    def pool_bytes(self, tokens: int) -> int:
        """Smallest pool in bytes that is reported as at least `tokens` tokens."""
        return self.blocks_for_tokens(tokens) * self.block_bytes

    def nearest_blocks(self, tokens: int) -> int:
        """The block count whose reported tokens come closest to `tokens`; the smaller one on a tie."""
        upper = self.blocks_for_tokens(tokens)
        return min(range(max(upper - 1, 0), upper + 1), key=lambda blocks: abs(self.tokens_in_blocks(blocks) - tokens))


@dataclass(frozen=True)
class Deployment:
    """How a model is served, as far as its cache layout depends on it.

    Args:
        tp: tensor-parallel ranks; 1, 2 or 4.
        mtp: draft tokens a step (0 to 5); above 0 the draft layer owns a page in every block.
        prefix_caching: prefix caching on (recurrent states kept at block boundaries).
        max_model_len: tokens of the longest request, prompt and output.
        geometry: the model.

    Raises:
        TypeError, ValueError: for anything outside the rule, with the argument and the reason.
    """

    tp: int = 4
    mtp: int = 0
    prefix_caching: bool = False
    max_model_len: int = 131_328
    geometry: ModelGeometry = QWEN4_EXP

    def __post_init__(self) -> None:
        model = self.geometry
        tp = _whole("tp", self.tp, minimum=1)
        _whole("max_model_len", self.max_model_len, minimum=1)
        _flag("prefix_caching", self.prefix_caching)
        if tp not in SUPPORTED_TP:
            raise ValueError(
                f"tp: expected one of {', '.join(map(str, SUPPORTED_TP))}, got {tp}; no public figure checks another"
            )
        for field in ("q_heads", "gdn_key_heads", "gdn_value_heads"):
            if getattr(model, field) % tp:
                raise ValueError(f"tp: {getattr(model, field)} {field} of {model.name} do not divide over {tp} ranks")
        if model.kv_heads % tp and tp % model.kv_heads:
            raise ValueError(
                f"tp: {model.kv_heads} kv_heads of {model.name} neither divide over {tp} ranks nor repeat evenly"
            )
        mtp = _whole("mtp", self.mtp, minimum=0)
        if mtp > MAX_MTP:
            raise ValueError(
                f"mtp: expected 0 to {MAX_MTP} draft tokens, got {mtp}; no public block size is known beyond {MAX_MTP}"
            )
        if mtp and not self.prefix_caching:
            raise ValueError(
                f"prefix_caching: expected True with mtp = {mtp}, got False; every public figure with draft tokens "
                "was taken with aligned state blocks, so the number of fixed blocks without them is not known"
            )

    @property
    def kv_heads_per_rank(self) -> int:
        return max(self.geometry.kv_heads // self.tp, 1)

    @property
    def attention_layers(self) -> int:
        return self.geometry.qsa_layers + (self.mtp > 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state page on one rank: the FP32 state and the convolution window of one layer."""
        model = self.geometry
        state = model.gdn_value_heads // self.tp * model.gdn_head_dim**2 * model.state_itemsize
        channels = (2 * model.gdn_key_heads + model.gdn_value_heads) // self.tp * model.gdn_head_dim
        return state + channels * (model.conv_kernel - 1 + self.mtp) * model.conv_itemsize

    @property
    def states_per_group(self) -> int:
        return 2 + self.mtp if self.prefix_caching else 1

    @property
    def fixed_blocks(self) -> int:
        """Blocks that every request takes for states and the ring of raw index keys."""
        return self.geometry.state_groups * self.states_per_group + self.geometry.ring_blocks

    def layout(self, kv_cache_dtype: str) -> BlockLayout:
        """The block layout for one K/V type.

        The block is the smallest multiple of 16 tokens whose K/V page is at least as large as one recurrent state.

        Raises:
            TypeError, ValueError: for a K/V type outside `ITEMSIZE`.
        """
        itemsize = _itemsize(kv_cache_dtype)
        kv_bytes = 2 * self.kv_heads_per_rank * self.geometry.head_dim * itemsize
        block_tokens = -(-self.state_bytes // (kv_bytes * BLOCK_MULTIPLE)) * BLOCK_MULTIPLE
        return BlockLayout(
            kv_cache_dtype=kv_cache_dtype,
            layers=self.attention_layers,
            block_tokens=block_tokens,
            kv_bytes_per_token=kv_bytes,
            index_bytes_per_token=self.geometry.index_bytes_per_token,
            fixed_blocks=self.fixed_blocks,
            max_model_len=self.max_model_len,
        )

    @property
    def layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """The 16-bit and the E4M3 layout."""
        wide, narrow = (self.layout(dtype) for dtype in DTYPES)
        return wide, narrow

    @property
    def asymptotic_gain(self) -> Fraction:
        """E4M3 tokens for each 16-bit token when requests are long: the ratio of the marginal bytes a token."""
        wide, narrow = self.layouts
        return Fraction(wide.bytes_per_token, narrow.bytes_per_token)

    @property
    def request_gain(self) -> Fraction:
        """E4M3 requests of `max_model_len` tokens for each 16-bit one in a large pool."""
        wide, narrow = self.layouts
        return Fraction(wide.request_bytes, narrow.request_bytes)

    def gain(self, pool_bytes: int) -> Fraction | None:
        """Ratio of the reported tokens of both types in the same pool; None where the 16-bit pool holds none."""
        wide, narrow = self.layouts
        tokens = wide.tokens(pool_bytes)
        return Fraction(narrow.tokens(pool_bytes), tokens) if tokens else None

    def break_even_max_model_len(self) -> int:
        """Shortest `max_model_len` from which on an E4M3 request never takes more bytes than a 16-bit one.

        Below it the larger E4M3 blocks cost more than the smaller elements save, because the fixed blocks dominate.
        """
        wide, narrow = self.layouts
        excess = self.fixed_blocks * (narrow.block_bytes - wide.block_bytes) + narrow.block_bytes
        bound = max(excess // (wide.bytes_per_token - narrow.bytes_per_token) + 1, 1)
        # Both sides are constant between multiples of a block, so only the lengths up to each multiple matter.
        ends = {
            k * layout.block_tokens for layout in (wide, narrow) for k in range(1, bound // layout.block_tokens + 2)
        }
        worse = [
            length
            for length in ends
            if narrow.request_blocks(length) * narrow.block_bytes > wide.request_blocks(length) * wide.block_bytes
        ]
        return max(worse, default=0) + 1


def _derived(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A table whose every row is calculated and cannot fail."""
    return pd.DataFrame(rows).assign(kind="derived", status="passed", reason="")


def block_sizes(geometry: ModelGeometry = QWEN4_EXP) -> pd.DataFrame:
    """Block sizes by the state-page rule, one row for every supported TP degree and MTP depth.

    Returns:
        DataFrame: tp, mtp, state_bytes, block_tokens_fp16, block_tokens_e4m3, block_bytes_fp16, block_bytes_e4m3,
            kind, status, reason.
    """
    rows = []
    for tp in SUPPORTED_TP:
        for mtp in range(MAX_MTP + 1):
            deployment = Deployment(tp=tp, mtp=mtp, prefix_caching=mtp > 0, geometry=geometry)
            wide, narrow = deployment.layouts
            rows.append(
                {
                    "tp": tp,
                    "mtp": mtp,
                    "state_bytes": deployment.state_bytes,
                    "block_tokens_fp16": wide.block_tokens,
                    "block_tokens_e4m3": narrow.block_tokens,
                    "block_bytes_fp16": wide.block_bytes,
                    "block_bytes_e4m3": narrow.block_bytes,
                }
            )
    return _derived(rows)


def plan(
    *,
    tp: int,
    mtp: int,
    prefix_caching: bool,
    max_model_len: int,
    pool_gib: int | float | Decimal | Fraction,
    kv_cache_dtype: str | None = None,
    share_topk_workspace: bool = False,
) -> pd.DataFrame:
    """What one deployment holds, one row for each K/V type (or only `kv_cache_dtype`).

    Args:
        tp, mtp, prefix_caching, max_model_len: as in `Deployment`.
        pool_gib: K/V pool of one rank in GiB.
        kv_cache_dtype: one of `ITEMSIZE`; None for the 16-bit and the E4M3 row.
        share_topk_workspace: add the bytes that one shared top-k workspace frees; known for MTP 0 only.

    Returns:
        DataFrame: kv_cache_dtype, tokens, requests, gain (tokens over the 16-bit tokens of the same pool),
            gain_limit, blocks, blocks_per_request, block_tokens, block_bytes, bytes_per_token, pool_bytes,
            max_model_len, tp, mtp, prefix_caching, kind, status, reason. A pool that does not hold one request of
            `max_model_len` tokens has status `failed`.

    Raises:
        TypeError, ValueError: for anything outside the model, naming the argument.
    """
    deployment = Deployment(tp=tp, mtp=mtp, prefix_caching=prefix_caching, max_model_len=max_model_len)
    pool_bytes = pool_bytes_from_gib(pool_gib)
    if _flag("share_topk_workspace", share_topk_workspace):
        if mtp:
            raise ValueError(f"share_topk_workspace: the freed bytes are published for mtp = 0 only, got mtp = {mtp}")
        pool_bytes += topk_workspace_bytes(deployment.geometry)["freed"]
    wide_tokens = deployment.layout("auto").tokens(pool_bytes)
    rows = []
    for dtype in DTYPES if kv_cache_dtype is None else (kv_cache_dtype,):
        layout = deployment.layout(dtype)
        fits = layout.requests(pool_bytes) > 0
        tokens = layout.tokens(pool_bytes)
        rows.append(
            {
                "kv_cache_dtype": dtype,
                "tokens": tokens,
                "requests": layout.requests(pool_bytes),
                "gain": float(Fraction(tokens, wide_tokens)) if wide_tokens else math.nan,
                "gain_limit": float(Fraction(deployment.layout("auto").bytes_per_token, layout.bytes_per_token)),
                "blocks": layout.blocks(pool_bytes),
                "blocks_per_request": layout.blocks_per_request,
                "block_tokens": layout.block_tokens,
                "block_bytes": layout.block_bytes,
                "bytes_per_token": layout.bytes_per_token,
                "pool_bytes": pool_bytes,
                "max_model_len": max_model_len,
                "tp": tp,
                "mtp": mtp,
                "prefix_caching": prefix_caching,
                "kind": "derived",
                "status": "passed" if fits else "failed",
                "reason": ""
                if fits
                else f"one request of {max_model_len} tokens takes {layout.blocks_per_request} blocks "
                f"({layout.request_bytes} bytes); the pool holds {layout.blocks(pool_bytes)}",
            }
        )
    return pd.DataFrame(rows)


def topk_workspace_bytes(geometry: ModelGeometry = QWEN4_EXP) -> dict[str, int]:
    """Bytes per rank of the top-k index buffers: one a layer, one for all layers, and what sharing frees.

    Source: 1CatAI/1Cat-vLLM#460.
    """
    one = math.prod(TOPK_WORKSPACE_SHAPE) * TOPK_ITEMSIZE
    return {"separate": geometry.qsa_layers * one, "shared": one, "freed": (geometry.qsa_layers - 1) * one}


def feasibility(
    pools: Mapping[str, int],
    deployment: Deployment | None = None,
    *,
    concurrencies: Iterable[int] = CONCURRENCIES,
    contexts: Iterable[int] = CONTEXTS,
    output_tokens: int = OUTPUT_TOKENS,
) -> pd.DataFrame:
    """Which cells of concurrency by context fit which pool, in the 16-bit and in the E4M3 type.

    Args:
        pools: name and bytes per rank of every pool.
        deployment: default TP 4, MTP 0, no prefix caching.
        concurrencies, contexts, output_tokens: requests at once, prompt tokens, and tokens generated on top of them.

    Returns:
        DataFrame: pool, kv_cache_dtype, concurrency, context_tokens, output_tokens, blocks_needed, blocks_in_pool,
            fits, kind, status (`passed` or `skipped`, as a benchmark would skip the cell) and reason.
    """
    deployment = deployment or Deployment()
    rows = []
    for pool, pool_bytes in pools.items():
        for layout in deployment.layouts:
            available = layout.blocks(pool_bytes)
            for concurrency in concurrencies:
                for context in contexts:
                    each = layout.request_blocks(context + output_tokens)
                    needed = _whole("concurrency", concurrency, minimum=1) * each
                    fits = needed <= available
                    rows.append(
                        {
                            "pool": pool,
                            "kv_cache_dtype": layout.kv_cache_dtype,
                            "concurrency": concurrency,
                            "context_tokens": context,
                            "output_tokens": output_tokens,
                            "blocks_needed": needed,
                            "blocks_in_pool": available,
                            "fits": fits,
                            "kind": "derived",
                            "status": "passed" if fits else "skipped",
                            "reason": "" if fits else f"needs {needed} blocks, the pool holds {available}",
                        }
                    )
    return pd.DataFrame(rows)


def waterfall(deployment: Deployment, pool_bytes: int) -> pd.DataFrame:
    """How the gain falls from the factor 2 of the K/V elements to the ratio of reported tokens, one effect a row.

    Effects are applied in a fixed order, so what an effect shows depends on those before it.

    Returns:
        DataFrame: step, gain (after the step), change, meaning, kind, status, reason.
    """
    wide, narrow = deployment.layouts
    length = deployment.max_model_len
    gain = deployment.gain(pool_bytes)
    if gain is None:
        raise ValueError(f"pool_bytes: {pool_bytes} bytes hold no 16-bit block of {wide.block_bytes} bytes")
    steps: list[tuple[str, str, Fraction]] = [
        (
            "K/V elements alone",
            f"{wide.kv_bytes_per_token} and {narrow.kv_bytes_per_token} bytes a token and layer",
            Fraction(wide.kv_bytes_per_token, narrow.kv_bytes_per_token),
        ),
        (
            "indexer keys stay 16-bit",
            f"{wide.index_bytes_per_token} more bytes a token and layer in both",
            Fraction(wide.bytes_per_token, narrow.bytes_per_token),
        ),
        (
            "last page rounded up",
            f"{wide.token_blocks(length)} and {narrow.token_blocks(length)} blocks of tokens a request",
            Fraction(wide.token_blocks(length) * wide.block_bytes, narrow.token_blocks(length) * narrow.block_bytes),
        ),
        (
            "fixed blocks a request",
            f"{wide.blocks_per_request} and {narrow.blocks_per_request} blocks, {deployment.fixed_blocks} fixed",
            deployment.request_gain,
        ),
        ("pool in whole blocks", f"{wide.blocks(pool_bytes)} and {narrow.blocks(pool_bytes)} blocks in the pool", gain),
    ]
    rows = []
    previous: Fraction | None = None
    for step, meaning, value in steps:
        change = value if previous is None else value - previous
        rows.append({"step": step, "gain": float(value), "change": float(change), "meaning": meaning})
        previous = value
    return _derived(rows)


def gain_by_length(lengths: Iterable[int], *, tp: int = 4, mtp: int = 0, prefix_caching: bool = False) -> pd.DataFrame:
    """Gain of a large pool as a function of `max_model_len`.

    Returns:
        DataFrame: tp, mtp, prefix_caching, max_model_len, blocks_fp16, blocks_e4m3, gain, gain_limit, kind, status,
            reason.
    """
    rows = []
    for length in lengths:
        deployment = Deployment(tp=tp, mtp=mtp, prefix_caching=prefix_caching, max_model_len=length)
        wide, narrow = deployment.layouts
        rows.append(
            {
                "tp": tp,
                "mtp": mtp,
                "prefix_caching": prefix_caching,
                "max_model_len": length,
                "blocks_fp16": wide.blocks_per_request,
                "blocks_e4m3": narrow.blocks_per_request,
                "gain": float(deployment.request_gain),
                "gain_limit": float(deployment.asymptotic_gain),
            }
        )
    return _derived(rows)


def corner_lengths(longest: int, *, tp: int = 4, mtp: int = 0, prefix_caching: bool = False) -> list[int]:
    """Every length up to `longest` at which the gain jumps, both sides of each jump."""
    deployment = Deployment(tp=tp, mtp=mtp, prefix_caching=prefix_caching, max_model_len=longest)
    corners = {1, longest}
    for layout in deployment.layouts:
        for end in range(layout.block_tokens, longest, layout.block_tokens):
            corners |= {end, end + 1}
    return sorted(corners)


def fixed_bytes_from_gain(kv_bytes_per_token: int, gain: Fraction) -> Fraction:
    """The constant bytes a token that a two-number model (K/V that halves, plus a constant) needs for a gain.

    It absorbs the page rounding and the fixed blocks, so it exceeds the bytes that the indexer really takes.

    Args:
        kv_bytes_per_token: 16-bit K/V bytes a token on one rank, all layers.
        gain: E4M3 tokens over 16-bit tokens, above 1 and up to 2.

    Raises:
        ValueError: for a gain outside that range.
    """
    main = _whole("kv_bytes_per_token", kv_bytes_per_token, minimum=1)
    ratio = Fraction(gain)
    if not 1 < ratio <= 2:
        raise ValueError(f"gain: expected above 1 and up to 2, got {gain}")
    return main * (1 - ratio / 2) / (ratio - 1)

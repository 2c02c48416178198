"""Seeded inputs of `sparse_paged_attention`, each with its unquantised twin.

The same seed gives the same input on the same kind of device; a CPU and a GPU draw different numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from qsa_kernels import e4m3

Q_FACTOR, K_FACTOR, V_FACTOR = 0.2, 0.35, 0.3  # of the standard normal draws, as in the public regression tests
BLOCK_TOKENS = 4  # the indexer selects tokens in blocks of four

_CHUNK_ELEMENTS = 1 << 25
_FINITE_CODES = [code for code in range(256) if code & 0x7F != e4m3.NAN_CODE]


@dataclass(frozen=True)
class AttentionInputs:
    """One call of the operator.

    Args:
        name (str): label for tables and test ids.
        q (torch.Tensor): [rows, q_heads, head_dim].
        k_cache (torch.Tensor): [pages, page_size, kv_heads, head_dim].
        v_cache (torch.Tensor): as `k_cache`.
        logical_indices (torch.Tensor): [rows, topk] int32, -1 = no token.
        block_table (torch.Tensor): [requests, pages_per_request] int32.
        token_to_req (torch.Tensor): [rows] int32.
        kv_cache_dtype (str): "auto" or "fp8_e4m3".
        k_scale (float): 1.0 for "auto".
        v_scale (float): 1.0 for "auto".
    """

    name: str
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    logical_indices: torch.Tensor
    block_table: torch.Tensor
    token_to_req: torch.Tensor
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `sparse_paged_attention` and `reference_attention`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}

    def to(self, device: torch.device | str) -> AttentionInputs:
        """The same inputs with every tensor on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in self.arguments().items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def topk(self) -> int:
        return self.logical_indices.shape[1]


@dataclass(frozen=True)
class QuantisedPair:
    """The same call twice: on the cache as captured and on its E4M3 codes.

    Args:
        unquantised (AttentionInputs): `kv_cache_dtype="auto"`, cache in the dtype of q.
        quantised (AttentionInputs): `kv_cache_dtype="fp8_e4m3"`, uint8 codes of that cache.
        neighbour_overlap (float | None): for prefill, the measured share of a row's four-token blocks that the
            previous row selects too.
    """

    unquantised: AttentionInputs
    quantised: AttentionInputs
    neighbour_overlap: float | None = None

    @property
    def name(self) -> str:
        return self.quantised.name

    def to(self, device: torch.device | str) -> QuantisedPair:
        """Both calls with every tensor on `device`."""
        return replace(self, unquantised=self.unquantised.to(device), quantised=self.quantised.to(device))


def published_shapes(
    *,
    topks: Sequence[int] = (10, 33, 2051),
    rows: int = 3,
    q_heads: int = 6,
    head_dim: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> list[QuantisedPair]:
    """The shapes of the public regression tests: topk 10 on two pages of 8, 33 on a page of 40, 2051 on a page of 2052.

    Only shapes and factors are public; the drawn numbers and the selections are this project's.

    Args:
        topks (Sequence[int]): which of the three shapes, by topk.
        rows (int): query rows, all of one request.
        q_heads (int): query heads on one KV head.
        head_dim (int): elements of a head.
        seed (int): of the draws.
        device (torch.device | str): where the tensors live.
        dtype (torch.dtype): of q and the unquantised cache.

    Raises:
        ValueError: a topk without a published shape.

    Source:
        1Cat-vLLM#447, #453 and the test module `test_qsa_e4m3.py` there.
    """
    pages = {10: (2, 8), 33: (1, 40), 2051: (1, 2052)}
    unknown = [topk for topk in topks if topk not in pages]
    if unknown:
        raise ValueError(f"topks: expected published shapes {sorted(pages)}, got {unknown}")
    return [
        one_request(
            topk,
            name=f"published-topk{topk}",
            pages=pages[topk][0],
            page_size=pages[topk][1],
            rows=rows,
            q_heads=q_heads,
            head_dim=head_dim,
            seed=seed + topk,
            device=device,
            dtype=dtype,
        )
        for topk in topks
    ]


def one_request(
    topk: int,
    *,
    pages: int,
    page_size: int,
    name: str | None = None,
    rows: int = 3,
    q_heads: int = 6,
    kv_heads: int = 1,
    head_dim: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> QuantisedPair:
    """Rows of one request over all of its pages, each with its own distinct tokens.

    Args:
        topk (int): tokens a row, at most pages * page_size.
        pages (int): pages of the request.
        page_size (int): tokens a page.
        name (str | None): label; None = "one-request-topk" and the number.
        rows (int): query rows.
        q_heads (int): query heads, a multiple of `kv_heads`.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head.
        seed (int): of the draws.
        device (torch.device | str): where the tensors live.
        dtype (torch.dtype): of q and the unquantised cache.
    """
    generator = _generator(seed, device)
    shape = (pages, page_size, kv_heads, head_dim)
    return quantised_pair(
        AttentionInputs(
            name=name or f"one-request-topk{topk}",
            q=_normal((rows, q_heads, head_dim), Q_FACTOR, generator, dtype),
            k_cache=_normal(shape, K_FACTOR, generator, dtype),
            v_cache=_normal(shape, V_FACTOR, generator, dtype),
            logical_indices=_distinct(rows, pages * page_size, topk, generator),
            block_table=_shuffled_pages(1, pages, generator),
            token_to_req=torch.zeros(rows, dtype=torch.int32, device=device),
        )
    )


def all_codes(
    *,
    rows: int = 3,
    q_heads: int = 6,
    head_dim: int = 256,
    seed: int = 0,
    k_scale: float = 0.0123,
    v_scale: float = 0.0371,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> QuantisedPair:
    """Every one of the 254 finite codes at every position of the head, all tokens selected; NaN codes lie beside them.

    The unquantised twin is the decoded cache rounded to `dtype`, so its distance is that rounding alone.

    Args:
        rows (int): query rows, all of one request.
        q_heads (int): query heads on one KV head.
        head_dim (int): elements of a head.
        seed (int): of the draws.
        k_scale (float): of the K codes.
        v_scale (float): of the V codes.
        device (torch.device | str): where the tensors live.
        dtype (torch.dtype): of q and the unquantised cache.
    """
    generator = _generator(seed, device)
    finite = torch.tensor(_FINITE_CODES, dtype=torch.uint8, device=device)
    count, page_size = len(_FINITE_CODES), 16
    diagonal = torch.arange(count, device=device)[:, None] + torch.arange(head_dim, device=device)
    pages = _shuffled_pages(1, 256 // page_size, generator)
    caches = []
    for stride in (1, 3):  # K and V must not hold the same code at the same place
        codes = torch.full((256, head_dim), e4m3.NAN_CODE, dtype=torch.uint8, device=device)
        codes[:count] = finite[(stride * diagonal) % count]
        caches.append(_to_pages(codes[None, :, None, :], pages, page_size))
    order = torch.stack([torch.randperm(count, generator=generator, device=device) for _ in range(rows)])
    quantised = AttentionInputs(
        name="all-codes",
        q=_normal((rows, q_heads, head_dim), Q_FACTOR, generator, dtype),
        k_cache=caches[0],
        v_cache=caches[1],
        logical_indices=order.int(),
        block_table=pages,
        token_to_req=torch.zeros(rows, dtype=torch.int32, device=device),
        kv_cache_dtype="fp8_e4m3",
        k_scale=e4m3.scale_value(k_scale, "k_scale"),
        v_scale=e4m3.scale_value(v_scale, "v_scale"),
    )
    return QuantisedPair(unquantised=_dequantised(quantised, dtype), quantised=quantised)


def random_pages(
    *,
    rows: int = 5,
    requests: int = 3,
    pages_per_request: int = 5,
    page_size: int = 16,
    topk: int = 47,
    q_heads: int = 12,
    kv_heads: int = 2,
    head_dim: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> QuantisedPair:
    """Several requests whose pages lie shuffled in a cache with spare pages between them.

    Args:
        rows (int): query rows, dealt to the requests in turn.
        requests (int): requests with their own pages.
        pages_per_request (int): width of the block table.
        page_size (int): tokens a page.
        topk (int): distinct tokens a row, at most pages_per_request * page_size.
        q_heads (int): query heads, a multiple of `kv_heads`.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head.
        seed (int): of the draws.
        device (torch.device | str): where the tensors live.
        dtype (torch.dtype): of q and the unquantised cache.
    """
    generator = _generator(seed, device)
    shape = (requests * pages_per_request + 3, page_size, kv_heads, head_dim)
    return quantised_pair(
        AttentionInputs(
            name="random-pages",
            q=_normal((rows, q_heads, head_dim), Q_FACTOR, generator, dtype),
            k_cache=_normal(shape, K_FACTOR, generator, dtype),
            v_cache=_normal(shape, V_FACTOR, generator, dtype),
            logical_indices=_distinct(rows, pages_per_request * page_size, topk, generator),
            block_table=_shuffled_pages(requests, pages_per_request, generator, spare=3),
            token_to_req=(torch.arange(rows, device=device) % requests).int(),
        )
    )


def padded_and_duplicates(
    *,
    q_heads: int = 6,
    kv_heads: int = 1,
    head_dim: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> QuantisedPair:
    """Six rows with every kind of entry that carries no weight, and one with duplicates.

    Rows: padding and out-of-range tokens; duplicates; tokens on bad pages; nothing valid; a negative request; a request
    past the table. Everything that no valid entry selects holds NaN, page 0 included.

    Args:
        q_heads (int): query heads, a multiple of `kv_heads`.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head.
        seed (int): of the draws.
        device (torch.device | str): where the tensors live.
        dtype (torch.dtype): of q and the unquantised cache.
    """
    generator = _generator(seed, device)
    page_size = 16
    lowest, highest = -(2**31), 2**31 - 1
    indices = torch.tensor(
        [
            [0, -1, 15, 32, 47, lowest, highest, 3, -1],
            [7, 7, 3, 7, 19, 19, 0, -1, 7],
            [16, 31, 5, 40, 33, 14, 1, 2, 4],
            [-1, 48, highest, lowest, -1, -1, 64, 99, -1],
            [1, 2, 3, 4, 5, 6, 7, 8, 9],
            [1, 2, 3, 4, 5, 6, 7, 8, 9],
        ],
        dtype=torch.int32,
        device=device,
    )
    block_table = torch.tensor([[3, 1, -1], [2, 5, 2**31 - 1]], dtype=torch.int32, device=device)  # pages 0..4 exist
    token_to_req = torch.tensor([0, 0, 1, 0, -1, 2], dtype=torch.int32, device=device)
    shape = (5, page_size, kv_heads, head_dim)
    selected = torch.zeros(5, page_size, dtype=torch.bool, device=device)
    selected[3, [0, 15, 3, 7]] = True
    selected[1, 3] = True
    selected[2, [5, 14, 1, 2, 4]] = True
    k_cache, v_cache = (_normal(shape, factor, generator, dtype) for factor in (K_FACTOR, V_FACTOR))
    pair = quantised_pair(
        AttentionInputs(
            name="padded-duplicates",
            q=_normal((indices.shape[0], q_heads, head_dim), Q_FACTOR, generator, dtype),
            k_cache=k_cache,
            v_cache=v_cache,
            logical_indices=indices,
            block_table=block_table,
            token_to_req=token_to_req,
        )
    )
    for cache in (pair.unquantised.k_cache, pair.unquantised.v_cache):
        cache[~selected] = torch.nan
    for cache in (pair.quantised.k_cache, pair.quantised.v_cache):
        cache[~selected] = e4m3.NAN_CODE
    return pair


def decode(
    concurrency: int,
    context: int,
    *,
    topk: int = 2051,
    q_heads: int = 6,
    kv_heads: int = 1,
    head_dim: int = 256,
    page_size: int = 784,
    selection: str = "random",
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> QuantisedPair:
    """One decode step: one row a request, each with its own `context` tokens on shuffled pages.

    Args:
        concurrency (int): requests, which is also the number of rows.
        context (int): tokens of each request.
        topk (int): entries a row; a shorter context is listed whole and padded with -1.
        q_heads (int): query heads, a multiple of `kv_heads`.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head.
        page_size (int): tokens a page; 784 (FP16) and 1568 (E4M3) in the public TP4/MTP0 layout.
        selection (str): "random" tokens, or "clustered": random blocks of four and the newest topk % 4 tokens.
        seed (int): of the draws.
        device (torch.device | str): where the tensors are made and live.
        dtype (torch.dtype): of q and the unquantised cache.

    Raises:
        ValueError: a size below one or an unknown selection.
    """
    _positive(concurrency=concurrency, context=context, topk=topk, page_size=page_size)
    if selection not in ("random", "clustered"):
        raise ValueError(f"selection: expected 'random' or 'clustered', got {selection!r}")
    generator = _generator(seed, device)
    if context <= topk:
        indices = _all_tokens(concurrency, context, topk, generator)
    elif selection == "random":
        indices = _distinct(concurrency, context, topk, generator)
    else:
        newest = topk % BLOCK_TOKENS
        blocks = _distinct(concurrency, (context - newest) // BLOCK_TOKENS, topk // BLOCK_TOKENS, generator)
        last = torch.full((concurrency,), context, device=device)
        indices = _expand_blocks(blocks, last, newest)
    return _paged_normal(
        f"decode-c{concurrency}-n{context}-{selection}",
        indices,
        requests=concurrency,
        context=context,
        token_to_req=torch.arange(concurrency, dtype=torch.int32, device=device),
        heads=(q_heads, kv_heads, head_dim),
        page_size=page_size,
        generator=generator,
        dtype=dtype,
    )


def prefill(
    rows: int,
    context: int,
    *,
    overlap: float = 0.9,
    topk: int = 2051,
    q_heads: int = 6,
    kv_heads: int = 1,
    head_dim: int = 256,
    page_size: int = 784,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> QuantisedPair:
    """The last `rows` positions of a prompt of `context` tokens, with selections that change slowly from row to row.

    Each row selects topk // 4 four-token blocks that lie wholly before its own position, and the newest topk % 4
    tokens; a row that sees no more than `topk` tokens lists them all. From one row to the next each block stays with
    probability `overlap`. The pair's `neighbour_overlap` holds what came out.

    Args:
        rows (int): query rows, all of one request.
        context (int): tokens of the request, at least `rows`.
        overlap (float): wanted share of common blocks of neighbouring rows, 0 to 1.
        topk (int): entries a row.
        q_heads (int): query heads, a multiple of `kv_heads`.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head.
        page_size (int): tokens a page.
        seed (int): of the draws.
        device (torch.device | str): where the tensors are made and live.
        dtype (torch.dtype): of q and the unquantised cache.

    Raises:
        ValueError: a size below one, a context below `rows`, or an overlap outside 0 to 1.

    Source:
        Neighbouring rows share about 90 % of their blocks: vLLM#55394, #55430.
    """
    _positive(rows=rows, context=context, topk=topk, page_size=page_size)
    if context < rows:
        raise ValueError(f"context: expected at least rows = {rows} tokens, got {context}")
    if not 0.0 <= overlap <= 1.0:
        raise ValueError(f"overlap: expected a share from 0 to 1, got {overlap}")
    generator = _generator(seed, device)
    visible = torch.arange(context - rows + 1, context + 1, device=device)
    newest = topk % BLOCK_TOKENS
    blocks = _slow_blocks((visible - newest) // BLOCK_TOKENS, topk // BLOCK_TOKENS, overlap, generator)
    sparse = _expand_blocks(blocks, visible, newest)
    column = torch.arange(topk, dtype=torch.int32, device=device).expand(rows, topk)
    dense = torch.where(column < visible[:, None], column, -1)
    indices = torch.where((visible > topk)[:, None], sparse, dense)
    pair = _paged_normal(
        f"prefill-r{rows}-n{context}",
        indices,
        requests=1,
        context=context,
        token_to_req=torch.zeros(rows, dtype=torch.int32, device=device),
        heads=(q_heads, kv_heads, head_dim),
        page_size=page_size,
        generator=generator,
        dtype=dtype,
    )
    return replace(pair, neighbour_overlap=neighbour_overlap(indices))


def from_tokens(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    logical_indices: torch.Tensor,
    *,
    page_size: int = 16,
    k_scale: float | None = None,
    v_scale: float | None = None,
    seed: int = 0,
) -> QuantisedPair:
    """One request from captured keys and values, laid out on shuffled pages.

    Args:
        name (str): label for tables.
        q (torch.Tensor): [rows, q_heads, head_dim].
        k (torch.Tensor): [tokens, kv_heads, head_dim], dtype of `q`.
        v (torch.Tensor): as `k`.
        logical_indices (torch.Tensor): [rows, topk] int32.
        page_size (int): tokens a page; the last page is filled up with zeros.
        k_scale (float | None): None = the smallest that covers `k`.
        v_scale (float | None): None = the smallest that covers `v`.
        seed (int): of the page order.
    """
    pages = _shuffled_pages(1, -(-k.shape[0] // page_size), _generator(seed, q.device), spare=1)
    unquantised = AttentionInputs(
        name=name,
        q=q,
        k_cache=_to_pages(k[None], pages, page_size, spare=1),
        v_cache=_to_pages(v[None], pages, page_size, spare=1),
        logical_indices=logical_indices,
        block_table=pages,
        token_to_req=torch.zeros(q.shape[0], dtype=torch.int32, device=q.device),
    )
    return quantised_pair(unquantised, k_scale=k_scale, v_scale=v_scale)


def quantised_pair(
    unquantised: AttentionInputs, *, k_scale: float | None = None, v_scale: float | None = None
) -> QuantisedPair:
    """Encode the cache of a call.

    Args:
        unquantised (AttentionInputs): `kv_cache_dtype="auto"`.
        k_scale (float | None): None = the smallest that covers the K cache.
        v_scale (float | None): None = the smallest that covers the V cache.
    """
    k_scale = e4m3.covering_scale(unquantised.k_cache) if k_scale is None else e4m3.scale_value(k_scale, "k_scale")
    v_scale = e4m3.covering_scale(unquantised.v_cache) if v_scale is None else e4m3.scale_value(v_scale, "v_scale")
    quantised = replace(
        unquantised,
        k_cache=_encode_pages(unquantised.k_cache, k_scale),
        v_cache=_encode_pages(unquantised.v_cache, v_scale),
        kv_cache_dtype="fp8_e4m3",
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return QuantisedPair(unquantised=unquantised, quantised=quantised)


def neighbour_overlap(logical_indices: torch.Tensor) -> float:
    """Mean share of a row's four-token blocks that the previous row lists too; 1.0 for fewer than two rows.

    Args:
        logical_indices (torch.Tensor): [rows, topk]; negative entries are left out.
    """
    blocks = torch.where(logical_indices >= 0, logical_indices // BLOCK_TOKENS, -1).sort(-1).values
    blocks[:, 1:] = torch.where(blocks[:, 1:] == blocks[:, :-1], -1, blocks[:, 1:])
    blocks = blocks.sort(-1).values
    if blocks.shape[0] < 2:
        return 1.0
    own, before = blocks[1:], blocks[:-1].contiguous()
    place = torch.searchsorted(before, own.contiguous()).clamp(max=before.shape[1] - 1)
    listed = own >= 0
    shared = (before.gather(1, place) == own) & listed
    return float((shared.sum(-1) / listed.sum(-1).clamp(min=1)).mean())


def _paged_normal(
    name: str,
    indices: torch.Tensor,
    *,
    requests: int,
    context: int,
    token_to_req: torch.Tensor,
    heads: tuple[int, int, int],
    page_size: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> QuantisedPair:
    q_heads, kv_heads, head_dim = heads
    pages_per_request = -(-context // page_size)
    shape = (requests * pages_per_request, page_size, kv_heads, head_dim)
    return quantised_pair(
        AttentionInputs(
            name=name,
            q=_normal((indices.shape[0], q_heads, head_dim), Q_FACTOR, generator, dtype),
            k_cache=_normal(shape, K_FACTOR, generator, dtype),
            v_cache=_normal(shape, V_FACTOR, generator, dtype),
            logical_indices=indices,
            block_table=_shuffled_pages(requests, pages_per_request, generator),
            token_to_req=token_to_req,
        )
    )


def _slow_blocks(visible: torch.Tensor, slots: int, overlap: float, generator: torch.Generator) -> torch.Tensor:
    """[rows, slots] distinct blocks a row; slot s owns the blocks congruent to s, so slots never collide."""
    slot = torch.arange(slots, device=visible.device)
    owned = ((visible[:, None] - slot - 1) // max(1, slots) + 1).clamp(min=1)
    shape = (visible.shape[0], slots)
    changes = torch.rand(shape, generator=generator, device=visible.device) >= overlap
    changes[0] = True
    # A step of 1 to owned - 1 never lands on the same block again.
    step = 1 + (torch.rand(shape, generator=generator, device=visible.device) * (owned - 1)).long().clamp(min=0)
    return slot + slots * ((changes * step).cumsum(0) % owned)


def _expand_blocks(blocks: torch.Tensor, visible: torch.Tensor, newest: int) -> torch.Tensor:
    """[rows, 4 * blocks + newest] int32: the tokens of each block, then the newest visible ones."""
    offsets = torch.arange(BLOCK_TOKENS, device=blocks.device)
    tokens = (blocks.long()[..., None] * BLOCK_TOKENS + offsets).flatten(1)
    tail = visible[:, None] - newest + torch.arange(newest, device=blocks.device)
    return torch.cat([tokens, tail], dim=1).int()


def _distinct(rows: int, population: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, count] int32 numbers below `population`, distinct within a row, in random order."""
    if count > population:
        raise ValueError(f"topk: expected at most {population} tokens, got {count}")
    keys = torch.rand(rows, population, generator=generator, device=generator.device)
    return keys.topk(count, dim=-1).indices.int()


def _all_tokens(rows: int, context: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    indices = torch.full((rows, topk), -1, dtype=torch.int32, device=generator.device)
    indices[:, :context] = _distinct(rows, context, context, generator)
    return indices


def _shuffled_pages(requests: int, width: int, generator: torch.Generator, spare: int = 0) -> torch.Tensor:
    order = torch.randperm(requests * width + spare, generator=generator, device=generator.device)
    return order[: requests * width].view(requests, width).int()


def _to_pages(tokens: torch.Tensor, block_table: torch.Tensor, page_size: int, spare: int = 0) -> torch.Tensor:
    """[pages, page_size, kv_heads, head_dim] from [requests, tokens, kv_heads, head_dim]."""
    requests, width = block_table.shape
    paged = tokens.new_zeros(requests, width * page_size, *tokens.shape[2:])
    paged[:, : tokens.shape[1]] = tokens
    cache = tokens.new_zeros(requests * width + spare, page_size, *tokens.shape[2:])
    cache[block_table.long().flatten()] = paged.view(requests * width, page_size, *tokens.shape[2:])
    return cache


def _encode_pages(cache: torch.Tensor, scale: float) -> torch.Tensor:
    codes = torch.empty(cache.shape, dtype=torch.uint8, device=cache.device)
    step = max(1, _CHUNK_ELEMENTS // cache[0].numel())
    for start in range(0, cache.shape[0], step):
        codes[start : start + step] = e4m3.encode(cache[start : start + step], scale)
    return codes


def _dequantised(quantised: AttentionInputs, dtype: torch.dtype) -> AttentionInputs:
    return replace(
        quantised,
        k_cache=(e4m3.decode(quantised.k_cache) * quantised.k_scale).to(dtype),
        v_cache=(e4m3.decode(quantised.v_cache) * quantised.v_scale).to(dtype),
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
    )


def _normal(shape: tuple[int, ...], factor: float, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).mul_(factor)


def _generator(seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")

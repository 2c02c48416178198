"""Split-K attention over the tokens that each row lists, one kernel a contraction."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .decode import decode_parts, decode_tile
from .paging import count_tiles_in_use, locate_tokens, uniform
from .scaling import inverse, log_sum_exp, output_factor, softmax_factor

# Score of a token without weight, and a start of the running maximum so far above it that their difference gives a
# weight of exactly zero even where a tile has no valid token. Both are finite, since -inf - -inf is NaN.
LOWEST = tl.constexpr(-3.0e38)
MAXIMUM_START = tl.constexpr(-1.0e38)


# Sizes that change from call to call in a server; specialised on their value they would each need a compilation.
SIZES = ("num_rows", "num_requests", "pages_per_request", "num_pages", "block_table_stride")


@triton.jit
def along_rows(vector, TRANSPOSED: tl.constexpr):
    """A vector along the rows of a tile, or along its columns where tiles are transposed."""
    if TRANSPOSED:
        return vector[None, :]
    else:
        return vector[:, None]


@triton.jit
def along_columns(vector, TRANSPOSED: tl.constexpr):
    """A vector along the columns of a tile, or along its rows where tiles are transposed."""
    if TRANSPOSED:
        return vector[:, None]
    else:
        return vector[None, :]


@triton.jit
def product(left, right, accumulator, TRANSPOSED: tl.constexpr):
    """left @ right, or right @ left where tiles are transposed; accumulator may be None."""
    if TRANSPOSED:
        return tl.dot(right, left, accumulator, out_dtype=tl.float32)
    else:
        return tl.dot(left, right, accumulator, out_dtype=tl.float32)


@triton.jit
def query_parts(query, TRANSPOSED: tl.constexpr, CODES_PER_WORD: tl.constexpr):
    """The tile [heads, head_dim] as the products take it: whole, transposed, or the even and the odd dims of that."""
    if not TRANSPOSED:
        return (query,)
    elif CODES_PER_WORD == 1:
        return (tl.trans(query),)
    else:
        even, odd = tl.split(tl.reshape(query, (query.shape[0], query.shape[1] // 2, 2)))
        return tl.trans(even), tl.trans(odd)


@triton.jit
def joined_parts(parts, TRANSPOSED: tl.constexpr, CODES_PER_WORD: tl.constexpr):
    """[heads, head_dim] of an output in the parts of `query_parts`."""
    if not TRANSPOSED:
        return parts[0]
    elif CODES_PER_WORD == 1:
        return tl.trans(parts[0])
    else:
        pairs = tl.permute(tl.join(parts[0], parts[1]), (1, 0, 2))
        return tl.reshape(pairs, (pairs.shape[0], pairs.shape[1] * 2))


@triton.jit
def store_result(
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    result,
    lse,
    v_scale,
    heads,
    dims,
    in_group,
    row,
    split,
    num_rows,
    num_q_heads,
    out_row_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    DECODER: tl.constexpr,
    HOISTED: tl.constexpr,
):
    """Write normalised heads: the scaled output where there is one split, else an FP32 partial, unscaled."""
    if not SPLIT:
        scaled = result * output_factor(v_scale, DECODER, HOISTED)
        places = row * out_row_stride + heads[:, None] * out_head_stride + dims[None, :]
        tl.store(out_ptr + places, scaled.to(out_ptr.dtype.element_ty), mask=in_group[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + row * num_q_heads + heads, lse, mask=in_group)
    else:
        cells = (split.to(tl.int64) * num_rows + row) * num_q_heads + heads
        tl.store(partial_out_ptr + cells[:, None] * HEAD_DIM + dims[None, :], result, mask=in_group[:, None])
        tl.store(partial_lse_ptr + cells, lse, mask=in_group)


@triton.jit(do_not_specialize=SIZES)
def attend_with_dot(
    q_ptr,  # [rows, q_heads, head_dim]
    k_cache_ptr,  # [pages, page_size, kv_heads, head_dim]
    v_cache_ptr,
    indices_ptr,  # [rows, topk] int32
    block_table_ptr,  # [requests, pages_per_request] int32
    token_to_req_ptr,  # [rows] int32
    out_ptr,  # [rows, q_heads, head_dim]
    lse_ptr,  # [rows, q_heads] float32, or None
    partial_out_ptr,  # [splits, rows, q_heads, head_dim] float32
    partial_lse_ptr,  # [splits, rows, q_heads] float32
    k_scale,
    v_scale,
    num_rows,
    num_splits,
    num_q_heads,
    num_requests,
    pages_per_request,
    num_pages,
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    indices_row_stride,
    block_table_stride,
    out_row_stride,
    out_head_stride,
    TOPK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    DECODER: tl.constexpr,
    HOISTED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CODES_PER_WORD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One split of one row and KV head: both products through `tl.dot`, probabilities in the operand type.

    Tiles are [heads, dims], [dims, tokens], [heads, tokens] and [tokens, dims], or all of them transposed: tensor cores
    take 16 rows and 8 columns, so that up to eight heads fill columns without padding. Codes can then be read two to a
    16-bit word, in which they cross shared memory as halves do; one product takes the even dims and one the odd ones.
    """
    TOKEN_AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    members = tl.arange(0, BLOCK_M)
    in_group = members < GROUP
    heads = kv_head * GROUP + members
    dims = tl.arange(0, HEAD_DIM)
    words = tl.arange(0, HEAD_DIM // CODES_PER_WORD)
    lanes = tl.arange(0, BLOCK_N)
    if OVERLAPPED:
        # the merge may be launched as soon as every program has begun
        gdc_launch_dependents()

    request = tl.load(token_to_req_ptr + row)
    # a request out of range has no pages; what is listed can be read before it is known
    pages_in_reach = tl.where((request >= 0) & (request < num_requests), pages_per_request, 0)
    row_indices_ptr = indices_ptr + row * indices_row_stride
    tiles = 0
    # always so at run time: without a block of its own the count makes ptxas for sm_70 spill in the attention loop
    if num_requests > 0:
        tiles = count_tiles_in_use(row_indices_ptr, split, num_splits, TOPK, BLOCK_N, ASSEMBLY)

    factor = softmax_factor(k_scale, HEAD_DIM, DECODER, HOISTED)
    query = tl.load(
        q_ptr + row * q_row_stride + heads[:, None] * q_head_stride + dims[None, :], mask=in_group[:, None], other=0.0
    )
    queries = query_parts(query, TRANSPOSED, CODES_PER_WORD)
    accumulators = ()
    for part in tl.static_range(CODES_PER_WORD):
        accumulators = accumulators + (tl.zeros_like(queries[part]).to(tl.float32),)
    running_max = tl.full((BLOCK_M,), MAXIMUM_START, tl.float32)
    normaliser = tl.zeros((BLOCK_M,), tl.float32)
    operand = query.dtype

    row_table_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * k_head_stride
    v_head_ptr = v_cache_ptr + kv_head.to(tl.int64) * v_head_stride

    for tile in range(tiles):
        page, slot, valid = locate_tokens(
            row_indices_ptr,
            row_table_ptr,
            (split + tile * num_splits) * BLOCK_N + lanes,
            pages_in_reach,
            num_pages,
            TOPK,
            PAGE_SIZE,
        )
        k_places = page * k_page_stride + slot * k_slot_stride
        v_places = page * v_page_stride + slot * v_slot_stride
        k = tl.load(
            k_head_ptr + along_columns(k_places, TRANSPOSED) + along_rows(words, TRANSPOSED),
            mask=along_columns(valid, TRANSPOSED),
            other=0,
        )
        v = tl.load(
            v_head_ptr + along_rows(v_places, TRANSPOSED) + along_columns(words, TRANSPOSED),
            mask=along_rows(valid, TRANSPOSED),
            other=0,
        )
        keys = decode_parts(k, k_scale, CODES_PER_WORD, DECODER, HOISTED, ASSEMBLY, operand)
        values = decode_parts(v, v_scale, CODES_PER_WORD, DECODER, HOISTED, ASSEMBLY, operand)

        scores = None
        for part in tl.static_range(CODES_PER_WORD):
            scores = product(queries[part], keys[part], scores, TRANSPOSED)
        scores = tl.where(along_columns(valid, TRANSPOSED), scores * factor, LOWEST)
        new_max = tl.maximum(running_max, tl.max(scores, axis=TOKEN_AXIS))
        decay = tl.math.exp2(running_max - new_max)
        probabilities = tl.math.exp2(scores - along_rows(new_max, TRANSPOSED))
        normaliser = normaliser * decay + tl.sum(probabilities, axis=TOKEN_AXIS)
        weights = probabilities.to(operand)
        decayed = along_rows(decay, TRANSPOSED)
        sums = ()
        for part in tl.static_range(CODES_PER_WORD):
            sums = sums + (product(weights, values[part], accumulators[part] * decayed, TRANSPOSED),)
        accumulators = sums
        running_max = new_max

    store_result(
        out_ptr,
        lse_ptr,
        partial_out_ptr,
        partial_lse_ptr,
        joined_parts(accumulators, TRANSPOSED, CODES_PER_WORD) * inverse(normaliser)[:, None],
        log_sum_exp(running_max, normaliser),
        v_scale,
        heads,
        dims,
        in_group,
        row,
        split,
        num_rows,
        num_q_heads,
        out_row_stride,
        out_head_stride,
        HEAD_DIM,
        SPLIT,
        DECODER,
        HOISTED,
    )


@triton.jit(do_not_specialize=SIZES)
def attend_with_vector(
    q_ptr,  # [rows, q_heads, head_dim]
    k_cache_ptr,  # [pages, page_size, kv_heads, head_dim]
    v_cache_ptr,
    indices_ptr,  # [rows, topk] int32
    block_table_ptr,  # [requests, pages_per_request] int32
    token_to_req_ptr,  # [rows] int32
    out_ptr,  # [rows, q_heads, head_dim]
    lse_ptr,  # [rows, q_heads] float32, or None
    partial_out_ptr,  # [splits, rows, q_heads, head_dim] float32
    partial_lse_ptr,  # [splits, rows, q_heads] float32
    k_scale,
    v_scale,
    num_rows,
    num_splits,
    num_q_heads,
    num_requests,
    pages_per_request,
    num_pages,
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    indices_row_stride,
    block_table_stride,
    out_row_stride,
    out_head_stride,
    TOPK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    DECODER: tl.constexpr,
    HOISTED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    SPREAD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One split of one row and up to BLOCK_M heads of a group: products and sums in registers, probabilities in FP32.

    SPREAD is the number of tokens that one 16-byte load a thread covers. A tile is read SPREAD tokens at a time, and
    each of those places keeps a softmax state and a partial output of its own per head, merged once after the loop:
    only the sum of a score over the head dimension crosses threads.
    """
    PROGRAMS_PER_GROUP: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    STEPS: tl.constexpr = BLOCK_N // SPREAD
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // PROGRAMS_PER_GROUP
    first_member = tl.program_id(1) % PROGRAMS_PER_GROUP * BLOCK_M
    split = tl.program_id(2)
    dims = tl.arange(0, HEAD_DIM)
    lanes = tl.arange(0, SPREAD)
    if OVERLAPPED:
        gdc_launch_dependents()

    request = tl.load(token_to_req_ptr + row)
    # a request out of range has no pages; what is listed can be read before it is known
    pages_in_reach = tl.where((request >= 0) & (request < num_requests), pages_per_request, 0)
    row_indices_ptr = indices_ptr + row * indices_row_stride
    tiles = count_tiles_in_use(row_indices_ptr, split, num_splits, TOPK, BLOCK_N, ASSEMBLY)

    factor = softmax_factor(k_scale, HEAD_DIM, DECODER, HOISTED)
    queries = ()
    running_max = ()
    normaliser = ()
    accumulator = ()
    for member in tl.static_range(BLOCK_M):
        head = kv_head * GROUP + first_member + member
        in_group = first_member + member < GROUP
        q = tl.load(q_ptr + row * q_row_stride + head * q_head_stride + dims, mask=in_group, other=0.0)
        queries = queries + (q.to(tl.float32) * factor,)
        running_max = running_max + (tl.full((SPREAD,), MAXIMUM_START, tl.float32),)
        normaliser = normaliser + (tl.zeros((SPREAD,), tl.float32),)
        accumulator = accumulator + (tl.zeros((SPREAD, HEAD_DIM), tl.float32),)

    row_table_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * k_head_stride
    v_head_ptr = v_cache_ptr + kv_head.to(tl.int64) * v_head_stride

    for tile in range(tiles):
        keys = ()
        values = ()
        in_use = ()
        for step in tl.static_range(STEPS):
            page, slot, valid = locate_tokens(
                row_indices_ptr,
                row_table_ptr,
                (split + tile * num_splits) * BLOCK_N + step * SPREAD + lanes,
                pages_in_reach,
                num_pages,
                TOPK,
                PAGE_SIZE,
            )
            k_places = page * k_page_stride + slot * k_slot_stride
            v_places = page * v_page_stride + slot * v_slot_stride
            k = tl.load(k_head_ptr + k_places[:, None] + dims[None, :], mask=valid[:, None], other=0)
            v = tl.load(v_head_ptr + v_places[:, None] + dims[None, :], mask=valid[:, None], other=0)
            keys = keys + (k,)
            values = values + (v,)
            in_use = in_use + (valid,)

        scores = ()
        peak = running_max
        for step in tl.static_range(STEPS):
            k = decode_tile(keys[step], k_scale, DECODER, HOISTED, ASSEMBLY, tl.float32)
            step_scores = ()
            step_peak = ()
            for member in tl.static_range(BLOCK_M):
                score = tl.where(in_use[step], tl.sum(k * queries[member][None, :], axis=1), LOWEST)
                step_scores = step_scores + (score,)
                step_peak = step_peak + (tl.maximum(peak[member], score),)
            scores = scores + (step_scores,)
            peak = step_peak

        # decay by a factor of exactly one is skipped: after the first tiles of a row a new maximum is rare
        grown = tl.zeros((SPREAD,), tl.int32)
        for member in tl.static_range(BLOCK_M):
            grown |= (peak[member] > running_max[member]).to(tl.int32)
        if uniform(tl.max(grown, axis=0), ASSEMBLY) != 0:
            decayed_normaliser = ()
            decayed_accumulator = ()
            for member in tl.static_range(BLOCK_M):
                decay = tl.math.exp2(running_max[member] - peak[member])
                decayed_normaliser = decayed_normaliser + (normaliser[member] * decay,)
                decayed_accumulator = decayed_accumulator + (accumulator[member] * decay[:, None],)
            normaliser = decayed_normaliser
            accumulator = decayed_accumulator
        running_max = peak

        for step in tl.static_range(STEPS):
            v = decode_tile(values[step], v_scale, DECODER, HOISTED, ASSEMBLY, tl.float32)
            next_normaliser = ()
            next_accumulator = ()
            for member in tl.static_range(BLOCK_M):
                weight = tl.math.exp2(scores[step][member] - running_max[member])
                next_normaliser = next_normaliser + (normaliser[member] + weight,)
                next_accumulator = next_accumulator + (accumulator[member] + weight[:, None] * v,)
            normaliser = next_normaliser
            accumulator = next_accumulator

    for member in tl.static_range(BLOCK_M):
        highest = tl.max(running_max[member], axis=0)
        share = tl.math.exp2(running_max[member] - highest)
        total = tl.sum(normaliser[member] * share, axis=0)
        summed = tl.sum(accumulator[member] * share[:, None], axis=0)
        one = tl.arange(0, 1)
        store_result(
            out_ptr,
            lse_ptr,
            partial_out_ptr,
            partial_lse_ptr,
            (summed * inverse(total))[None, :],
            log_sum_exp(highest, total) + tl.zeros((1,), tl.float32),
            v_scale,
            kv_head * GROUP + first_member + member + one,
            dims,
            first_member + member + one < GROUP,
            row,
            split,
            num_rows,
            num_q_heads,
            out_row_stride,
            out_head_stride,
            HEAD_DIM,
            SPLIT,
            DECODER,
            HOISTED,
        )

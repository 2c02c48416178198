"""From listed tokens to places in the paged cache."""

import triton
import triton.language as tl

# Fewest steps of the scan that keep its registers below those of the attention loop.
SCAN_COLUMNS = tl.constexpr(512)


@triton.jit
def uniform(value, ASSEMBLY: tl.constexpr):
    """A value that all threads share, in a form that the assembler knows to be shared.

    Without this, ptxas for sm_70 takes a loop bounded by the result of a reduction for a divergent one and calls a
    function for every shuffle in it.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return value


@triton.jit
def count_tiles_in_use(
    indices_ptr, split, num_splits, TOPK: tl.constexpr, BLOCK_N: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """How many of this split's tiles, up to its last listed token, hold work.

    Tile `i` of a split starts at column `(split + i * num_splits) * BLOCK_N`, so that padding at the end of a row
    shortens every split alike.
    """
    NUM_TILES: tl.constexpr = (TOPK + BLOCK_N - 1) // BLOCK_N
    STEP: tl.constexpr = SCAN_COLUMNS // BLOCK_N if SCAN_COLUMNS > BLOCK_N else 1
    own_tiles = (NUM_TILES - split + num_splits - 1) // num_splits
    in_use = own_tiles
    # a single tile is not worth a look: entries without weight load nothing
    if own_tiles > 1:
        steps = tl.arange(0, STEP)
        lanes = tl.arange(0, BLOCK_N)
        last = tl.zeros((STEP, BLOCK_N), tl.int32)
        for start in range(0, own_tiles, STEP):
            tiles = start + steps
            columns = (split + tiles * num_splits)[:, None] * BLOCK_N + lanes[None, :]
            logical = tl.load(indices_ptr + columns, mask=columns < TOPK, other=-1)
            last = tl.where(logical >= 0, tiles[:, None] + 1, last)
        in_use = uniform(tl.max(tl.max(last, axis=0), axis=0), ASSEMBLY)
    return in_use


@triton.jit
def locate_tokens(
    indices_ptr,
    block_table_ptr,
    columns,
    pages_per_request,
    num_pages,
    TOPK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Physical page (int64), slot and validity of the tokens listed in some columns of a row."""
    logical = tl.load(indices_ptr + columns, mask=columns < TOPK, other=-1)
    token = tl.maximum(logical, 0).to(tl.uint32)
    page_of_request = (token // PAGE_SIZE).to(tl.int32)
    valid = (logical >= 0) & (page_of_request < pages_per_request)
    page = tl.load(block_table_ptr + page_of_request, mask=valid, other=-1)
    valid = valid & (page >= 0) & (page < num_pages)
    return tl.where(valid, page, 0).to(tl.int64), (token % PAGE_SIZE).to(tl.int64), valid

"""Launch profiles: named tables of tile width, split count and warps, and the choice among them.

The choice depends on the device's compute capability and on shapes alone, never on the data, so that a captured graph
stays valid when indices change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qsa_kernels.hardware import ASYNC_COPY_CAPABILITY, Capability

MAX_SPLITS = 256
HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_GROUP = 16
# Two codes to a word leave half as many words as dims, and tl.dot reduces over at least 16.
SMALLEST_TRANSPOSED = 32

_KIB = 1024
# Shared memory that one block may use. Source: CUDA C++ Programming Guide, technical specifications per compute
# capability.
SHARED_MEMORY_BYTES: dict[Capability, int] = {
    (7, 0): 96 * _KIB,
    (7, 2): 96 * _KIB,
    (7, 5): 64 * _KIB,
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (12, 0): 99 * _KIB,
    (12, 1): 99 * _KIB,
}
# What every capability offers, for one that the table does not know.
_SHARED_MEMORY_FLOOR_BYTES = 48 * _KIB


@dataclass(frozen=True)
class LaunchConfig:
    """How one call is launched.

    Args:
        block_n (int): tokens a tile.
        num_splits (int): parts into which a row's tiles are dealt.
        num_warps (int): warps a program of the attention kernel.
        num_stages (int): software pipelining depth; without effect below compute capability 8.0.
        transposed (bool): both products of the dot contraction transposed, tokens as rows and heads as columns, and
            codes read two to a word; for head_dim >= 32.
    """

    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int = 2
    transposed: bool = False


@dataclass(frozen=True)
class Tier:
    """One line of a profile.

    Args:
        max_programs (int | None): programs before splitting (rows * kv_heads) that it is for; None = any number.
        block_n (int): tokens a tile.
        target_splits (int): most splits.
        num_warps (int): warps a program.
        num_stages (int): software pipelining depth.
        max_programs_wide (int | None): `max_programs` for a group of more than eight heads, where it differs.
        only_for (tuple[int, int] | None): the one (group, head_dim) that it is for; None = any.
    """

    max_programs: int | None
    block_n: int
    target_splits: int
    num_warps: int
    num_stages: int = 2
    max_programs_wide: int | None = None
    only_for: tuple[int, int] | None = None

    def takes(self, programs: int, group: int, head_dim: int) -> bool:
        if self.only_for not in (None, (group, head_dim)):
            return False
        most = self.max_programs_wide if group > 8 and self.max_programs_wide else self.max_programs
        return most is None or programs <= most


@dataclass(frozen=True)
class LaunchProfile:
    """A named table.

    Args:
        name (str): the name that `launch_profile` takes.
        contraction (str): the contraction it was made for.
        tiers (tuple[Tier, ...]): by number of programs, ascending.
        quantised_tiers (tuple[Tier, ...]): for an E4M3 cache; empty = as `tiers`.
        source (str): where the numbers come from.
        even_splits (bool): deal the tiles of a row as evenly as the target allows; a public table takes the largest
            power of two that leaves every split a tile.
        transposed (bool): as for `LaunchConfig`, where the head is long enough.
    """

    name: str
    contraction: str
    tiers: tuple[Tier, ...]
    source: str
    quantised_tiers: tuple[Tier, ...] = ()
    even_splits: bool = False
    transposed: bool = False

    def tier(self, programs: int, *, group: int, head_dim: int, quantised: bool) -> Tier:
        for tier in (quantised and self.quantised_tiers) or self.tiers:
            if tier.takes(programs, group, head_dim):
                return tier
        raise AssertionError(f"profile {self.name} has no tier for {programs} programs")


_SMALLEST = Tier(8, 16, 64, 4, max_programs_wide=4)

PROFILES: dict[str, LaunchProfile] = {
    profile.name: profile
    for profile in (
        LaunchProfile(
            "generic",
            "dot",
            (_SMALLEST, Tier(31, 16, 32, 4), Tier(256, 64, 8, 2), Tier(512, 64, 4, 2), Tier(None, 64, 1, 2)),
            "1CatAI/1Cat-vLLM vllm/models/qwen4_exp/nvidia/ops/qsa.py@07391c6, generic column",
        ),
        LaunchProfile(
            "sm70_public",
            "dot",
            (
                Tier(1, 16, 64, 2, only_for=(6, 256)),
                _SMALLEST,
                Tier(31, 16, 32, 4),
                Tier(256, 64, 8, 4),
                Tier(511, 64, 4, 4),
                Tier(512, 32, 4, 4),
                Tier(None, 32, 1, 4),
            ),
            "1CatAI/1Cat-vLLM vllm/models/qwen4_exp/nvidia/ops/qsa.py@07391c6, SM70 override",
        ),
        LaunchProfile(
            "pre_ampere",
            "dot",
            (_SMALLEST, Tier(31, 16, 32, 4), Tier(256, 16, 8, 4), Tier(512, 16, 4, 4), Tier(None, 16, 1, 4)),
            "1Cat-vLLM#469: 16 columns and four warps; split counts of the generic column",
        ),
        LaunchProfile(
            "sm90_public",
            "dot",
            (Tier(32, 64, 64, 2), Tier(64, 32, 16, 1), Tier(256, 32, 8, 1), Tier(2048, 32, 4, 1), Tier(None, 32, 1, 1)),
            "vllm-project/vllm#57273, tuned on H20; above 256 programs the BF16 column follows the FP8 one",
            quantised_tiers=(
                Tier(24, 64, 64, 2),
                Tier(32, 32, 16, 1),
                Tier(64, 32, 8, 1),
                Tier(128, 32, 4, 1),
                Tier(256, 32, 8, 1),
                Tier(2048, 32, 4, 1),
                Tier(None, 32, 1, 1),
            ),
        ),
        LaunchProfile(
            "sm90",
            "dot",
            (
                Tier(8, 64, 33, 2),
                Tier(16, 32, 33, 1),
                Tier(24, 32, 22, 1),
                Tier(32, 32, 17, 1),
                Tier(64, 32, 11, 1),
                Tier(96, 32, 5, 1),
                Tier(192, 32, 4, 1),
                Tier(384, 32, 2, 1),
                Tier(None, 32, 1, 1),
            ),
            "this project: transposed products, about 500 programs; from the search of the recorded H200 run, and "
            "between its rows from one exploratory search",
            quantised_tiers=(
                Tier(8, 64, 33, 2),
                Tier(16, 32, 33, 1),
                Tier(24, 32, 22, 1),
                Tier(32, 32, 17, 1),
                Tier(48, 32, 11, 1),
                Tier(64, 32, 13, 1),
                Tier(96, 64, 5, 2),
                Tier(128, 64, 4, 2),
                Tier(256, 64, 2, 2),
                Tier(1024, 64, 1, 2),
                Tier(None, 32, 1, 1),
            ),
            even_splits=True,
            transposed=True,
        ),
        LaunchProfile(
            "vector",
            "vector",
            (
                Tier(8, 8, 128, 1),
                Tier(16, 8, 64, 1),
                Tier(32, 8, 32, 1),
                Tier(64, 8, 16, 1),
                Tier(128, 8, 8, 1),
                Tier(256, 8, 4, 1),
                Tier(1024, 8, 2, 1),
                Tier(None, 8, 1, 1),
            ),
            "this project: one warp, eight tokens, about 1,024 programs; from the search of the recorded H200 run",
        ),
    )
}


def choose(
    profile: str | LaunchConfig | None,
    *,
    capability: Capability | None,
    rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    topk: int,
    itemsize: int,
    quantised: bool,
    contraction: str,
    num_splits: int | None = None,
) -> LaunchConfig:
    """The launch of one call.

    Args:
        profile (str | LaunchConfig | None): a name in `PROFILES`, a launch of the caller's own, or None for the table
            of the capability.
        capability (tuple[int, int] | None): compute capability; None for the interpreter, which has no limits.
        rows (int): query rows.
        q_heads (int): query heads.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head.
        topk (int): entries a row.
        itemsize (int): bytes of an operand of the contraction.
        quantised (bool): whether the cache holds E4M3 codes.
        contraction (str): "dot" or "vector".
        num_splits (int | None): overrides the split count.

    Raises:
        ValueError: an unknown profile, one of another contraction, a size out of range, or a caller's own tile that
            does not fit the shared memory of the capability (with the needed and the available bytes).
    """

    def overflow(block_n: int, num_stages: int, transposed: bool) -> str | None:
        """Why a tile does not fit, or None."""
        if capability is None or contraction != "dot":
            return None
        limit = SHARED_MEMORY_BYTES.get(capability, _SHARED_MEMORY_FLOOR_BYTES)
        needed = shared_memory_bytes(
            block_n,
            num_stages,
            capability=capability,
            group=q_heads // kv_heads,
            head_dim=head_dim,
            itemsize=itemsize,
            quantised=quantised,
            transposed=transposed,
        )
        if needed <= limit:
            return None
        return (
            f"a tile of {block_n} tokens at head_dim {head_dim} and {num_stages} stage(s) needs {needed} bytes of "
            f"shared memory, compute capability {capability[0]}.{capability[1]} has {limit}"
        )

    if isinstance(profile, LaunchConfig):
        config = profile
        _check_config(config, contraction, head_dim)
    else:
        name = _default_profile(capability, contraction) if profile is None else profile
        if name not in PROFILES:
            raise ValueError(f"launch_profile: expected one of {sorted(PROFILES)} or a LaunchConfig, got {profile!r}")
        if PROFILES[name].contraction != contraction:
            raise ValueError(
                f"launch_profile: {name!r} is made for contraction={PROFILES[name].contraction!r}, got {contraction!r}"
            )
        tier = PROFILES[name].tier(rows * kv_heads, group=q_heads // kv_heads, head_dim=head_dim, quantised=quantised)
        block_n = tier.block_n
        transposed = PROFILES[name].transposed and head_dim >= SMALLEST_TRANSPOSED
        while block_n > 16 and overflow(block_n, tier.num_stages, transposed):
            block_n //= 2
        tiles = max(1, -(-topk // block_n))
        if PROFILES[name].even_splits:
            splits = even_split_count(tiles, tier.target_splits)
        else:
            splits = min(tier.target_splits, 1 << (tiles.bit_length() - 1))
        config = LaunchConfig(block_n, splits, tier.num_warps, tier.num_stages, transposed)
    if num_splits is not None:
        if not isinstance(num_splits, int) or isinstance(num_splits, bool) or not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits: expected an integer from 1 to {MAX_SPLITS}, got {num_splits!r}")
        config = replace(config, num_splits=num_splits)
    problem = overflow(config.block_n, config.num_stages, config.transposed)
    if problem:
        raise ValueError(f"launch_profile: {problem}")
    return config


def even_split_count(tiles: int, target: int) -> int:
    """The split count, at most the target and `MAX_SPLITS`, whose longest split is shortest with fewest splits."""
    longest = -(-tiles // max(1, min(target, tiles, MAX_SPLITS)))
    return -(-tiles // longest)


def padded_group(group: int, *, transposed: bool) -> int:
    """Heads in a tile of `tl.dot`: the group size, padded to a power of two and, transposed, to eight columns."""
    padded = 1 << (group - 1).bit_length()
    return max(padded, 8) if transposed else padded


def heads_per_program(group: int, *, quantised: bool) -> int:
    """Query heads that one program of the vector contraction keeps in registers.

    A thread holds, per head, its share of q and of the partial outputs: as many FP32 registers each as it loads
    elements of a row, 16 codes or 8 halves. Six quantised heads fill the 255 registers of a thread; a larger group is
    dealt evenly to several programs.
    """
    most = 6 if quantised else 12
    return -(-group // -(-group // most))


def tokens_spread(config: LaunchConfig, head_dim: int, cache_itemsize: int) -> int:
    """Tokens of a tile that lie in different threads when every thread loads 16 bytes of a row."""
    elements = min(16 // cache_itemsize, max(1, config.block_n * head_dim // (32 * config.num_warps)))
    return min(config.block_n, max(1, config.num_warps * 32 * elements // head_dim))


def shared_memory_bytes(
    block_n: int,
    num_stages: int,
    *,
    capability: Capability,
    group: int,
    head_dim: int,
    itemsize: int,
    quantised: bool,
    transposed: bool = False,
) -> int:
    """Shared memory that the dot contraction takes.

    Below 8.0 the operands of K and V pass through it once, in the type of q, and the query tile in FP32. From 8.0 on
    asynchronous copies put K and V there as they are stored, `num_stages - 1` tiles ahead.

    Source:
        `metadata.shared` of Triton 3.6.0 for sm_70, sm_80 and sm_90, up to the index buffers of a few hundred bytes.
    """
    tile = 2 * block_n * head_dim
    if capability < ASYNC_COPY_CAPABILITY:
        return tile * itemsize + padded_group(group, transposed=transposed) * head_dim * 4
    query = padded_group(group, transposed=transposed) * head_dim * itemsize
    return tile * (1 if quantised else itemsize) * max(1, num_stages - 1) + query


def _default_profile(capability: Capability | None, contraction: str) -> str:
    if contraction == "vector":
        return "vector"
    if capability is None or (8, 0) <= capability < (9, 0):
        return "generic"
    return "pre_ampere" if capability < (8, 0) else "sm90"


def _check_config(config: LaunchConfig, contraction: str, head_dim: int) -> None:
    def is_power_of_two(value: object, low: int, high: int) -> bool:
        return isinstance(value, int) and low <= value <= high and value & (value - 1) == 0

    narrowest = 16 if contraction == "dot" else 1  # tl.dot reduces over at least 16 tokens
    if not is_power_of_two(config.block_n, narrowest, 256):
        raise ValueError(
            f"launch_profile.block_n: expected a power of two from {narrowest} to 256 for contraction={contraction!r}, "
            f"got {config.block_n!r}"
        )
    if not is_power_of_two(config.num_warps, 1, 16):
        raise ValueError(f"launch_profile.num_warps: expected a power of two from 1 to 16, got {config.num_warps!r}")
    if not isinstance(config.num_splits, int) or not 1 <= config.num_splits <= MAX_SPLITS:
        raise ValueError(
            f"launch_profile.num_splits: expected an integer from 1 to {MAX_SPLITS}, got {config.num_splits!r}"
        )
    if not isinstance(config.num_stages, int) or not 1 <= config.num_stages <= 8:
        raise ValueError(f"launch_profile.num_stages: expected an integer from 1 to 8, got {config.num_stages!r}")
    if config.transposed and (contraction != "dot" or head_dim < SMALLEST_TRANSPOSED):
        raise ValueError(
            f"launch_profile.transposed: expected contraction='dot' and head_dim >= {SMALLEST_TRANSPOSED}, "
            f"got {contraction!r} and {head_dim}"
        )

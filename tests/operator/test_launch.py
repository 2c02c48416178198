"""The choice of a launch: public tables entry by entry, limits, and that nothing but capability and shape counts."""

from typing import Any

import pytest

from qsa_kernels import launch
from qsa_kernels.attention import resolve_options
from qsa_kernels.launch import LaunchConfig, choose

LONGEST = 1 << 14  # entries a row, so that no table's split count is capped by the number of tiles


def chosen(profile: str | LaunchConfig | None = None, **changes: Any) -> LaunchConfig:
    """The launch of the public model's shape, on no particular device."""
    arguments: dict[str, Any] = {
        "capability": None,
        "rows": 1,
        "q_heads": 6,
        "kv_heads": 1,
        "head_dim": 256,
        "topk": LONGEST,
        "itemsize": 2,
        "quantised": False,
        "contraction": "dot",
    }
    return choose(profile, **(arguments | changes))


def table(profile: str, **changes: Any) -> tuple[int, int, int]:
    config = chosen(profile, **changes)
    return config.block_n, config.num_splits, config.num_warps


class TestPublicTables:
    @pytest.mark.parametrize(
        ("programs", "expected"),
        [
            *[(n, (16, 64, 4)) for n in (1, 8)],
            *[(n, (16, 32, 4)) for n in (9, 31)],
            *[(n, (64, 8, 2)) for n in (32, 256)],
            *[(n, (64, 4, 2)) for n in (257, 512)],
            *[(n, (64, 1, 2)) for n in (513, 8192)],
        ],
        ids=str,
    )
    def test_generic(self, programs: int, expected: tuple[int, int, int]) -> None:
        assert table("generic", rows=programs) == expected

    @pytest.mark.parametrize(
        ("programs", "expected"),
        [
            (1, (16, 64, 2)),
            *[(n, (16, 64, 4)) for n in (2, 8)],
            *[(n, (16, 32, 4)) for n in (9, 31)],
            *[(n, (64, 8, 4)) for n in (32, 256)],
            *[(n, (64, 4, 4)) for n in (257, 511)],
            (512, (32, 4, 4)),
            *[(n, (32, 1, 4)) for n in (513, 8192)],
        ],
        ids=str,
    )
    def test_sm70_override(self, programs: int, expected: tuple[int, int, int]) -> None:
        assert table("sm70_public", rows=programs) == expected

    @pytest.mark.parametrize(("q_heads", "head_dim"), [(5, 256), (6, 128), (12, 256)], ids=str)
    def test_sm70_takes_two_warps_for_one_row_of_the_exact_shape_only(self, q_heads: int, head_dim: int) -> None:
        assert table("sm70_public", q_heads=q_heads, head_dim=head_dim) == (16, 64, 4)

    @pytest.mark.parametrize("profile", ["generic", "sm70_public", "pre_ampere"])
    @pytest.mark.parametrize(("programs", "splits"), [(4, 64), (5, 32)], ids=str)
    def test_a_wide_group_leaves_the_smallest_tier_at_four_programs(
        self, profile: str, programs: int, splits: int
    ) -> None:
        assert table(profile, rows=programs, q_heads=12) == (16, splits, 4)
        assert table(profile, rows=programs, q_heads=8) == (16, 64, 4)

    @pytest.mark.parametrize(
        ("programs", "quantised", "expected"),
        [
            *[(n, True, (64, 64, 2)) for n in (1, 24)],
            *[(n, True, (32, 16, 1)) for n in (25, 32)],
            *[(n, True, (32, 8, 1)) for n in (33, 64)],
            *[(n, True, (32, 4, 1)) for n in (65, 128)],
            *[(n, True, (32, 8, 1)) for n in (129, 256)],
            *[(n, True, (32, 4, 1)) for n in (257, 2048)],
            (2049, True, (32, 1, 1)),
            *[(n, False, (64, 64, 2)) for n in (1, 32)],
            *[(n, False, (32, 16, 1)) for n in (33, 64)],
            *[(n, False, (32, 8, 1)) for n in (65, 256)],
            *[(n, False, (32, 4, 1)) for n in (257, 2048)],
            (2049, False, (32, 1, 1)),
        ],
        ids=str,
    )
    def test_sm90(self, programs: int, quantised: bool, expected: tuple[int, int, int]) -> None:
        assert table("sm90_public", rows=programs, quantised=quantised) == expected

    @pytest.mark.parametrize(
        ("programs", "expected"),
        [(8, (16, 64, 4)), (31, (16, 32, 4)), (256, (16, 8, 4)), (512, (16, 4, 4)), (513, (16, 1, 4))],
        ids=str,
    )
    def test_pre_ampere(self, programs: int, expected: tuple[int, int, int]) -> None:
        assert table("pre_ampere", rows=programs) == expected

    def test_kv_heads_count_as_programs(self) -> None:
        assert table("generic", rows=16, q_heads=12, kv_heads=2) == (64, 8, 2)

    @pytest.mark.parametrize(
        ("topk", "splits"), [(0, 1), (1, 1), (16, 1), (17, 2), (47, 2), (49, 4), (2051, 64)], ids=str
    )
    def test_splits_are_the_largest_power_of_two_within_the_tiles(self, topk: int, splits: int) -> None:
        assert table("generic", topk=topk) == (16, splits, 4)


class TestChoiceByCapability:
    @pytest.mark.parametrize(
        ("capability", "contraction", "profile"),
        [
            (None, "dot", "generic"),
            ((7, 0), "dot", "pre_ampere"),
            ((7, 5), "dot", "pre_ampere"),
            ((8, 0), "dot", "generic"),
            ((8, 9), "dot", "generic"),
            ((9, 0), "dot", "sm90"),
            ((12, 0), "dot", "sm90"),
            (None, "vector", "vector"),
            ((7, 0), "vector", "vector"),
            ((9, 0), "vector", "vector"),
        ],
        ids=str,
    )
    def test_default_profile(self, capability: tuple[int, int] | None, contraction: str, profile: str) -> None:
        for rows in (1, 100, 5000):
            shape: dict[str, Any] = {"rows": rows, "head_dim": 64, "contraction": contraction, "quantised": True}
            assert chosen(capability=capability, **shape) == chosen(profile, **shape)

    @pytest.mark.parametrize(
        ("capability", "expected"),
        [
            (None, ("packed", "dot")),
            ((7, 0), ("packed", "vector")),
            ((7, 5), ("packed", "vector")),
            ((8, 0), ("packed", "dot")),
            ((8, 6), ("packed", "dot")),
            ((8, 9), ("native", "dot")),
            ((9, 0), ("native", "dot")),
            ((12, 0), ("native", "dot")),
        ],
        ids=str,
    )
    def test_auto(self, capability: tuple[int, int] | None, expected: tuple[str, str]) -> None:
        options = {"kv_cache_dtype": "fp8_e4m3", "scale_placement": "hoisted"}
        assert resolve_options(capability, decoder="auto", contraction="auto", **options) == expected
        unquantised = options | {"kv_cache_dtype": "auto"}
        assert resolve_options(capability, decoder="auto", contraction="auto", **unquantised) == ("none", expected[1])

    @pytest.mark.parametrize("capability", [None, (7, 0), (9, 0)], ids=str)
    def test_auto_before_hoisting_is_bitcast_through_the_dot(self, capability: tuple[int, int] | None) -> None:
        options = {"kv_cache_dtype": "fp8_e4m3", "scale_placement": "in_loop", "decoder": "auto", "contraction": "auto"}
        assert resolve_options(capability, **options) == ("bitcast", "dot")

    @pytest.mark.parametrize("capability", [(7, 0), (9, 0)], ids=str)
    def test_auto_decoder_within_the_vector_contraction_is_packed(self, capability: tuple[int, int]) -> None:
        options = {"kv_cache_dtype": "fp8_e4m3", "scale_placement": "hoisted", "decoder": "auto"}
        assert resolve_options(capability, contraction="vector", **options) == ("packed", "vector")


class TestOwnTable:
    @pytest.mark.parametrize(
        ("rows", "quantised", "expected"),
        [
            *[(8, True, (64, 33, 2)), (16, True, (32, 33, 1)), (24, True, (32, 22, 1)), (32, True, (32, 17, 1))],
            *[(128, True, (64, 4, 2)), (256, True, (64, 2, 2)), (512, True, (64, 1, 2)), (2048, True, (32, 1, 1))],
            *[(8, False, (64, 33, 2)), (16, False, (32, 33, 1)), (24, False, (32, 22, 1)), (32, False, (32, 17, 1))],
            *[(128, False, (32, 4, 1)), (256, False, (32, 2, 1)), (512, False, (32, 1, 1)), (2048, False, (32, 1, 1))],
        ],
        ids=str,
    )
    def test_sm90_deals_the_tiles_of_the_public_width_evenly(
        self, rows: int, quantised: bool, expected: tuple[int, int, int]
    ) -> None:
        assert table("sm90", rows=rows, quantised=quantised, topk=2051) == expected
        assert chosen("sm90", rows=rows, quantised=quantised).transposed

    def test_a_head_of_sixteen_is_not_transposed(self) -> None:
        assert not chosen("sm90", head_dim=16).transposed
        assert chosen("sm90", head_dim=32).transposed


class TestEvenSplits:
    @pytest.mark.parametrize(
        ("tiles", "target", "splits"),
        # 65 tiles in at most 64 splits: one would take two, so 33 do
        [(65, 64, 33), (65, 65, 65), (65, 20, 17), (33, 5, 5), (33, 4, 4), (1, 64, 1), (7, 4, 4), (1000, 256, 250)],
        ids=str,
    )
    def test_fewest_splits_with_the_shortest_longest_split(self, tiles: int, target: int, splits: int) -> None:
        assert launch.even_split_count(tiles, target) == splits


class TestSharedMemory:
    def test_sm75_shrinks_a_64_column_tile_to_32(self) -> None:
        # K 32 + V 32 + q 8 KiB exceed the 64 KiB of Turing, and fit the 96 KiB of Volta
        assert table("generic", capability=(7, 5), rows=8192) == (32, 1, 2)
        assert table("generic", capability=(7, 0), rows=8192) == (64, 1, 2)

    @pytest.mark.parametrize("q_heads", [6, 12])
    def test_a_forced_tile_that_does_not_fit_is_refused_with_both_numbers(self, q_heads: int) -> None:
        needed = {6: 72, 12: 80}[q_heads] * 1024
        message = rf"launch_profile: a tile of 64 tokens .* needs {needed} bytes .* 7\.5 has 65536"
        with pytest.raises(ValueError, match=message):
            chosen(LaunchConfig(64, 1, 4), capability=(7, 5), q_heads=q_heads)
        assert chosen(LaunchConfig(32, 1, 4), capability=(7, 5), q_heads=q_heads).block_n == 32
        assert chosen(LaunchConfig(64, 1, 4), capability=(7, 0), q_heads=q_heads).block_n == 64

    def test_stages_count_where_copies_are_asynchronous(self) -> None:
        config = LaunchConfig(64, 1, 4, num_stages=4)
        assert chosen(config, capability=(7, 0)) == config
        # three tiles of K and V in flight, and q
        with pytest.raises(ValueError, match=rf"4 stage\(s\) needs {(8 + 2 * 64 * 3) * 512} bytes .* 8\.0 has 166912"):
            chosen(config, capability=(8, 0))

    def test_codes_take_half_the_room_of_halves(self) -> None:
        config = LaunchConfig(64, 1, 4, num_stages=4)
        assert chosen(config, capability=(8, 0), quantised=True) == config

    @pytest.mark.parametrize("capability", [*launch.SHARED_MEMORY_BYTES, (7, 3), (13, 0)], ids=str)
    @pytest.mark.parametrize("profile", [name for name, p in launch.PROFILES.items() if p.contraction == "dot"])
    def test_every_table_fits_every_capability(self, profile: str, capability: tuple[int, int]) -> None:
        limit = launch.SHARED_MEMORY_BYTES.get(capability, 48 * 1024)
        for rows in (1, 20, 100, 300, 512, 1000, 5000):
            for q_heads in (1, 6, 16):
                config = chosen(profile, capability=capability, rows=rows, q_heads=q_heads)
                tiles = max(1, config.num_stages - 1) if capability >= (8, 0) else 1
                padded = max(1 << (q_heads - 1).bit_length(), 8 if config.transposed else 1)
                q_tile = 256 * padded * (2 if capability >= (8, 0) else 4)
                assert q_tile + 2 * config.block_n * tiles * 256 * 2 <= limit


class TestRefusals:
    def test_unknown_profile_is_named_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"launch_profile: expected one of \[.*'generic'.*got 'sm70'"):
            chosen("sm70")

    @pytest.mark.parametrize(("profile", "contraction"), [("generic", "vector"), ("vector", "dot")])
    def test_profile_of_another_contraction(self, profile: str, contraction: str) -> None:
        with pytest.raises(ValueError, match=rf"launch_profile: '{profile}' is made for .*got '{contraction}'"):
            chosen(profile, contraction=contraction)

    @pytest.mark.parametrize("splits", [0, -1, 257, 2.0, True, "4"], ids=repr)
    def test_num_splits_out_of_range(self, splits: Any) -> None:
        with pytest.raises(ValueError, match=rf"num_splits: expected an integer from 1 to 256, got {splits!r}"):
            chosen(num_splits=splits)

    @pytest.mark.parametrize("splits", [1, 3, 33, 256])
    def test_num_splits_overrides_the_table(self, splits: int) -> None:
        assert chosen(num_splits=splits, topk=5).num_splits == splits

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            (LaunchConfig(48, 1, 4), "block_n"),
            (LaunchConfig(8, 1, 4), "block_n"),
            (LaunchConfig(512, 1, 4), "block_n"),
            (LaunchConfig(16, 0, 4), "num_splits"),
            (LaunchConfig(16, 257, 4), "num_splits"),
            (LaunchConfig(16, 1, 3), "num_warps"),
            (LaunchConfig(16, 1, 32), "num_warps"),
            (LaunchConfig(16, 1, 4, num_stages=0), "num_stages"),
        ],
        ids=str,
    )
    def test_a_launch_of_ones_own_is_checked_field_by_field(self, config: LaunchConfig, field: str) -> None:
        with pytest.raises(ValueError, match=rf"launch_profile\.{field}: expected .*got {getattr(config, field)}"):
            chosen(config)

    @pytest.mark.parametrize(("contraction", "head_dim"), [("dot", 16), ("vector", 256)])
    def test_transposed_products_need_the_dot_and_words_enough(self, contraction: str, head_dim: int) -> None:
        config = LaunchConfig(32, 1, 1, transposed=True)
        message = rf"launch_profile\.transposed: expected contraction='dot' and head_dim >= 32, got '{contraction}' and"
        with pytest.raises(ValueError, match=message):
            chosen(config, contraction=contraction, head_dim=head_dim)
        assert chosen(config, head_dim=32) == config

    def test_eight_columns_are_for_the_vector_contraction(self) -> None:
        assert chosen(LaunchConfig(8, 1, 1), contraction="vector").block_n == 8

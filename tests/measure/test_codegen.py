"""What the compiler makes of the arms: bounds, determinism, and one machine code for the unquantised cache."""

import pytest

from qsa_kernels.arms import ARMS
from qsa_kernels.measure import codegen, sass
from qsa_kernels.measure.codegen import KernelRequest
from qsa_kernels.measure.source_parts import KERNELS, Frame, part_of

FOUR_WARPS = [
    KernelRequest(arm) for arm in ("fp16", "in_loop/exp2", "hoisted/exp2", "in_loop/bitcast", "hoisted/bitcast")
]
PACKED = [
    KernelRequest("hoisted/packed"),
    KernelRequest("hoisted/packed", num_warps=2),
    KernelRequest("fp16", num_warps=2),
]
VECTOR = [KernelRequest(arm, block_n=8, num_warps=1) for arm in ("fp16+vector", "hoisted/packed+vector")]


TENSOR = {
    (arm, transposed): KernelRequest(arm, "sm_90", block_n=32, num_warps=1, transposed=transposed)
    for arm in ("fp16", "hoisted/packed", "hoisted/native")
    for transposed in (False, True)
}
UNSPLIT = KernelRequest("hoisted/native", "sm_90", block_n=32, num_warps=1, num_splits=1, transposed=True)
IDENTITIES = [
    pytest.param("sm_70", "dot", False, id="dot"),
    pytest.param("sm_70", "vector", False, id="vector"),
    pytest.param("sm_90", "dot", True, id="dot-transposed"),
]

WRONG = KernelRequest("fp16", head_dim=255)


@pytest.fixture(scope="module", autouse=True)
def one_worker():
    """Compile everything that the tests ask for at once; they find it in the cache."""
    codegen.compile_kernels([*FOUR_WARPS, *PACKED, *VECTOR, *TENSOR.values(), UNSPLIT, *codegen.identity_requests()])


@pytest.fixture(scope="module")
def kernels(one_worker):
    found = codegen.compile_kernels([*FOUR_WARPS, *PACKED, *VECTOR])
    assert [(kernel.request.arm, kernel.reason) for kernel in found if kernel.status != "passed"] == []
    return {(kernel.request.arm, kernel.request.num_warps): kernel for kernel in found}


@pytest.fixture(scope="module")
def tensor(one_worker):
    found = codegen.compile_kernels(TENSOR.values())
    assert [(kernel.request.arm, kernel.reason) for kernel in found if kernel.status != "passed"] == []
    return dict(zip(TENSOR, found, strict=True))


@pytest.fixture(scope="module")
def compiled_anew():
    return codegen.compile_kernels([WRONG, PACKED[0]], cached=False)


def loop(kernels, arm, warps=4):
    return len(kernels[arm, warps].loop.instructions)


# Bounds around what Triton 3.6.0 gives: warp instructions in the loop for sm_70, 16 columns and four warps.
@pytest.mark.parametrize(
    ("arm", "low", "high"),
    [
        ("fp16", 1000, 1250),
        ("in_loop/exp2", 2200, 2700),
        ("hoisted/exp2", 2100, 2600),
        ("in_loop/bitcast", 1950, 2400),
        ("hoisted/bitcast", 1900, 2300),
        ("hoisted/packed", 1000, 1250),
    ],
)
def test_loop_instructions_stay_inside_their_bounds(kernels, arm, low, high):
    assert low <= loop(kernels, arm) <= high


@pytest.mark.parametrize("warps", [4, 2])
def test_packed_costs_no_more_instructions_than_no_quantisation(kernels, warps):
    assert loop(kernels, "hoisted/packed", warps) <= loop(kernels, "fp16", warps)


def test_each_public_change_shortens_the_loop(kernels):
    assert loop(kernels, "hoisted/exp2") < loop(kernels, "in_loop/exp2")
    assert loop(kernels, "hoisted/bitcast") < loop(kernels, "in_loop/bitcast") < loop(kernels, "in_loop/exp2")


def test_all_dot_arms_load_the_same_operands_from_shared_memory(kernels):
    loads = {
        request.arm: sass.count(kernels[request.arm, 4].loop.instructions)["shared_load_128"]
        for request in [*FOUR_WARPS, PACKED[0]]
    }
    assert set(loads.values()) == {161}


def test_operand_loads_conflict_in_the_banks(kernels):
    table = codegen.shared_access_table([kernels["fp16", 4]]).set_index("class")
    wide = table.loc["shared_load_128"]
    assert wide["accesses_unknown"] == 0
    assert wide["wavefronts"] > 3 * wide["wavefronts_without_conflicts"]


@pytest.mark.parametrize("arm", ["fp16+vector", "hoisted/packed+vector"])
def test_vector_loop_needs_no_barrier_and_no_operand_from_shared_memory(kernels, arm):
    counts = sass.count(kernels[arm, 1].loop.instructions)
    assert not [name for name in counts if name.startswith(("barrier", "shared_"))]
    assert counts["shuffle"] >= 5 * 6  # a butterfly over a warp for each head


# Two products of 32 tokens, 256 dims and six heads, padded to sixteen rows or to eight columns; tiles of 16 x 8 x 16.
@pytest.mark.parametrize(("transposed", "padded_heads"), [(False, 16), (True, 8)], ids=["heads-as-rows", "transposed"])
@pytest.mark.parametrize("arm", ["fp16", "hoisted/packed", "hoisted/native"])
def test_tensor_core_instructions_follow_from_the_padding_of_heads(tensor, arm, transposed, padded_heads):
    counts = sass.count(tensor[arm, transposed].loop.instructions)
    assert counts["tensor_core"] == 2 * 32 * 256 * padded_heads // (16 * 8 * 16)


@pytest.mark.parametrize(
    ("arm", "most"), [("fp16", 0.75), ("hoisted/packed", 0.68), ("hoisted/native", 0.65)], ids=lambda value: str(value)
)
def test_transposing_shortens_the_loop(tensor, arm, most):
    upright, turned = (len(tensor[arm, transposed].loop.instructions) for transposed in (False, True))
    assert turned <= most * upright


@pytest.mark.parametrize("arm", ["hoisted/packed", "hoisted/native"])
def test_transposed_codes_cross_shared_memory_two_at_a_time(tensor, arm):
    upright, turned = (sass.count(tensor[arm, transposed].loop.instructions) for transposed in (False, True))
    assert upright["shared_load_8"] >= 32 * 256 // 32  # every code of V by itself
    assert turned["shared_load_8"] <= 4  # the mask of valid tokens
    assert turned["shared_load_8"] == sass.count(tensor["fp16", True].loop.instructions)["shared_load_8"]


@pytest.mark.parametrize("arm", ["hoisted/packed", "hoisted/native"])
def test_transposed_e4m3_does_not_spill(tensor, arm):
    kernel = tensor[arm, True]
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes) == (0, 0)
    assert kernel.registers <= 255


def test_parts_of_tensor_core_loops(tensor):
    for kernel in tensor.values():
        parts = codegen.part_table([kernel]).set_index("part")["instructions"]
        assert parts.sum() == len(kernel.loop.instructions)
        assert parts["unattributed"] <= 0.01 * parts.sum()
    found = codegen.part_table([tensor["hoisted/native", True]]).set_index("part")["instructions"]
    # 16,384 codes: a conversion for two and a permute for four of them, a warp at a time
    assert found["decode"] == pytest.approx(16384 / 2 / 32 + 16384 / 4 / 32, abs=8)
    # 64 products and the eight reads of q from shared memory
    assert found["contraction"] == pytest.approx(64 + 8, abs=8)


def launches_dependents(kernel):
    opcodes = {one.opcode.split(".")[0] for one in kernel.program.instructions}
    assert ("PREEXIT" in opcodes) == ("griddepcontrol" in kernel.ptx)
    return "PREEXIT" in opcodes


def test_only_split_kernels_for_sm_90_let_the_merge_start_early(kernels, tensor):
    assert not any(launches_dependents(kernel) for kernel in kernels.values())
    assert all(launches_dependents(kernel) for kernel in tensor.values())
    assert not launches_dependents(codegen.compile_kernels([UNSPLIT])[0])


def test_in_loop_scaling_multiplies_every_element_once(kernels):
    parts = codegen.part_table([kernels["in_loop/bitcast", 4], kernels["hoisted/bitcast", 4]])
    scaling = parts[parts["part"] == "scaling"].set_index("arm")["per_element"]
    assert scaling["in_loop/bitcast"] == pytest.approx(1.0, abs=0.05)
    assert scaling["hoisted/bitcast"] < 0.05


def test_parts_and_classes_cover_the_whole_loop(kernels):
    for kernel in kernels.values():
        parts = codegen.part_table([kernel]).set_index("part")["instructions"]
        classes = codegen.class_table([kernel])
        size = len(kernel.loop.instructions)
        assert parts.sum() == size
        assert classes.loc[classes["scope"] == "loop", "instructions"].sum() == size
        assert parts["unattributed"] <= 0.02 * size
        assert (parts["decode"] > 0) or kernel.request.arm == "fp16"


def test_what_is_decoded_is_counted_as_decode(kernels):
    parts = codegen.part_table([kernels["fp16", 4], kernels["hoisted/packed", 4], kernels["hoisted/bitcast", 4]])
    decode = parts[parts["part"] == "decode"].set_index("arm")["per_element"]
    assert decode["fp16"] == 0
    assert 1.5 < decode["hoisted/packed"] < 3.5  # nine integer instructions for four codes
    assert decode["hoisted/bitcast"] > 4 * decode["hoisted/packed"]


def test_one_tile_a_pass(kernels):
    assert {kernel.tiles for kernel in kernels.values()} == {1}


def test_two_compilations_are_equal_and_the_machine_code_is_tritons_own(kernels, compiled_anew):
    again = compiled_anew[1]
    assert again == kernels["hoisted/packed", 4]
    assert again.code_sha256 == kernels["hoisted/packed", 4].code_sha256


@pytest.mark.parametrize(("arch", "contraction", "transposed"), IDENTITIES)
def test_unquantised_machine_code_is_the_same_whatever_the_e4m3_options(arch, contraction, transposed):
    hashes = codegen.fp16_code_hashes(arch, contraction, transposed=transposed)
    assert len(hashes) == len(codegen.SCALE_PLACEMENTS) * len(codegen.DECODERS)
    assert len(set(hashes.values())) == 1


def test_hash_tells_different_kernels_apart(kernels):
    assert len({kernel.code_sha256 for kernel in kernels.values()}) == len(kernels)
    assert len({kernel.ptx_sha256 for kernel in kernels.values()}) == len(kernels)


def test_ptx_hash_ignores_paths_and_line_tables():
    ptx = (
        '\t.file\t1 "/a/b.py"\n\t.loc\t1 3 0  // b.py:3:0\n$L__tmp0:\n'
        "\tadd.s32 %r1, %r2, %r3; // x\n\t.section\t.debug_loc\t{\t}\n"
    )
    assert codegen.normalise(ptx) == codegen.normalise(
        ptx.replace("/a/b.py", "/c/d.py").replace(".loc\t1 3", ".loc\t1 9")
    )
    assert codegen.normalise(ptx) == "\tadd.s32 %r1, %r2, %r3;"


def test_annotation_numbers_chains_and_accesses():
    ptx = (
        "\t.loc\t2 191 40  // standard.py:191:40 @[ attention.py:10:29 ]\n"
        "\tadd.f32 %f1, %f2, %f3;\n"
        "\tst.shared.b32 [%r1], %r2;\n"
        "\tadd.f32 %f4, %f2, %f3;\n"
    )
    text, sites = codegen.annotate(ptx)
    assert [line.split()[2] for line in text.splitlines() if ".loc" in line] == ["1", "2", "1"]
    assert sites[1].chain == (Frame("standard.py", 191, 40), Frame("attention.py", 10, 29))
    assert sites[2].access == "st.shared.b32 [%r1], %r2;"


def test_place_in_the_kernels_decides_the_part():
    lines = (KERNELS / "decode.py").read_text().splitlines()
    scaled = next(number for number, line in enumerate(lines, 1) if "* scale)" in line)
    place = Frame("decode.py", scaled, lines[scaled - 1].index("* scale") + 2)
    assert part_of((Frame("standard.py", 1, 1), place)) == "scaling"
    assert part_of((Frame("paging.py", 20, 4),)) == "addressing"
    assert part_of((Frame("decode.py", scaled, 0),)) == "decode"
    assert part_of((Frame("decode.py", scaled, 0),), read=True) == "addressing"
    assert part_of(()) == "unattributed"


def test_helper_that_turns_a_tile_counts_for_its_caller():
    lines = (KERNELS / "attention.py").read_text().splitlines()
    place = {
        text: next(number for number, line in enumerate(lines, 1) if text in line)
        for text in ("return vector[None, :]", "k_places = page", "decayed = along_rows", "queries = query_parts")
    }
    inside = Frame("attention.py", place["return vector[None, :]"], 8)
    parts = {
        text: part_of((inside, Frame("attention.py", number, 8)))
        for text, number in place.items()
        if "return" not in text
    }
    assert parts == {
        "k_places = page": "addressing",
        "decayed = along_rows": "softmax",
        "queries = query_parts": "contraction",
    }


def test_hardware_conversion_is_skipped_where_it_does_not_exist():
    (kernel,) = codegen.compile_kernels([KernelRequest("hoisted/native", "sm_80")])
    assert kernel.status == "skipped"
    assert "8.9" in kernel.reason
    table = codegen.kernel_table([kernel])
    assert table["registers"].isna().all()


def test_kernel_that_does_not_compile_is_reported_and_takes_no_other_with_it(compiled_anew):
    assert [kernel.status for kernel in compiled_anew] == ["failed", "passed"]
    assert compiled_anew[0].reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"arm": "fp32"}, "arm: expected one of fp16, in_loop/exp2.*got 'fp32'", id="arm"),
        pytest.param(
            {"arm": "fp16", "arch": "sm_60"}, "arch: expected one of sm_70, sm_75, sm_80, sm_90; got 'sm_60'", id="arch"
        ),
        pytest.param(
            {"arm": "fp16", "assembled_for": "sm_60"}, "assembled_for: expected one of sm_70", id="assembled-for"
        ),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(fields, message):
    with pytest.raises(ValueError, match=message):
        KernelRequest(**fields)


def test_requests_follow_a_profile():
    found = codegen.requests("sm_70", profile="sm70_public", rows=2048)
    assert {(one.block_n, one.num_warps, one.num_splits, one.profile) for one in found} == {(32, 4, 1, "sm70_public")}
    assert "fp16+vector" not in {one.arm for one in found}


def test_launch_given_by_hand_goes_before_the_profile():
    (found,) = codegen.requests("sm_70", ["fp16"], profile="sm70_public", rows=2048, num_warps=2)
    assert (found.block_n, found.num_warps, found.profile) == (32, 2, "32 columns, 2 warps")


def test_transposed_is_for_the_dot_arms():
    found = codegen.requests("sm_90", transposed=True)
    assert {ARMS[one.arm].contraction for one in found} == {"dot"}
    assert {(one.transposed, one.profile) for one in found} == {(True, "32 columns, 1 warp, transposed")}
    with pytest.raises(ValueError, match=r"transposed: expected an arm of the dot contraction, got 'fp16\+vector'"):
        codegen.requests("sm_90", ["fp16+vector"], transposed=True)


def test_profile_decides_whether_products_are_transposed():
    assert {one.transposed for one in codegen.requests("sm_90", ["hoisted/native"], profile="sm90")} == {True}
    assert {one.transposed for one in codegen.requests("sm_90", ["hoisted/native"], profile="sm90_public")} == {False}


def test_survey_has_both_orientations_and_refuses_heads_too_short_for_one():
    launches = {(one.profile, one.transposed) for one in codegen.survey(head_dim=64) if one.arch == "sm_90"}
    assert launches == {
        ("32 columns, 1 warp", False),
        ("32 columns, 1 warp, transposed", True),
        ("64 columns, 2 warps, transposed", True),
    }
    with pytest.raises(ValueError, match="head_dim: expected at least 32 for transposed products, got 16"):
        codegen.survey(head_dim=16)


def test_worker_that_dies_is_reported_with_its_words(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(codegen.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the compiling process ended with code 1 at fp16 for sm_70"):
        codegen.compile_kernels([KernelRequest("fp16")])


def test_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="launch_profile: expected one of"):
        codegen.requests("sm_70", ["fp16"], profile="fastest")


def test_summary_has_plain_values(kernels):
    (row,) = codegen.summary([kernels["fp16", 4]])
    assert list(row)[1:9] == [
        *(
            "arm",
            "profile",
            "loop_instructions",
            "total_instructions",
            "registers",
            "spills",
            "shared_bytes",
            "by_class",
        )
    ]
    assert sum(row["by_class"].values()) == row["loop_instructions"] < row["total_instructions"]


def test_private_cache_where_the_shared_one_cannot_be_written(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocker / "cache"))
    folder = codegen._cache_folder()
    assert folder.is_dir()
    assert not folder.is_relative_to(tmp_path)

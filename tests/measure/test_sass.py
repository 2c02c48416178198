"""Control flow and instruction classes, on a synthetic disassembly."""

import pytest

from qsa_kernels.measure import sass

# An outer loop (0x20 to 0xc0) around an inner one (0x40 to 0x80) that reads most, a divergent exit, and the trap after
# EXIT.
NESTED = """
.text.kernel:
	//## File "sites", line 3
        /*0000*/                   MOV R1, c[0x0][0x28] ;           /* 0x00000a0000017a02 */
                                                                    /* 0x000fc40000000f00 */
        /*0010*/               @P1 BRA `(.L_x_3) ;                  /* 0x0000001000000947 */
                                                                    /* 0x000fea0003800000 */
.L_x_0:
        /*0020*/                   LDG.E.SYS R2, [R4] ;
        /*0030*/                   IADD3 R4, R4, 0x4, RZ ;
.L_x_1:
	//## File "sites", line 7
        /*0040*/                   LDG.E.128.SYS R8, [R6] ;
        /*0050*/                   FFMA R0, R8, R9, R0 ;
        /*0060*/                   HADD2.F32 R3, -RZ, R8.H0_H0 ;
        /*0070*/                   ISETP.NE.AND P0, PT, R4, R5, PT ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   BRA.DIV R7, `(.L_x_4) ;
.L_x_2:
        /*00a0*/                   SHFL.BFLY PT, R2, R0, 0x1, 0x1f ;
        /*00b0*/                   ISETP.NE.AND P2, PT, R2, RZ, PT ;
        /*00c0*/               @P2 BRA `(.L_x_0) ;
.L_x_3:
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   WARPSYNC R7 ;
        /*00f0*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*0100*/                   BRA `(.L_x_5) ;
"""


@pytest.fixture(scope="module")
def program():
    return sass.parse(NESTED)


def test_instructions_carry_guard_line_and_encoding(program):
    assert len(program.instructions) == 17
    assert (program.instructions[1].guard, program.instructions[1].site) == ("P1", 3)
    assert program.instructions[0].encoding == "00000a0000017a02000fc40000000f00"
    assert program.labels[".L_x_1"] == 0x40


def test_loops_follow_from_back_edges(program):
    outer, inner = sass.natural_loops(program)
    assert (outer.header, inner.header) == (0x20, 0x40)
    assert [one.offset for one in inner.instructions] == [0x40, 0x50, 0x60, 0x70, 0x80]
    # The divergent path leaves the text order and comes back, so it belongs to the outer loop; the trap to none.
    assert [one.offset for one in outer.instructions] == [*range(0x20, 0xD0, 0x10), 0xE0, 0xF0]
    assert [one.offset for one in outer.own] == [0x20, 0x30, 0x90, 0xA0, 0xB0, 0xC0, 0xE0, 0xF0]


def test_hot_loop_is_the_one_that_reads_most_by_itself(program):
    assert sass.hot_loop(program).header == 0x40


def test_unreachable_block_is_no_loop(program):
    assert all(loop.header != 0x100 for loop in sass.natural_loops(program))


def test_loop_is_found_whatever_the_order_of_blocks_in_the_text():
    moved = """
        /*0000*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0010*/                   LDG.E R0, [R2] ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/                   EXIT ;
.L_x_1:
        /*0040*/                   MOV R2, R3 ;
.L_x_2:
        /*0050*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0060*/                   BRA `(.L_x_0) ;
"""
    assert [one.offset for one in sass.hot_loop(sass.parse(moved)).instructions] == [0x10, 0x20, 0x50, 0x60]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("FFMA.FTZ R0, R1, R2, R3", "fp32", id="fp32"),
        pytest.param("FSETP.GEU.AND P0, PT, R1, RZ, PT", "fp32_compare", id="fp32-compare"),
        pytest.param("HADD2.F32 R0, -RZ, R1.H0_H0", "conversion", id="half-to-float"),
        pytest.param("HADD2 R0, R1, R2", "fp16", id="half-add"),
        pytest.param("F2FP.F16.E4M3.UNPACK_B R0, R1", "conversion", id="hardware-e4m3"),
        pytest.param("IMAD.MOV.U32 R1, RZ, RZ, R2", "move", id="move-on-the-fma-unit"),
        pytest.param("IMAD.WIDE.U32 R2, R1, 0x4, R6", "integer", id="address"),
        pytest.param("LOP3.LUT R0, R1, 0x7f, RZ, 0xc0, !PT", "integer", id="logic"),
        pytest.param("PRMT R0, R1, 0x5410, R2", "integer", id="byte-permute"),
        pytest.param("MUFU.EX2 R0, R1", "mufu", id="exp2"),
        pytest.param("LDG.E.U8.SYS R0, [R2]", "global_load_8", id="byte-load"),
        pytest.param("LDG.E.64 R0, [R2.64]", "global_load_64", id="64-bit-load"),
        pytest.param("LDGSTS.E.BYPASS.128 [R1], [R2.64]", "global_to_shared_128", id="asynchronous-copy"),
        pytest.param("LDS.U.128 R0, [R2+0x10]", "shared_load_128", id="shared-load"),
        pytest.param("LDSM.16.MT88.4 R0, [R2]", "shared_load_128", id="matrix-load"),
        pytest.param("STSM.16.M88.4 [R2], R4", "shared_store_128", id="matrix-store"),
        pytest.param("STS [R2], R0", "shared_store_32", id="shared-store"),
        pytest.param("STL.64 [R1], R2", "local", id="spill"),
        pytest.param("SHFL.BFLY PT, R0, R1, 0x10, 0x1f", "shuffle", id="shuffle"),
        pytest.param("BAR.SYNC 0x0", "barrier", id="barrier"),
        pytest.param("PREEXIT", "barrier", id="dependent-launch"),
        pytest.param("HMMA.16816.F32 R0, R4, R8, R0", "tensor_core", id="tensor-core"),
        pytest.param("ULDC.64 UR4, c[0x0][0x118]", "constant_load", id="constant"),
        pytest.param("UIADD3 UR4, UR4, 0x1, URZ", "uniform", id="uniform"),
        pytest.param("FROBNICATE R0", "other", id="unknown"),
    ],
)
def test_class(text, expected):
    instruction = sass.parse(f"        /*0000*/                   {text} ;").instructions[0]
    assert sass.classify(instruction) == expected


def test_counts_add_up_to_the_number_of_instructions(program):
    assert sum(sass.count(program.instructions).values()) == len(program.instructions)


def test_indirect_branch_is_refused():
    with pytest.raises(ValueError, match="expected a label as target, got BRX R2"):
        sass.natural_loops(sass.parse("        /*0000*/                   BRX R2 -0x10 ;"))


def test_text_without_instructions_is_refused():
    with pytest.raises(ValueError, match="expected nvdisasm output"):
        sass.parse("nothing here")


def test_kernel_without_a_reading_loop_is_refused():
    text = "        /*0000*/                   LDG.E R0, [R2] ;\n        /*0010*/                   EXIT ;\n"
    with pytest.raises(ValueError, match="expected a loop that reads global memory"):
        sass.hot_loop(sass.parse(text))

"""Cycles of each unit, worked out by hand for a small loop, and what binds the real arms."""

import dataclasses

import pandas as pd
import pytest

from qsa_kernels.measure import codegen, roofline, sass
from qsa_kernels.measure.codegen import CompiledKernel, KernelRequest

# A loop of twelve instructions over one tile: 4 tokens, head_dim 32, FP16.
DISASSEMBLY = """
        /*0000*/                   MOV R1, RZ ;
.L_x_0:
        /*0010*/                   LDG.E.128.SYS R4, [R2] ;
        /*0020*/                   HADD2.F32 R8, -RZ, R4.H0_H0 ;
        /*0030*/                   STS.128 [R9], R4 ;
        /*0040*/                   LDS.U.128 R12, [R9] ;
        /*0050*/                   FFMA R0, R12, R8, R0 ;
        /*0060*/                   FFMA R0, R13, R8, R0 ;
        /*0070*/                   IMAD.WIDE.U32 R2, R10, 0x4, R2 ;
        /*0080*/                   LOP3.LUT R3, R3, 0x7f, RZ, 0xc0, !PT ;
        /*0090*/                   MUFU.EX2 R11, R0 ;
        /*00a0*/                   SHFL.BFLY PT, R2, R0, 0x1, 0x1f ;
        /*00b0*/                   ISETP.NE.AND P0, PT, R4, R5, PT ;
        /*00c0*/               @P0 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
.L_x_1:
"""


def kernel(**fields):
    request = KernelRequest("fp16", block_n=4, num_warps=1, num_splits=2, head_dim=32, topk=10, **fields)
    return CompiledKernel(request, disassembly=DISASSEMBLY, registers=100, shared_bytes=20000)


def test_cycles_by_hand_on_volta():
    cycles = roofline.pipe_cycles(kernel(), "V100-SXM2")
    assert cycles == pytest.approx(
        {
            "issue": 12 / 4,
            "fma": 3 * 32 / 64,  # two FFMA and one IMAD
            "alu": 2 * 32 / 64,  # LOP3 and ISETP
            "fp16": 32 / 64,  # the widening HADD2
            "xu": 32 / 16,
            "tensor": 0,
            "shared_memory": 4 + 4 + 4 + 1,  # load and store of 128 bits, the global load, a shuffle
            "global_memory": 4 * (2 * 32 * 2 + 4) / (900 / 1.53 / 80),
        }
    )


def test_half_precision_shares_the_fma_unit_on_hopper():
    cycles = roofline.pipe_cycles(kernel(), "H200")
    assert cycles["fp16"] == 0
    assert cycles["fma"] == pytest.approx(4 * 32 / 128)


def test_bound_is_the_slowest_unit_over_all_tiles():
    table = roofline.bound_table([kernel()], "V100-SXM2", rows=400)
    (row,) = table.to_dict("records")
    slowest = 4 * (2 * 32 * 2 + 4) / (900 / 1.53 / 80)
    assert row["binding_pipe"] == "global_memory"
    assert row["bound_cycles_per_tile"] == pytest.approx(slowest)
    # 3 tiles of 4 tokens a row, 400 rows, 80 multiprocessors, 1,530 cycles a microsecond
    assert row["bound_us"] == pytest.approx(slowest * 3 * 400 / 80 / 1530)


def test_small_grid_does_not_use_more_multiprocessors_than_it_has_blocks():
    (row,) = roofline.bound_table([kernel()], "V100-SXM2", rows=1).to_dict("records")
    slowest = 4 * (2 * 32 * 2 + 4) / (900 / 1.53 / 80)
    assert row["bound_us"] == pytest.approx(slowest * 1.5 / 1530)


def test_measured_time_turns_back_into_cycles():
    time_us = roofline.microseconds(123.0, kernel(), "H200", rows=2048)
    assert roofline.cycles_per_tile(time_us, kernel(), "H200", rows=2048) == pytest.approx(123.0)


def test_measured_cells_meet_the_kernel_of_their_tile():
    cell = {"arm": "fp16", "code_path": "sm_70", "block_n": 4.0, "num_warps": 1.0, "num_splits": 1.0}
    cell |= {"num_stages": 2.0, "transposed": 0.0, "cache_state": "cold", "status": "passed"}
    cells = pd.DataFrame(
        [
            {**cell, "workload": "decode", "time_us": 50.0},
            {**cell, "workload": "decode", "time_us": 40.0, "num_splits": 2.0},
            {**cell, "workload": "decode", "time_us": 1.0, "num_warps": 4.0},
            {**cell, "workload": "decode", "time_us": 2.0, "cache_state": "hot"},
            {**cell, "workload": "decode", "time_us": 3.0, "code_path": "device"},
            {**cell, "workload": "decode", "time_us": float("nan"), "status": "failed"},
            {**cell, "workload": "prefill", "time_us": 4.0},
            {**cell, "workload": "short", "time_us": 5.0},
            {**cell, "workload": "other-heads", "time_us": 6.0},
            {**cell, "workload": "decode", "time_us": 7.0, "transposed": 1.0},
            {**cell, "workload": "decode", "time_us": 30.0, "code_path": "device", "transposed": 1.0},
            {
                **cell,
                "workload": "decode",
                "time_us": 20.0,
                "code_path": "device",
                "transposed": 1.0,
                "num_stages": 3.0,
            },
        ]
    )
    workloads = pd.DataFrame(
        {
            "workload": ["decode", "prefill", "short", "other-heads"],
            "kind": ["decode", "prefill", "decode", "decode"],
            "rows": 264,
            "context": [64, 64, 8, 64],
            "topk": 10,
            "q_heads": [6, 6, 6, 12],
            "kv_heads": 1,
            "head_dim": 32,
            "dtype": "float16",
        }
    )
    (row,) = roofline.measured_table([kernel()], cells, workloads, "H200", rows=264).to_dict("records")
    assert row["time_us"] == 40.0
    # 264 rows of 3 tiles over 132 multiprocessors, 1,980 cycles a microsecond, 4 tokens a tile
    assert row["cycles_per_token"] == pytest.approx(40 * 1980 / (3 * 2) / 4)
    nothing = roofline.measured_table([kernel()], cells, workloads, "H200", rows=8)
    assert len(nothing) == 0
    assert nothing.dtypes.drop(["status", "reason"]).equals(
        roofline.measured_table([kernel()], cells, workloads, "H200", rows=264).dtypes.drop(["status", "reason"])
    )
    own = kernel(arch="sm_90", transposed=True)
    (row,) = roofline.measured_table([own], cells, workloads, "H200", rows=264).to_dict("records")
    assert row["time_us"] == 30.0
    earlier = cells[cells["transposed"] == 0].drop(columns="transposed")  # a run from before there was a choice
    (row,) = roofline.measured_table([kernel()], earlier, workloads, "H200", rows=264).to_dict("records")
    assert row["time_us"] == 40.0
    assert roofline.measured_table([own], earlier, workloads, "H200", rows=264).empty


def test_measured_time_over_the_unit_that_binds():
    labels = {"arch": "sm_90", "arm": "fp16"}
    pipes = pd.DataFrame(
        [
            {**labels, "profile": "narrow", "pipe": "issue", "cycles_per_token": 3.0},
            {**labels, "profile": "narrow", "pipe": "fma", "cycles_per_token": 7.0},
            {**labels, "profile": "wide", "pipe": "issue", "cycles_per_token": 5.0},
        ]
    )
    measured = pd.DataFrame([{**labels, "profile": "narrow", "cycles_per_token": 10.5}])
    assert roofline.over_bound(measured, pipes).to_dict() == {("sm_90", "fp16", "narrow"): 1.5}


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "expected"),
    [
        pytest.param(32, 0, 1, (32, "blocks"), id="blocks"),
        pytest.param(32, 0, 4, (16, "warps"), id="warps"),
        pytest.param(161, 0, 4, (3, "registers"), id="registers-in-units-of-256"),
        pytest.param(64, 24576, 4, (4, "shared memory"), id="shared-memory"),
        pytest.param(64, 100000, 4, (0, "shared memory"), id="does-not-fit"),
    ],
)
def test_occupancy_on_volta(registers, shared_bytes, warps, expected):
    request = KernelRequest("fp16", num_warps=warps)
    found = CompiledKernel(request, disassembly=DISASSEMBLY, registers=registers, shared_bytes=shared_bytes)
    assert roofline.blocks_per_sm(found, "V100-SXM2") == expected


def test_block_that_does_not_fit_is_no_bound():
    request = KernelRequest("fp16", block_n=4, num_warps=1, head_dim=32)
    large = CompiledKernel(request, disassembly=DISASSEMBLY, registers=64, shared_bytes=120_000)
    (row,) = roofline.bound_table([large], "V100-SXM2", rows=8).to_dict("records")
    assert row["status"] == "failed"
    assert "does not fit" in row["reason"]


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [("HMMA.16816.F32", 2048), ("HMMA.884.F32.F32.STEP0", 256), ("HGMMA.64x16x16.F32", 4096)],
)
def test_multiply_adds_of_tensor_instructions(opcode, expected):
    assert roofline.multiply_adds(sass.Instruction(0, "", opcode, "R0, R4, R8, R0")) == expected


def test_tensor_instruction_without_shape_is_refused():
    with pytest.raises(ValueError, match="expected a shape in the opcode, got HMMA"):
        roofline.multiply_adds(sass.Instruction(0, "", "HMMA", "R0"))


def test_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="device: expected one of V100-SXM2, H200; got 'A100'"):
        roofline.pipe_cycles(kernel(), "A100")


def test_every_constant_has_a_source():
    table = roofline.constants_table()
    assert (table["source"].str.len() > 0).all()
    assert not table.duplicated(["device", "constant"]).any()
    assert set(table["device"]) == set(roofline.DEVICES)


@pytest.fixture(scope="module")
def arms():
    dot = [KernelRequest(arm) for arm in ("fp16", "hoisted/packed", "hoisted/bitcast")]
    vector = [KernelRequest(arm, block_n=8, num_warps=1) for arm in ("fp16+vector", "hoisted/packed+vector")]
    found = codegen.compile_kernels([*dot, *vector])
    return {one.request.arm: one for one in found}


@pytest.mark.parametrize("arm", ["fp16", "hoisted/packed", "hoisted/bitcast"])
def test_dot_below_tensor_cores_is_bound_by_shared_memory(arms, arm):
    (row,) = roofline.bound_table([arms[arm]], "V100-SXM2", rows=2048).to_dict("records")
    assert row["binding_pipe"] == "shared_memory"


def test_halved_bytes_change_what_does_not_bind(arms):
    plain, packed = (roofline.pipe_cycles(arms[arm], "V100-SXM2") for arm in ("fp16", "hoisted/packed"))
    assert packed["global_memory"] < 0.51 * plain["global_memory"]
    assert packed["shared_memory"] >= plain["shared_memory"] > 4 * plain["global_memory"]


def test_vector_frees_the_shared_memory_unit(arms):
    per_token = {
        arm: roofline.pipe_cycles(arms[arm], "V100-SXM2")["shared_memory"] / arms[arm].request.block_n for arm in arms
    }
    assert per_token["hoisted/packed+vector"] < per_token["hoisted/packed"] / 10
    assert per_token["fp16+vector"] < per_token["fp16"] / 8


# One rough run on an H200 (sm_70 code path, 2,048 rows, four warps); the model is a lower bound of it.
@pytest.mark.parametrize(
    ("arm", "measured_us"), [("fp16", 10_666), ("hoisted/bitcast", 11_523), ("hoisted/packed", 11_304)]
)
def test_bound_stays_below_the_measured_time_and_explains_most_of_it(arms, arm, measured_us):
    (row,) = roofline.bound_table([arms[arm]], "H200", rows=2048).to_dict("records")
    assert 0.85 < row["bound_us"] / measured_us < 1.0


@pytest.fixture(scope="module")
def on_tensor_cores():
    request = KernelRequest("hoisted/native", "sm_90", block_n=32, num_warps=1)
    turned = dataclasses.replace(request, transposed=True, profile="")
    return dict(zip(("upright", "turned"), codegen.compile_kernels([request, turned]), strict=True))


def test_matrix_loads_of_a_transposed_tile_move_codes_and_query_once_without_conflicts(on_tensor_cores):
    kernel = on_tensor_cores["turned"]
    reads = [kernel.wavefronts(one) for one in kernel.loop.instructions if one.opcode.startswith("LDSM")]
    codes, query = 2 * 32 * 256, 8 * 256 * 2
    assert sum(reads) == (codes + query) / 128


def test_transposing_lowers_every_unit_but_memory(on_tensor_cores):
    upright, turned = (roofline.pipe_cycles(on_tensor_cores[name], "H200") for name in ("upright", "turned"))
    assert (upright["tensor"], turned["tensor"]) == (128, 64)  # one cycle an instruction of 2,048 multiply-adds
    assert turned["global_memory"] == upright["global_memory"]
    for pipe in ("issue", "fma", "shared_memory"):
        assert turned[pipe] < 0.7 * upright[pipe]


def test_device_memory_binds_on_hopper(on_tensor_cores):
    table = roofline.bound_table(list(on_tensor_cores.values()), "H200", rows=128)
    assert set(table["binding_pipe"]) == {"global_memory"}

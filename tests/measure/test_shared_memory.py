"""Bank conflicts of addresses that are known by construction, and the addresses of a small PTX text."""

import numpy as np
import pytest

from qsa_kernels.measure import shared_memory

LANE = np.arange(32)


@pytest.mark.parametrize(
    ("addresses", "bits", "expected"),
    [
        pytest.param(LANE * 4, 32, 1, id="consecutive-words"),
        pytest.param(LANE * 0, 32, 1, id="one-word-for-all"),
        pytest.param(LANE * 12, 32, 1, id="odd-stride"),
        pytest.param(LANE * 8, 32, 2, id="two-way"),
        pytest.param(LANE * 128, 32, 32, id="one-bank"),
        pytest.param(LANE * 8, 64, 2, id="64-bit-consecutive"),
        pytest.param(LANE * 16, 128, 4, id="128-bit-consecutive"),
        pytest.param(LANE * 1024, 128, 32, id="128-bit-one-bank-group"),
        pytest.param(LANE % 16 * 1024, 128, 32, id="128-bit-one-bank-group-twice"),
        pytest.param(LANE // 2 * 16, 128, 2, id="128-bit-equal-pairs"),
        pytest.param(LANE * 0, 128, 2, id="128-bit-one-address"),
    ],
)
def test_wavefronts(addresses, bits, expected):
    assert shared_memory.wavefronts(addresses, bits) == expected


def test_wavefronts_are_the_mean_over_warps():
    assert shared_memory.wavefronts(np.concatenate([LANE * 4, LANE * 128]), 32) == 16.5


@pytest.mark.parametrize(
    ("addresses", "bits", "message"),
    [
        pytest.param(LANE[:20] * 4, 32, "multiple of 32 threads, got 20", id="part-of-a-warp"),
        pytest.param(LANE * 4, 24, "got 24", id="width"),
    ],
)
def test_wavefronts_refuse(addresses, bits, message):
    with pytest.raises(ValueError, match=message):
        shared_memory.wavefronts(addresses, bits)


PTX = """
	mov.u32 	%r1, %tid.x;
	and.b32 	%r2, %r1, 15;
	shl.b32 	%r3, %r2, 10;
	mov.b32 	%r4, global_smem;
	add.s32 	%r5, %r4, %r3;
	mov.b32 	%r6, 0;
	add.s32 	%r6, %r6, 4096;
	add.s32 	%r7, %r5, %r6;
	ld.global.b32 	%r8, [%rd1];
	add.s32 	%r9, %r5, %r8;
	setp.lt.u32 	%p1, %r1, 16;
	selp.b32 	%r10, 64, 128, %p1;
"""


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        pytest.param("ld.shared.v4.b32 {%r20}, [%r5+48];", np.arange(64) % 16 * 1024 + 48, id="affine"),
        pytest.param(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21}, [%r5+48];",
            np.arange(64) % 16 * 1024 + 48,
            id="matrix-load",
        ),
        pytest.param("st.shared.b32 [%r7], %r20;", np.arange(64) % 16 * 1024, id="uniform-loop-variable"),
        pytest.param("st.shared.b32 [%r10], %r20;", np.where(np.arange(64) < 16, 64, 128), id="select"),
    ],
)
def test_addresses(access, expected):
    assert shared_memory.ACCESS.match(access)
    np.testing.assert_array_equal(shared_memory.ThreadValues(PTX, 64).addresses(access), expected)


def test_address_that_depends_on_data_is_unknown():
    assert shared_memory.ThreadValues(PTX, 64).addresses("ld.shared.b32 %r20, [%r9];") is None

"""Wrong arguments of the operator: one clear error each, before anything is launched or written."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import attention_calls as calls
import pytest
import torch

from qsa_kernels import hardware, launch
from qsa_kernels.arms import ARMS
from qsa_kernels.attention import prepare, resolve_options, sparse_paged_attention

ROUTE = calls.Route(ARMS["hoisted/packed"])


@pytest.fixture
def arguments(device: str) -> dict[str, Any]:
    """A right call of one row on an E4M3 cache."""
    cache = calls.codes(0x38, head_dim=calls.PUBLIC_HEAD_DIM)
    inputs = calls.make(ROUTE, cache, cache, [[0, 1]], device, k_scale=0.0123, v_scale=0.0371, group=calls.PUBLIC_HEADS)
    return inputs.arguments()


def refuse(arguments: dict[str, Any], error: type[Exception], message: str, **changes: Any) -> None:
    """The call is refused, with the message, and leaves its output alone."""
    out = torch.full_like(arguments["q"], 7.0)
    given = {"out": out} | arguments | changes
    with pytest.raises(error, match=message):
        sparse_paged_attention(**given)
    assert (out == 7.0).all()


TENSORS = ("q", "k_cache", "v_cache", "logical_indices", "block_table", "token_to_req")


class TestTypes:
    @pytest.mark.parametrize("name", TENSORS)
    def test_not_a_tensor(self, name: str, arguments: dict[str, Any]) -> None:
        refuse(arguments, TypeError, rf"{name}: expected a torch\.Tensor \[.*got list", **{name: [1]})

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8], ids=str)
    def test_queries(self, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
        message = rf"q: expected torch\.float16 or torch\.bfloat16, got {dtype}"
        refuse(arguments, TypeError, message, q=arguments["q"].to(dtype))

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    @pytest.mark.parametrize(
        "dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2, torch.int8, torch.float16], ids=lambda d: str(d)[6:]
    )
    def test_codes_of_another_format(self, name: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
        codes = arguments[name]
        other = codes.half() if dtype == torch.float16 else codes.view(dtype)
        message = rf"{name}: expected .*torch\.uint8.*torch\.float8_e4m3fn, got {dtype}"
        refuse(arguments, TypeError, message, **{name: other})

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
    def test_unquantised_cache_of_another_type_than_q(self, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
        caches = {"k_cache": arguments["k_cache"].half(), "v_cache": arguments["v_cache"].to(dtype)}
        unscaled = {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
        message = rf"v_cache: expected the dtype of q \(torch\.float16\).*got {dtype}"
        refuse(arguments, TypeError, message, **caches, **unscaled)

    @pytest.mark.parametrize("name", ["logical_indices", "block_table", "token_to_req"])
    def test_indices_are_int32(self, name: str, arguments: dict[str, Any]) -> None:
        message = f"{name}: expected torch.int32, got torch.int64"
        refuse(arguments, TypeError, message, **{name: arguments[name].long()})

    def test_out(self, arguments: dict[str, Any]) -> None:
        message = r"out: expected the dtype of q \(torch\.float16\), got torch\.float32"
        refuse(arguments, TypeError, message, out=arguments["q"].float())


class TestShapes:
    @pytest.mark.parametrize("name", TENSORS)
    def test_rank(self, name: str, arguments: dict[str, Any]) -> None:
        refuse(arguments, ValueError, rf"{name}: expected \[.*\], got shape", **{name: arguments[name][None]})

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("k_cache", lambda t: t[..., :128]),
            ("v_cache", lambda t: t[:3]),
            ("v_cache", lambda t: t[:, :8]),
            ("logical_indices", lambda t: t.repeat(2, 1)),
            ("token_to_req", lambda t: t.repeat(2)),
        ],
        ids=["head-dim", "pages", "page-size", "rows-of-indices", "rows-of-requests"],
    )
    def test_axes_that_disagree(
        self, name: str, change: Callable[[torch.Tensor], torch.Tensor], arguments: dict[str, Any]
    ) -> None:
        wrong = change(arguments[name])
        got = ", ".join(map(str, wrong.shape))
        refuse(arguments, ValueError, rf"{name}: expected \[.*to agree with q .*got \[{got}\]", **{name: wrong})

    def test_out_of_another_shape(self, arguments: dict[str, Any]) -> None:
        wrong = arguments["q"].new_zeros(1, 5, 256)
        refuse(arguments, ValueError, r"out: expected .*\[1, 6, 256\].*got \[1, 5, 256\]", out=wrong)

    @pytest.mark.parametrize("head_dim", [8, 80, 96, 512])
    def test_unsupported_head_dim(self, head_dim: int, arguments: dict[str, Any]) -> None:
        changes = {
            "q": arguments["q"].new_zeros(1, 6, head_dim),
            "k_cache": arguments["k_cache"].new_zeros(4, 16, 1, head_dim),
            "v_cache": arguments["v_cache"].new_zeros(4, 16, 1, head_dim),
            "out": None,
        }
        message = rf"q: expected head_dim to be one of \[16, 32, 64, 128, 256\], got {head_dim}"
        refuse(arguments, ValueError, message, **changes)

    @pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 4), (17, 1), (1, 2), (6, 0)], ids=str)
    def test_heads_that_form_no_groups(self, q_heads: int, kv_heads: int, arguments: dict[str, Any]) -> None:
        changes = {
            "q": arguments["q"].new_zeros(1, q_heads, 256),
            "k_cache": arguments["k_cache"].new_zeros(4, 16, kv_heads, 256),
            "v_cache": arguments["v_cache"].new_zeros(4, 16, kv_heads, 256),
            "out": None,
        }
        message = f"q: expected q_heads to be 1 to 16 times kv_heads, got {q_heads} query and {kv_heads} KV heads"
        refuse(arguments, ValueError, message, **changes)

    def test_pages_without_slots(self, arguments: dict[str, Any]) -> None:
        empty = {name: arguments[name][:, :0] for name in ("k_cache", "v_cache")}
        refuse(arguments, ValueError, "k_cache: expected a page_size of at least 1", **empty)

    @pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "logical_indices", "block_table", "out"])
    def test_elements_that_are_not_contiguous(self, name: str, arguments: dict[str, Any]) -> None:
        given = arguments.get(name, arguments["q"])
        strided = torch.stack([given, given], dim=-1)[..., 0]
        message = f"{name}: expected contiguous elements along the last axis, got strides"
        refuse(arguments, ValueError, message, **{name: strided})

    def test_out_is_not_q(self, arguments: dict[str, Any]) -> None:
        refuse(arguments, ValueError, "out: expected memory of its own", out=arguments["q"])


class TestDevices:
    @pytest.mark.parametrize("name", ["k_cache", "block_table"])
    def test_tensors_on_different_devices(self, name: str, arguments: dict[str, Any]) -> None:
        message = rf"{name}: expected the device of q \({arguments['q'].device}\), got meta"
        refuse(arguments, ValueError, message, **{name: arguments[name].to("meta")})

    @pytest.mark.gpu
    def test_a_device_tensor_as_scale_would_synchronise(self, arguments: dict[str, Any]) -> None:
        message = r"v_scale: .*host tensor, got one on cuda:0; reading it would synchronise"
        refuse(arguments, TypeError, message, v_scale=torch.tensor(0.5, device="cuda"))

    def test_another_kind_of_device(self, arguments: dict[str, Any]) -> None:
        meta = {name: arguments[name].to("meta") for name in TENSORS}
        with pytest.raises(ValueError, match=r"q: expected a tensor on a CUDA device or on the CPU .*got meta"):
            sparse_paged_attention(**arguments | meta)

    def test_interpreter_asked_for_after_triton_was_imported(self) -> None:
        script = (
            "import os, torch, qsa_kernels.attention as operator\n"
            "os.environ['TRITON_INTERPRET'] = '1'\n"
            "index = torch.zeros(1, 1, dtype=torch.int32)\n"
            "cache = torch.zeros(1, 16, 1, 16, dtype=torch.float16)\n"
            "operator.sparse_paged_attention(cache[0, :1].clone(), cache, cache, index, index, index[0])\n"
        )
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            "ValueError: q: tensors on the CPU need Triton's interpreter; set TRITON_INTERPRET=1 before triton is "
            "first imported"
        )


class TestHardware:
    """What `check_device` refuses, for capabilities and builds that are not here."""

    BUILD = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")

    @pytest.fixture(autouse=True)
    def build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(self.BUILD))

    @pytest.mark.parametrize("capability", [(7, 0), (7, 2), (7, 5)], ids=str)
    def test_bf16_below_ampere(self, capability: tuple[int, int]) -> None:
        name = f"{capability[0]}.{capability[1]}"
        with pytest.raises(
            ValueError, match=rf"^q: bfloat16 needs compute capability 8\.0 .* has {name}; use float16$"
        ):
            hardware.check_device(capability, torch.bfloat16)
        hardware.check_device(capability, torch.float16)

    def test_a_build_without_sm_70(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_120"])
        message = r"^q: this torch build has no code for compute capability 7\.0 \(it has sm_75, sm_80, .*\); .*$"
        with pytest.raises(ValueError, match=message) as refused:
            hardware.check_device((7, 0), torch.float16)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize(
        ("capability", "runs"),
        [((7, 0), True), ((7, 2), True), ((8, 9), True), ((6, 1), False), ((12, 1), True), ((13, 0), True)],
        ids=str,
    )
    def test_machine_code_runs_within_its_major_and_ptx_on_what_is_newer(
        self, capability: tuple[int, int], runs: bool
    ) -> None:
        if runs:
            hardware.check_device(capability, torch.float16)
        else:
            with pytest.raises(ValueError, match="no code for compute capability"):
                hardware.check_device(capability, torch.float16)

    def test_the_interpreter_and_a_cpu_build_have_no_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hardware.check_device(None, torch.bfloat16)
        monkeypatch.setattr(torch.cuda, "get_arch_list", list)
        hardware.check_device((7, 0), torch.float16)

    def test_bf16_through_the_interpreters_dot(self, arguments: dict[str, Any]) -> None:
        """It would give numbers near 1e9 without an error."""
        with pytest.raises(ValueError, match=r"^q: Triton's interpreter multiplies bfloat16 wrongly in tl\.dot"):
            hardware.check_product(None, torch.bfloat16, "dot")
        hardware.check_product(None, torch.bfloat16, "vector")
        hardware.check_product(None, torch.float16, "dot")
        hardware.check_product((9, 0), torch.bfloat16, "dot")
        if arguments["q"].device.type == "cpu":
            changes = {"q": arguments["q"].bfloat16(), "out": None}
            refuse(arguments, ValueError, "bfloat16 wrongly in tl.dot", **changes)

    @pytest.mark.parametrize("capability", [None, (7, 0), (7, 5), (8, 0), (8, 6)], ids=str)
    def test_native_conversion_below_8_9(self, capability: tuple[int, int] | None) -> None:
        here = "the interpreter" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        with pytest.raises(
            ValueError, match=f"^decoder: 'native' needs compute capability 8.9 or higher, this is {here}$"
        ):
            resolve_options(
                capability, kv_cache_dtype="fp8_e4m3", scale_placement="hoisted", decoder="native", contraction="dot"
            )

    @pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0)], ids=str)
    def test_no_fp8_type_reaches_triton(self, capability: tuple[int, int], arguments: dict[str, Any]) -> None:
        caches = {name: arguments[name].view(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        for kernel in prepare(**arguments | caches, num_splits=2, capability=capability).kernels:
            types = {value.dtype for value in kernel.arguments.values() if isinstance(value, torch.Tensor)}
            assert types <= {torch.float16, torch.float32, torch.uint8, torch.int32}
            assert kernel.constants["DECODER"] == "packed"


class TestOptions:
    @pytest.mark.parametrize("name", ["kv_cache_dtype", "scale_placement", "decoder", "contraction"])
    def test_unknown_words(self, name: str, arguments: dict[str, Any]) -> None:
        refuse(arguments, ValueError, rf"{name}: expected one of '.*', got 'fast'", **{name: "fast"})

    @pytest.mark.parametrize("decoder", ["packed", "native"])
    def test_decoders_that_need_hoisting(self, decoder: str, arguments: dict[str, Any]) -> None:
        message = f"decoder: '{decoder}' needs scale_placement='hoisted', got 'in_loop'"
        refuse(arguments, ValueError, message, decoder=decoder, scale_placement="in_loop")

    @pytest.mark.parametrize("decoder", ["exp2", "bitcast", "native"])
    def test_decoders_without_a_vector_kernel(self, decoder: str, arguments: dict[str, Any]) -> None:
        refuse(arguments, ValueError, "contraction: 'vector' exists for", decoder=decoder, contraction="vector")

    def test_launch_profile_and_splits_reach_the_choice(self, arguments: dict[str, Any]) -> None:
        refuse(arguments, ValueError, "launch_profile: expected one of", launch_profile="v100")
        refuse(arguments, ValueError, "num_splits: expected an integer from 1 to 256, got 257", num_splits=257)
        config = launch.LaunchConfig(24, 1, 4)
        refuse(arguments, ValueError, r"launch_profile\.block_n: .*got 24", launch_profile=config)

    def test_codes_at_odd_places_cannot_be_read_in_pairs(self, device: str) -> None:
        """A table falls back to single codes; a launch of one's own is refused."""
        inputs = calls.standard_pair().quantised.to(device)
        wide = torch.cat([inputs.k_cache, inputs.k_cache], dim=-1)[..., 1 : 1 + calls.HEAD_DIM]
        odd = replace(inputs, k_cache=wide)
        own = launch.LaunchConfig(32, 1, 1, transposed=True)
        with pytest.raises(ValueError, match=r"launch_profile\.transposed: expected caches whose strides"):
            prepare(**odd.arguments(), launch_profile=own)
        for case, transposed in ((odd, False), (inputs, True)):
            attend = prepare(**case.arguments(), launch_profile="sm90").kernels[0]
            assert (attend.constants["TRANSPOSED"], attend.constants["CODES_PER_WORD"]) == (
                transposed,
                1 + transposed,
            )


def _as_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


class TestScales:
    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    @pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-60, 1e60], ids=str)
    @pytest.mark.parametrize("form", [float, _as_tensor], ids=["number", "tensor"])
    def test_value(self, name: str, value: float, form: Any, arguments: dict[str, Any]) -> None:
        message = re.escape(f"{name}: expected a finite positive FP32 number, got {value}")
        refuse(arguments, ValueError, message, **{name: form(value)})

    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    @pytest.mark.parametrize("shape", [(2,), (4,), (1, 1, 4), (0,), (1, 1)], ids=str)
    def test_shape(self, name: str, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
        got = ", ".join(map(str, shape))
        message = rf"{name}: expected a number or a tensor of shape \[\] or \[1\], got shape \[{got}\]"
        refuse(arguments, ValueError, message, **{name: torch.ones(shape)})

    @pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one"])
    def test_one_number_is_accepted(self, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
        scale = torch.full(shape, 0.0371)
        kernels = prepare(**arguments | {"v_scale": scale}).kernels
        assert kernels[0].arguments["v_scale"] == scale.item()

    @pytest.mark.parametrize("value", ["1.0", None, True, [1.0]], ids=repr)
    def test_type(self, value: Any, arguments: dict[str, Any]) -> None:
        refuse(arguments, TypeError, "k_scale: expected a number or a tensor", k_scale=value)

    def test_a_scale_whose_hoisted_factor_would_overflow(self, arguments: dict[str, Any]) -> None:
        refuse(arguments, ValueError, r"v_scale: expected at most 1\.33e\+36, got", v_scale=2e36)

    def test_an_unquantised_cache_takes_none(self, arguments: dict[str, Any]) -> None:
        caches = {name: arguments[name].half() for name in ("k_cache", "v_cache")}
        message = r"v_scale: an unquantised cache has no scale, expected 1\.0, got 0\.5"
        refuse(arguments, ValueError, message, kv_cache_dtype="auto", k_scale=1.0, v_scale=0.5, **caches)

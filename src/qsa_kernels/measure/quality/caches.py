"""Ways to keep the keys and values of a real model, and the attention that a forward reads them through."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qsa_kernels import e4m3, sparse_paged_attention
from qsa_kernels.cache import PagedKVCache
from qsa_kernels.measure import smollm2
from qsa_kernels.measure.calibration import CalibrationReport
from qsa_kernels.measure.scale_effects import scale_choices
from qsa_kernels.scales import Geometry, Kind, KVScales, ScaleSlots, UncalibratedScales

BASELINE = "fp16"
NOISE = "fp16, other order"
CALIBRATED = "calibrated"

# What each arm stands for. The first two have an FP16 cache, the others an E4M3 cache.
ARMS: dict[str, str] = {
    BASELINE: "FP16 cache",
    NOISE: "FP16 cache, sums in another order: the self-noise",
    CALIBRATED: "E4M3 cache, max / 448 over the calibration texts, the public contract",
    "other text": "E4M3 cache, max / 448 over one calibration text of another kind",
    "unit": "E4M3 cache, 1.0 everywhere, the negative control",
    "half": "E4M3 cache, half the calibrated scales: what saturation does",
}

PAGE_SIZE = 16
# No launch profile chooses this number of parts, so the order differs from the default whatever that is.
NOISE_SPLITS = 7


@dataclass(frozen=True)
class CacheArm:
    """One way to keep K and V.

    Args:
        name (str): one of `ARMS`.
        scales (KVScales | None): of all layers for an E4M3 cache, None for an FP16 cache.
    """

    name: str
    scales: KVScales | None

    @property
    def other_order(self) -> bool:
        return self.name == NOISE


def arms(calibrated: CalibrationReport, other: CalibrationReport) -> dict[str, CacheArm]:
    """All arms by name; every set of scales has passed the gate.

    Args:
        calibrated: over all calibration texts.
        other: over one text of another kind.
    """
    choices = scale_choices(calibrated)
    scales: dict[str, Mapping[tuple[int, Kind], float]] = {
        CALIBRATED: choices["calibrated"],
        "other text": other.scale(),
        "unit": choices["unit"],
        "half": choices["half"],
    }
    return {name: CacheArm(name, finalised(scales[name]) if name in scales else None) for name in ARMS}


def finalised(scales: Mapping[tuple[int, Kind], float]) -> KVScales:
    """A complete set of scales for the model of these chapters.

    Args:
        scales: by layer and kind.

    Raises:
        WeightFileError: a scale is missing, surplus or invalid; names all of them.
    """
    geometry = Geometry(tuple(range(smollm2.LAYERS)), "model.layers")
    slots = ScaleSlots(geometry)
    for (layer, kind), scale in scales.items():
        slots.load(geometry.key(layer, kind), torch.tensor(scale, dtype=torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedScales)  # the negative control is one on purpose
        return slots.finalise(source="scales of the quality chapter")


def causal(tokens: int, device: torch.device) -> torch.Tensor:
    """Every row lists all tokens up to its own: [tokens, tokens] int32, -1 = no token."""
    position = torch.arange(tokens, dtype=torch.int32, device=device)
    return torch.where(position[None] <= position[:, None], position[None], -1)


class TorchReader:
    """Attention over a cache in plain torch: the same codes as the kernel's cache, sums in FP32.

    Queries, keys, values and outputs are FP16 as at the operator's boundary. The other order of sums is that of the
    tokens turned round.

    Args:
        arm (CacheArm): the cache.
        indices (torch.Tensor): [rows, topk] int32, tokens that each row lists, each at most once; -1 = no token.
    """

    def __init__(self, arm: CacheArm, indices: torch.Tensor) -> None:
        self.arm = arm
        rows = indices.shape[0]
        listed = torch.zeros(rows, rows + 1, dtype=torch.bool, device=indices.device)
        listed.scatter_(1, indices.long().where(indices >= 0, rows), True)
        self.visible = listed[:, :rows]
        self.is_causal = bool((self.visible == torch.ones_like(self.visible).tril()).all())

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention output [rows, q_heads, head_dim] in the dtype of `q`."""
        k, v = (self._stored(layer, kind, tensor.half()) for kind, tensor in (("k", k), ("v", v)))
        queries, keys, values = (tensor.float().transpose(0, 1)[None] for tensor in (q.half(), k, v))
        if self.is_causal and not self.arm.other_order:
            how: dict[str, Any] = {"is_causal": True}
        elif self.arm.other_order:
            keys, values, how = keys.flip(2), values.flip(2), {"attn_mask": self.visible.flip(1)}
        else:
            how = {"attn_mask": self.visible}
        output = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True, **how)
        return output[0].transpose(0, 1).half().to(q.dtype)

    def _stored(self, layer: int, kind: str, values: torch.Tensor) -> torch.Tensor:
        if self.arm.scales is None:
            return values
        scales = self.arm.scales[layer]
        scale = scales.k_scale if kind == "k" else scales.v_scale
        return e4m3.decode(e4m3.encode(values, scale)) * scale


class OperatorReader:
    """Attention over a `PagedKVCache`, read by `sparse_paged_attention`: compiled on a GPU, interpreted on a CPU.

    The pages lie in reverse order, so that a wrong page shows. The other order of sums is that of another split count.

    Args:
        arm (CacheArm): the cache.
        indices (torch.Tensor): as for `TorchReader`, on the device of the model.
    """

    def __init__(self, arm: CacheArm, indices: torch.Tensor) -> None:
        self.arm = arm
        self.indices = indices

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention output [rows, q_heads, head_dim] in the dtype of `q`."""
        return self.read(q, *self.stored(layer, k, v))

    def read(self, q: torch.Tensor, cache: PagedKVCache, block_table: torch.Tensor) -> torch.Tensor:
        """Attention of the rows of `q` over a filled cache, in the dtype of `q`."""
        output = sparse_paged_attention(
            q.half(),
            logical_indices=self.indices,
            block_table=block_table,
            token_to_req=torch.zeros(q.shape[0], dtype=torch.int32, device=q.device),
            num_splits=NOISE_SPLITS if self.arm.other_order else None,
            **cache.arguments(),
        )
        assert isinstance(output, torch.Tensor)
        return output.to(q.dtype)

    def stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[PagedKVCache, torch.Tensor]:
        """The filled cache of a layer and its block table."""
        tokens, kv_heads, head_dim = k.shape
        pages = -(-tokens // PAGE_SIZE)
        cache = PagedKVCache(
            pages,
            PAGE_SIZE,
            kv_heads,
            head_dim,
            kv_cache_dtype="fp8_e4m3" if self.arm.scales else "auto",
            scales=self.arm.scales[layer] if self.arm.scales else None,
            device=k.device,
        )
        block_table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=k.device)[None]
        position = torch.arange(tokens, device=k.device)
        slots = block_table[0, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE
        cache.write(k.half(), v.half(), slots)
        return cache, block_table


def reader(arm: CacheArm, indices: torch.Tensor) -> TorchReader | OperatorReader:
    """What a forward reads the cache through: the kernels on a GPU, plain torch on a CPU."""
    return OperatorReader(arm, indices) if indices.is_cuda else TorchReader(arm, indices)


def model_on(device: torch.device) -> Any:
    """The causal model: FP32 on a CPU, FP16 on a GPU as the public contract has it."""
    model = smollm2.load_model().model
    if device.type == "cpu":
        return model
    moved = copy.deepcopy(model).to(device, torch.float16)
    # Frequencies of the rotary embedding in FP16 would turn the positions.
    moved.model.rotary_emb = copy.deepcopy(model.model.rotary_emb).to(device)
    return moved

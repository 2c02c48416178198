"""Calibration: from observed keys and values to scales, an overlay file and a derived checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qsa_kernels import scales
from qsa_kernels.scales import KINDS, Geometry, Kind, KVScales
from qsa_kernels.weightfile import INDEX_NAME, WeightFileError, index_sha256, read_index, read_json

BINS = 4096
LOG2_RANGE = (-24.0, 16.0)
BIN_WIDTH = (LOG2_RANGE[1] - LOG2_RANGE[0]) / BINS  # in octaves: a percentile is known to a factor of 2^0.0098
REPORT_NAME = "kvscales-calibration-report.json"

_K_PROJECTION = re.compile(r"^(.*layers)\.(\d+)\.self_attn\.k_proj\.weight$")

# Of the example alone; its ends are the public range of the observed maxima (448 times the smallest and largest scale).
EXAMPLE_RANGE = (7.671875, 37.6875)
EXAMPLE_ARTIFACT = "example: scales from a declared envelope, not from a model"
EXAMPLE_BASE = scales.BaseCheckpoint(repo_id="example: bound to no checkpoint", index_sha256="0" * 64)


@dataclass
class TensorStatistics:
    """Running statistics of one tensor of one layer; constant in size whatever is observed.

    Args:
        count (int): observed values.
        nonzero_count (int): of them, not zero.
        max_abs (float): largest magnitude.
        histogram (np.ndarray): int64 [4096], counts of log2 |x| over [-24, 16); the end bins take what lies beyond.
    """

    count: int = 0
    nonzero_count: int = 0
    max_abs: float = 0.0
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    @classmethod
    def of(cls, values: torch.Tensor) -> TensorStatistics:
        """Statistics of a finite tensor of any shape."""
        magnitude = values.detach().abs().flatten()
        nonzero = magnitude[magnitude > 0].double()
        bins = ((nonzero.log2() - LOG2_RANGE[0]) / BIN_WIDTH).floor().clamp(0, BINS - 1).long()
        return cls(
            count=magnitude.numel(),
            nonzero_count=nonzero.numel(),
            max_abs=float(nonzero.max()) if nonzero.numel() else 0.0,
            histogram=torch.bincount(bins, minlength=BINS).cpu().numpy(),
        )

    def __add__(self, other: TensorStatistics) -> TensorStatistics:
        return TensorStatistics(
            self.count + other.count,
            self.nonzero_count + other.nonzero_count,
            max(self.max_abs, other.max_abs),
            self.histogram + other.histogram,
        )

    def percentile(self, share: float) -> float:
        """Upper edge of the bin that the `share` smallest non-zero magnitudes reach.

        Args:
            share: above 0, up to 1; 0.999 for p99.9.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share: expected a number above 0 and up to 1, got {share}")
        if not self.nonzero_count:
            return 0.0
        reached = np.cumsum(self.histogram) >= math.ceil(share * self.nonzero_count)
        return float(2.0 ** (LOG2_RANGE[0] + (int(np.argmax(reached)) + 1) * BIN_WIDTH))

    def share_above(self, limit: float) -> float:
        """Share of all values whose magnitude exceeds `limit`; an upper bound, exact to the bin that holds `limit`."""
        if limit >= self.max_abs:
            return 0.0
        upper_edges = LOG2_RANGE[0] + np.arange(1, BINS + 1) * BIN_WIDTH
        return float(self.histogram[upper_edges > math.log2(limit)].sum() / self.count)


class Observer:
    """Sees K and V of every forward and keeps statistics a layer and kind; shards and ranks merge into one.

    Args:
        layers (Iterable[int]): the layers that are expected; each must be seen before `report`.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(set(layers)))
        self.statistics: dict[tuple[int, Kind], TensorStatistics] = {
            (layer, kind): TensorStatistics() for layer in self.layers for kind in KINDS
        }

    def observe(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add what one forward wrote, or would write, to the cache of one layer.

        Args:
            layer: 0-based.
            k: keys after the rotary embedding, any floating dtype and shape.
            v: values, any floating dtype and shape.

        Raises:
            ValueError: a layer that is not expected, no values, or values that are not finite; nothing is added then.
            TypeError: a tensor that is not floating.
        """
        if layer not in self.layers:
            raise ValueError(f"layer {layer}: expected one of {self.layers}")
        both: list[tuple[Kind, torch.Tensor]] = [("k", k), ("v", v)]
        for kind, values in both:
            if not values.is_floating_point():
                raise TypeError(f"layer {layer} {kind}: expected a floating tensor, got {values.dtype}")
            if values.numel() == 0:
                raise ValueError(f"layer {layer} {kind}: expected values, got shape {list(values.shape)}")
            wrong = int((~torch.isfinite(values)).sum())
            if wrong:
                raise ValueError(f"layer {layer} {kind}: {wrong} of {values.numel()} values are not finite")
        for kind, values in both:
            self.statistics[layer, kind] += TensorStatistics.of(values)

    def write(self, path: Path) -> None:
        """Store what one shard or rank has seen, to be merged elsewhere; an existing file is an error."""
        observations = tuple(TensorObservation.of(*pair, seen) for pair, seen in self.statistics.items())
        with path.open("x", encoding="utf-8") as file:
            file.write(_Observations(observations=observations).model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Observer:
        """What `write` stored.

        Raises:
            WeightFileError: no such file, or observations that are incomplete or contradict each other.
        """
        stored = _read(path, _Observations)
        _check(path, stored.observations)
        observer = cls(observation.layer for observation in stored.observations)
        for observation in stored.observations:
            observer.statistics[observation.layer, observation.kind] = observation.statistics()
        return observer


class TensorObservation(BaseModel):
    """What was observed of one tensor, as stored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    layer: Annotated[int, Field(ge=0)]
    kind: Kind
    count: Annotated[int, Field(ge=0)]
    nonzero_count: Annotated[int, Field(ge=0)]
    max_abs: Annotated[float, Field(ge=0)]
    histogram: dict[str, Annotated[int, Field(gt=0)]]
    """Count by the number of the bin; empty bins are left out."""

    @classmethod
    def of(cls, layer: int, kind: Kind, statistics: TensorStatistics) -> TensorObservation:
        """Running statistics in the form that is stored."""
        filled = np.flatnonzero(statistics.histogram)
        return cls(
            layer=layer,
            kind=kind,
            count=statistics.count,
            nonzero_count=statistics.nonzero_count,
            max_abs=statistics.max_abs,
            histogram={str(number): int(statistics.histogram[number]) for number in filled},
        )

    def statistics(self) -> TensorStatistics:
        """The stored form as running statistics."""
        histogram = np.zeros(BINS, np.int64)
        for number, count in self.histogram.items():
            histogram[int(number)] = count
        return TensorStatistics(self.count, self.nonzero_count, self.max_abs, histogram)

    def problems(self) -> Iterator[str]:
        """Where the numbers contradict each other."""
        if not all(number.isdecimal() and int(number) < BINS for number in self.histogram):
            yield f"the histogram has bins that are no numbers from 0 to {BINS - 1}"
            return
        if sum(self.histogram.values()) != self.nonzero_count or self.nonzero_count > self.count:
            yield "the histogram does not add up to the non-zero count"
            return
        own_bin = TensorStatistics.of(torch.tensor([self.max_abs], dtype=torch.float64)).histogram.argmax()
        if own_bin < max(map(int, self.histogram), default=0):
            yield f"max_abs {self.max_abs} lies below the highest bin of the histogram"


class _Observations(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1] = 1
    observations: tuple[TensorObservation, ...]


class TensorReport(TensorObservation):
    """What was observed of one tensor, and its scale."""

    finite_count: Annotated[int, Field(gt=0)]
    scale: Annotated[float, Field(gt=0)]
    p99_9: Annotated[float, Field(gt=0)]
    p99_99: Annotated[float, Field(gt=0)]
    saturation_ratio: Annotated[float, Field(ge=0, le=1)]
    shard_scale_min_over_global: Annotated[float, Field(gt=0, le=1)]
    shard_scale_max_over_global: Annotated[float, Field(gt=0, le=1)]

    def problems(self) -> Iterator[str]:
        """Where the numbers contradict each other."""
        yield from super().problems()
        if self.finite_count != self.count:
            yield f"{self.count - self.finite_count} values are not finite"


class CalibrationReport(BaseModel):
    """Result of a calibration, as stored beside the overlay that follows from it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1] = 1
    scale_contract: Literal["e4m3fn(x/scale), max_abs/448"] = "e4m3fn(x/scale), max_abs/448"
    source: str
    unit_scale_negative_control: bool = False
    tensors: tuple[TensorReport, ...]

    def max_abs(self) -> dict[tuple[int, Kind], float]:
        """Observed maximum by layer and kind."""
        return {(tensor.layer, tensor.kind): tensor.max_abs for tensor in self.tensors}

    def scale(self) -> dict[tuple[int, Kind], float]:
        """Scale by layer and kind."""
        return {(tensor.layer, tensor.kind): tensor.scale for tensor in self.tensors}

    def layers(self) -> tuple[int, ...]:
        """Layers in ascending order."""
        return tuple(sorted({tensor.layer for tensor in self.tensors}))

    def table(self) -> pd.DataFrame:
        """One row a layer and kind, without the histogram."""
        frame = pd.DataFrame([tensor.model_dump(exclude={"histogram"}) for tensor in self.tensors])
        return frame.assign(status="passed", reason="")

    def histograms(self, bins_per_octave: int = 4) -> pd.DataFrame:
        """Tidy histogram: layer, kind, lower edge of the bin in octaves, share of the non-zero values.

        Args:
            bins_per_octave: bins are joined to about this many.
        """
        joined = round(1 / BIN_WIDTH / bins_per_octave)
        rows = []
        for tensor in self.tensors:
            counts: dict[int, int] = {}
            for number, count in tensor.histogram.items():
                counts[int(number) // joined] = counts.get(int(number) // joined, 0) + count
            rows += [
                {
                    "layer": tensor.layer,
                    "kind": tensor.kind,
                    "log2_lower_edge": LOG2_RANGE[0] + number * joined * BIN_WIDTH,
                    "log2_upper_edge": LOG2_RANGE[0] + (number + 1) * joined * BIN_WIDTH,
                    "share_of_nonzero": count / tensor.nonzero_count,
                }
                for number, count in sorted(counts.items())
            ]
        return pd.DataFrame(rows).assign(status="passed", reason="")

    def write(self, path: Path) -> None:
        """Store as JSON; an existing file is an error."""
        with path.open("x", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> CalibrationReport:
        """A stored report.

        Raises:
            WeightFileError: no such file, or not a complete report.
        """
        report = _read(path, cls)
        _check(path, report.tensors)
        problems = []
        for tensor in report.tensors:
            expected = 1.0 if report.unit_scale_negative_control else scales.scale_for(tensor.max_abs)
            if tensor.scale != expected:
                problems.append(
                    f"layer {tensor.layer} {tensor.kind}: max_abs {tensor.max_abs} gives the scale {expected!r}, "
                    f"it says {tensor.scale!r}"
                )
        if problems:
            raise WeightFileError(path, problems)
        return report


def summarize(
    shards: Sequence[Observer], *, source: str, unit_scale_negative_control: bool = False
) -> CalibrationReport:
    """Merge the observers of all shards and ranks and derive the scales.

    The scale is the smallest FP32 number that is at least max_abs / 448, with no margin: the observed maximum does not
    saturate, anything larger does. Percentiles are reported and never used.

    Args:
        shards: one observer a shard or rank, all of the same layers; the order does not matter.
        source: what was observed, in a few words.
        unit_scale_negative_control: give 1.0 for every scale, marked as such.

    Raises:
        ValueError: no shard, shards of different layers, or a tensor that was never seen or only ever zero; names it.
    """
    if not shards:
        raise ValueError("shards: expected at least one observer")
    layers = shards[0].layers
    for shard in shards:
        if shard.layers != layers:
            raise ValueError(f"shards: expected the same layers in all, got {layers} and {shard.layers}")
    tensors = []
    for pair in shards[0].statistics:
        layer, kind = pair
        seen = [shard.statistics[pair] for shard in shards if shard.statistics[pair].count]
        total = sum(seen, TensorStatistics())
        if not total.max_abs:
            raise ValueError(f"layer {layer} {kind}: " + ("all values are zero" if total.count else "never observed"))
        scale = 1.0 if unit_scale_negative_control else scales.scale_for(total.max_abs)
        maxima = [shard.max_abs for shard in seen if shard.max_abs]
        tensors.append(
            TensorReport(
                **TensorObservation.of(layer, kind, total).model_dump(),
                finite_count=total.count,
                scale=scale,
                p99_9=total.percentile(0.999),
                p99_99=total.percentile(0.9999),
                saturation_ratio=total.share_above(scales.E4M3_MAX * scale),
                shard_scale_min_over_global=min(maxima) / total.max_abs,
                shard_scale_max_over_global=max(maxima) / total.max_abs,
            )
        )
    return CalibrationReport(
        source=source, unit_scale_negative_control=unit_scale_negative_control, tensors=tuple(tensors)
    )


def envelope(reports: Sequence[CalibrationReport]) -> CalibrationReport:
    """One report with the maxima of several runs: distribution of the first, maximum and scale over all.

    Repeated runs differ where batching changes the order of floating-point sums.

    Args:
        reports: of the same layers; none of them a negative control.

    Raises:
        ValueError: no report, a negative control among them, or different layers.
    """
    if not reports:
        raise ValueError("reports: expected at least one")
    if any(report.unit_scale_negative_control for report in reports):
        raise ValueError("reports: a unit-scale negative control has no place in an envelope")
    if any(report.max_abs().keys() != reports[0].max_abs().keys() for report in reports):
        raise ValueError(f"reports: expected the same layers in all, got {[report.layers() for report in reports]}")
    tensors = []
    for tensor in reports[0].tensors:
        maximum = max(report.max_abs()[tensor.layer, tensor.kind] for report in reports)
        change = {
            "max_abs": maximum,
            "scale": scales.scale_for(maximum),
            "shard_scale_min_over_global": tensor.shard_scale_min_over_global * tensor.max_abs / maximum,
            "shard_scale_max_over_global": tensor.shard_scale_max_over_global * tensor.max_abs / maximum,
        }
        tensors.append(tensor.model_copy(update=change))
    source = f"envelope of {len(reports)} runs: " + "; ".join(dict.fromkeys(report.source for report in reports))
    return reports[0].model_copy(update={"source": source, "tensors": tuple(tensors)})


def overlay_bytes(values: Mapping[str, float], *, negative_control: bool = False) -> bytes:
    """A safetensors file with one FP32 scalar a key: the same bytes for the same values.

    The library writes metadata in an arbitrary order, which would change the hash of the file from run to run.

    Args:
        values: scale by tensor name; each must be exactly an FP32 number.
        negative_control: mark the file as a unit-scale negative control.

    Raises:
        ValueError: a scale is not a finite positive FP32 number; names the key.
    """
    for key, value in values.items():
        problem = scales.invalid_scale(value)
        if problem:
            raise ValueError(f"{key}: {problem}")
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "qsa_kv_scale_contract": scales.CONTRACT,
            "negative_control": "true" if negative_control else "false",
        }
    }
    for position, key in enumerate(sorted(values)):
        header[key] = {"dtype": "F32", "shape": [], "data_offsets": [4 * position, 4 * position + 4]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return (
        struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(values)}f", *(values[key] for key in sorted(values)))
    )


def build_pack(
    folder: Path,
    geometry: Geometry,
    max_abs: Mapping[tuple[int, Kind], float],
    *,
    artifact_id: str,
    base: scales.BaseCheckpoint,
    file_name: str = scales.OVERLAY_NAME,
) -> KVScales:
    """A folder with an overlay and its `kvscales-manifest.json`, in the layout of the published pack.

    Args:
        folder: is made; must not exist.
        geometry: layers and prefix of the overlay.
        max_abs: observed maximum by layer and kind.
        artifact_id: name of the pack.
        base: the checkpoint that it is bound to.
        file_name: of the overlay.

    Raises:
        FileExistsError: `folder` exists.
        ValueError: a maximum is missing, surplus or invalid; names it.
    """
    keys = _keyed(geometry, max_abs)
    values = {key: scales.scale_for(maximum) for key, maximum in keys.items()}
    content = overlay_bytes(values)
    manifest = scales.Manifest(
        schema_version=1,
        artifact_id=artifact_id,
        scale_contract="e4m3fn(x/scale), max_abs/448",
        loader_contract=scales.LOADER_CONTRACT,
        base_checkpoint=base,
        scale_file=scales.ScaleFile(
            filename=file_name,
            sha256=hashlib.sha256(content).hexdigest(),
            tensor_names=list(keys),
            tensor_count=len(keys),
        ),
        tensors=[
            scales.MaxAbs(layer=layer, kind=kind, max_abs=max_abs[layer, kind])
            for layer in geometry.layers
            for kind in KINDS
        ],
    )
    with _new_folder(folder) as staging:
        (staging / file_name).write_bytes(content)
        _write_json(staging / scales.MANIFEST_NAME, manifest.model_dump())
        return scales.load_pack(staging, geometry, base.index_sha256)


def build_example(folder: Path) -> KVScales:
    """The example pack of this repository: declared maxima from 7.671875 to 37.6875, no model and no checkpoint.

    The published scales are not public; only their range is. These maxima rise evenly in the logarithm from one end of
    that range to the other, rounded to FP16, and say nothing about the model.

    Args:
        folder: is made; must not exist.
    """
    geometry = scales.QWEN4_EXP
    pairs = [(layer, kind) for layer in geometry.layers for kind in KINDS]
    maxima = np.geomspace(*EXAMPLE_RANGE, num=len(pairs)).astype(np.float16).astype(float)
    return build_pack(
        folder,
        geometry,
        dict(zip(pairs, maxima.tolist(), strict=True)),
        artifact_id=EXAMPLE_ARTIFACT,
        base=EXAMPLE_BASE,
        file_name=f"example-{scales.OVERLAY_NAME}",
    )


def infer_geometry(weight_map: Mapping[str, str], layers: Sequence[int]) -> Geometry:
    """Prefix of the layers in a base checkpoint: that of the longest set of `*.layers.N.self_attn.k_proj.weight`.

    Args:
        weight_map: of the base index.
        layers: that were calibrated; all must be attention layers under the prefix.

    Raises:
        ValueError: no such weights, two sets of equal length, or layers that are not among them.
    """
    found: dict[str, set[int]] = {}
    for key in weight_map:
        match = _K_PROJECTION.match(key)
        if match:
            found.setdefault(match[1], set()).add(int(match[2]))
    if not found:
        raise ValueError("base index: no *.layers.N.self_attn.k_proj.weight, so that the layer prefix is unknown")
    longest = max(len(ids) for ids in found.values())
    prefixes = [prefix for prefix, ids in found.items() if len(ids) == longest]
    if len(prefixes) > 1:
        raise ValueError(f"base index: the layer prefix is ambiguous: {', '.join(sorted(prefixes))}")
    foreign = sorted(set(layers) - found[prefixes[0]])
    if foreign:
        raise ValueError(f"base index: layers {foreign} are no attention layers under {prefixes[0]!r}")
    return Geometry(tuple(sorted(layers)), prefixes[0])


def derive_checkpoint(base: Path, output: Path, report: CalibrationReport) -> KVScales:
    """A checkpoint folder with the scales of a calibration: links to the base, a rewritten index, a provenance file.

    The base is only read. Everything is written to a temporary folder beside `output`, loaded through the gate, and
    renamed.

    Args:
        base: checkpoint with a `model.safetensors.index.json`.
        output: is made; must not exist.
        report: of the calibration on `base`.

    Raises:
        FileExistsError: `output` exists.
        ValueError: the base has no usable index, has scales already, or does not have the layers of the report.
    """
    geometry = infer_geometry(read_index(base / INDEX_NAME), report.layers())
    content = overlay_bytes(_keyed(geometry, report.scale()), negative_control=report.unit_scale_negative_control)

    def write_record(staging: Path) -> str:
        report.write(staging / REPORT_NAME)
        return REPORT_NAME

    return _derive(
        base, output, geometry, scales.OVERLAY_NAME, content, report.unit_scale_negative_control, write_record
    )


def materialise_pack(base: Path, output: Path, pack: Path, geometry: Geometry) -> KVScales:
    """A checkpoint folder with the scales of a published pack, which must be bound to this very base.

    Args:
        base: checkpoint with a `model.safetensors.index.json`.
        output: is made; must not exist.
        pack: folder with the overlay and its `kvscales-manifest.json`.
        geometry: which scales are expected.

    Raises:
        FileExistsError: `output` exists.
        ValueError: the pack does not load or is bound to another base, or the base has scales already.
    """
    manifest = scales.read_record(pack / scales.MANIFEST_NAME, scales.Manifest)
    loaded = scales.load_pack(pack, geometry, index_sha256(base))
    file_name = manifest.scale_file.filename
    content = (pack / file_name).read_bytes()

    def write_record(staging: Path) -> str:
        shutil.copyfile(pack / scales.MANIFEST_NAME, staging / scales.MANIFEST_NAME)
        return scales.MANIFEST_NAME

    return _derive(base, output, geometry, file_name, content, loaded.negative_control, write_record)


def _derive(
    base: Path,
    output: Path,
    geometry: Geometry,
    file_name: str,
    content: bytes,
    negative_control: bool,
    write_record: Callable[[Path], str],
) -> KVScales:
    digest = index_sha256(base)
    index = read_json(base / INDEX_NAME)
    weight_map = read_index(base / INDEX_NAME)
    written = {file_name, scales.PROVENANCE_NAME, scales.MANIFEST_NAME, REPORT_NAME}
    problems = [f"has the scale {key} already" for key in weight_map if scales.is_scale_name(key)]
    problems += [f"has a file {name} already" for name in sorted(written) if (base / name).exists()]
    if problems:
        raise WeightFileError(base, problems)

    keys = geometry.names()
    index["weight_map"] = weight_map | dict.fromkeys(keys, file_name)
    if isinstance(index.get("metadata"), dict) and isinstance(index["metadata"].get("total_size"), int):
        index["metadata"]["total_size"] += len(content)
    with _new_folder(output) as staging:
        for entry in base.iterdir():
            if entry.name != INDEX_NAME:
                (staging / entry.name).symlink_to(entry.resolve())
        (staging / file_name).write_bytes(content)
        _write_json(staging / INDEX_NAME, index)
        record = write_record(staging)
        provenance = scales.Provenance(
            schema_version=1,
            base_checkpoint=str(base),
            base_index_sha256=digest,
            calibration_report=record,
            calibration_report_sha256=hashlib.sha256((staging / record).read_bytes()).hexdigest(),
            scale_file=file_name,
            scale_file_sha256=hashlib.sha256(content).hexdigest(),
            tensor_count=len(keys),
            checkpoint_layer_prefix=geometry.prefix,
            unit_scale_negative_control=negative_control,
            loader_contract=scales.LOADER_CONTRACT,
        )
        _write_json(staging / scales.PROVENANCE_NAME, provenance.model_dump())
        return scales.load_checkpoint(staging, geometry, digest)


def _keyed(geometry: Geometry, values: Mapping[tuple[int, Kind], float]) -> dict[str, float]:
    """Values by tensor name, in the order of the geometry."""
    pairs = [(layer, kind) for layer in geometry.layers for kind in KINDS]
    problems = [f"layer {layer} {kind}: missing" for layer, kind in pairs if (layer, kind) not in values]
    problems += [f"layer {layer} {kind}: unexpected" for layer, kind in values if (layer, kind) not in pairs]
    if problems:
        raise ValueError("; ".join(problems))
    return {geometry.key(layer, kind): values[layer, kind] for layer, kind in pairs}


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well, and vanishes otherwise."""
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists already; nothing was written")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staging.chmod(0o755)  # mkdtemp makes it private
        yield staging
        os.rename(staging, folder)
    except BaseException:
        shutil.rmtree(staging)
        raise


Stored = TypeVar("Stored", bound=BaseModel)


def _read(path: Path, model: type[Stored]) -> Stored:
    """A stored record, after the checks of strict JSON that the model itself does not make."""
    content = read_json(path)
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise WeightFileError(path, problems[:20]) from error


def _check(path: Path, observations: Sequence[TensorObservation]) -> None:
    """Every layer has K and V, once each, and numbers that agree."""
    pairs = [(observation.layer, observation.kind) for observation in observations]
    problems = [
        f"layer {layer} {kind}: listed twice" for layer, kind in sorted(set(pairs)) if pairs.count((layer, kind)) > 1
    ]
    problems += [
        f"layer {layer} {kind}: missing"
        for layer in sorted({layer for layer, _ in pairs})
        for kind in KINDS
        if (layer, kind) not in pairs
    ]
    problems += [
        f"layer {observation.layer} {observation.kind}: {problem}"
        for observation in observations
        for problem in observation.problems()
    ]
    if problems or not observations:
        raise WeightFileError(path, problems or ["no observations"])

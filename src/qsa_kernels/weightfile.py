"""Structure of safetensors files and their index, checked from the outside before anything is read by it.

A file behind the name may be empty, cut off, a pointer, a pickle or something else. Nothing here allocates by a size
that the file claims, unpickles, or relies on the message text of a library.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

INDEX_NAME = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_FOREIGN = (
    (b"version https://git-lfs", "Git LFS pointer: the real file was not downloaded"),
    (b"PK", "zip archive (a torch checkpoint?), not safetensors"),
    (b"\x80\x02", "pickle, not safetensors"),
    (b"\x80\x03", "pickle, not safetensors"),
    (b"\x80\x04", "pickle, not safetensors"),
    (b"\x80\x05", "pickle, not safetensors"),
    (b"GGUF", "GGUF, not safetensors"),
    (b"<", "HTML or XML text, not safetensors: a failed download?"),
)


class WeightFileError(ValueError):
    """A file or checkpoint that cannot be used; `problems` lists all that is wrong with it.

    Args:
        path: the file or folder.
        problems: one line each, naming the key, the byte range or the entry.
    """

    def __init__(self, path: Path | str, problems: Sequence[str]) -> None:
        self.path = Path(path)
        self.problems = tuple(problems)
        separator = " " if len(self.problems) == 1 else "\n- "
        super().__init__(f"{path}:{separator}" + "\n- ".join(self.problems))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors header; `begin` and `end` count bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """Checked header of a safetensors file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


class _Duplicate(ValueError):
    pass


def parse_json(text: bytes) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN or infinity.

    Raises:
        ValueError: what is wrong, in one line.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise _Duplicate(f"duplicate key {key!r}")
            found[key] = value
        return found

    def constant(word: str) -> NoReturn:
        raise _Duplicate(f"{word} is no JSON number")

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except _Duplicate:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 text from byte {error.start} on") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON from character {error.pos} on") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        WeightFileError: no such file, or no strict JSON object in it.
    """
    if not path.is_file():
        raise WeightFileError(path, ["no such file"])
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise WeightFileError(path, [f"not a JSON file: {error}"]) from error
    if not isinstance(content, dict):
        raise WeightFileError(path, [f"expected a JSON object, got {type(content).__name__}"])
    return content


def read_header(path: Path) -> Header:
    """Header of a safetensors file after a check of its whole structure; reads no tensor data.

    Args:
        path: the file.

    Raises:
        WeightFileError: missing, empty, truncated or foreign file; or a header whose entries, byte ranges and file size
            do not fit together. Lists every entry that is wrong.
    """
    if not path.is_file():
        raise WeightFileError(path, ["no such file"])
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else None
        if length is None or length > size - 8 or start[8:9] != b"{":
            raise WeightFileError(path, [_foreign(start, size, length)])
        if length > _MAX_HEADER_BYTES:
            raise WeightFileError(path, [f"not safetensors: a header of {length} bytes is over the format's limit"])
        file.seek(8)
        text = file.read(length)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise WeightFileError(path, [f"not safetensors: header (bytes 8 to {8 + length}): {error}"]) from error
    problems: list[str] = []
    metadata = _metadata(content.pop("__metadata__", {}), problems)
    tensors: dict[str, TensorEntry] = {}
    for key, value in content.items():
        entry = _entry(key, value, 8 + length, problems)
        if entry is not None:
            tensors[key] = entry
    if not problems:
        problems = _layout(tensors, 8 + length, size)
    if problems:
        raise WeightFileError(path, problems)
    return Header(tensors, metadata)


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of a `model.safetensors.index.json`: tensor name to file name.

    Raises:
        WeightFileError: no strict JSON, no weight map, or a file name that leaves the folder.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightFileError(path, [f"expected an object 'weight_map', got {type(weight_map).__name__}"])
    problems = [
        f"{key}: expected the name of a file beside the index, got {name!r}"
        for key, name in weight_map.items()
        if not isinstance(name, str) or name in ("", ".", "..") or PurePosixPath(name).name != name or "\\" in name
    ]
    if problems:
        raise WeightFileError(path, problems)
    return weight_map


def index_sha256(folder: Path) -> str:
    """Hex SHA-256 of a checkpoint's `model.safetensors.index.json`, which is what an overlay is bound to.

    Raises:
        WeightFileError: the folder has no index.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise WeightFileError(path, ["no such file"])
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _foreign(start: bytes, size: int, length: int | None) -> str:
    if size == 0:
        return "empty file"
    for magic, reason in _FOREIGN:
        if start.startswith(magic):
            return reason
    if length is None:
        return f"truncated: {size} bytes, a safetensors file starts with 8 bytes of header length"
    if size == 8 or start[8:9] == b"{":
        return f"truncated: the header should end at byte {8 + length}, the file ends at byte {size}"
    return (
        f"not safetensors: no header at byte 8 (the first 8 bytes give a header of {length} bytes, the file has {size})"
    )


def _metadata(value: Any, problems: list[str]) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return value
    problems.append(f"__metadata__: expected an object of texts, got {value!r:.80}")
    return {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(key: str, value: Any, data_start: int, problems: list[str]) -> TensorEntry | None:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        problems.append(f"{key}: expected dtype, shape and data_offsets, got {value!r:.80}")
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        problems.append(f"{key}: unknown dtype {dtype!r:.80}")
    elif not isinstance(shape, list) or not all(map(_is_count, shape)):
        problems.append(f"{key}: shape is no list of counts: {shape!r:.80}")
    elif not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        problems.append(f"{key}: data_offsets are no pair of counts: {offsets!r:.80}")
    else:
        begin, end = (data_start + offset for offset in offsets)
        if (end - begin) * 8 != math.prod(shape) * _ITEM_BITS[dtype]:
            problems.append(f"{key}: {dtype} of shape {shape!s:.80} does not fill bytes {begin} to {end}")
        return TensorEntry(dtype, tuple(shape), begin, end)
    return None


def _layout(tensors: dict[str, TensorEntry], data_start: int, size: int) -> list[str]:
    """Entries must follow one another from the end of the header to the end of the file."""
    problems = []
    position = data_start
    for key, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            problems.append(f"truncated: {key} needs bytes {entry.begin} to {entry.end}, the file ends at byte {size}")
        elif entry.begin < position:
            problems.append(f"{key}: bytes {entry.begin} to {entry.end} overlap those before byte {position}")
        elif entry.begin > position:
            problems.append(f"{key}: bytes {position} to {entry.begin} before it belong to no tensor")
        position = max(position, entry.end)
    if not problems and position < size:
        problems.append(f"bytes {position} to {size} at the end belong to no tensor")
    return problems

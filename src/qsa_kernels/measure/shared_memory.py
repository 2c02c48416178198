"""Shared-memory addresses of every thread, evaluated from PTX, and the wavefronts that they cost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

WARP_LANES = 32
BANKS = 32
BANK_BYTES = 4
ACCESS = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:ld|st)\.shared[\w.]*\s|^\s*(?:@!?%\w+\s+)?(?:ld|st)matrix[\w.]*\s")
ADDRESS = re.compile(r"\[\s*(?P<base>%?\w+)\s*(?:\+\s*(?P<offset>-?\d+))?\s*\]")
DEFINITION = re.compile(r"^\s*(?P<opcode>[a-z][\w.]*)\s+(?P<target>%\w+)\s*,\s*(?P<sources>[^;{}\[\]]+);")

Lanes = NDArray[np.int64]


def _shift(value: Lanes, by: Lanes) -> Lanes:
    return np.where(by < 64, value << np.minimum(by, 63), 0)


def _field(value: Lanes, start: Lanes, length: Lanes) -> Lanes:
    return (value >> start) & ((np.int64(1) << length) - 1)


OPERATIONS: dict[str, Callable[..., Lanes]] = {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "cvta": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": _shift,
    "shr": lambda a, b: a >> np.minimum(b, 63),
    "bfe": _field,
    "min": np.minimum,
    "max": np.maximum,
    "selp": lambda a, b, chosen: np.where(chosen != 0, a, b),
}
COMPARISONS: dict[str, Callable[[Lanes, Lanes], NDArray[np.bool_]]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


class ThreadValues:
    """Values of integer PTX registers in every thread of a block, for registers that follow from the thread index.

    A register with several definitions (a loop variable) counts as zero if all of them are the same for every thread: a
    tile buffer's offset moves all lanes alike and leaves the conflicts as they are.

    Args:
        ptx (str): the text of one kernel.
        threads (int): threads in the block.
    """

    def __init__(self, ptx: str, threads: int) -> None:
        self.threads = threads
        self._definitions: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
        for line in ptx.splitlines():
            if found := DEFINITION.match(line):
                sources = [source.strip() for source in found["sources"].split(",")]
                self._definitions[found["target"]].append((found["opcode"], sources))
        self._values: dict[str, Lanes | None] = {}

    def addresses(self, instruction: str) -> Lanes | None:
        """Byte address [threads] of a shared-memory access, None where it does not follow from the thread index."""
        found = ADDRESS.search(instruction)
        if found is None:
            return None
        base = self._value(found["base"])
        return None if base is None else base + int(found["offset"] or 0)

    def _value(self, name: str) -> Lanes | None:
        if re.fullmatch(r"-?\d+", name):
            return np.full(self.threads, int(name), np.int64)
        if re.fullmatch(r"-?0x[0-9A-Fa-f]+", name):
            return np.full(self.threads, int(name, 16), np.int64)
        if name == "%tid.x":
            return np.arange(self.threads, dtype=np.int64)
        if name.startswith(("%ctaid", "%nctaid", "%ntid")) or name == "global_smem":
            return np.zeros(self.threads, np.int64)
        if name in self._values:
            return self._values[name]
        self._values[name] = None
        definitions = self._definitions.get(name, [])
        found = [self._evaluate(*definition) for definition in definitions]
        known = [value for value in found if value is not None]
        if known and len(known) == len(found) and all(np.array_equal(value, known[0]) for value in known):
            self._values[name] = known[0]
        elif len(found) > 1 and all(
            self._is_uniform(source, {name}) for _, sources in definitions for source in sources
        ):
            self._values[name] = np.zeros(self.threads, np.int64)
        return self._values[name]

    def _is_uniform(self, name: str, seen: set[str]) -> bool:
        if name == "%tid.x" or name.startswith("%laneid"):
            return False
        if not name.startswith("%") or name in seen or name.startswith(("%ctaid", "%nctaid", "%ntid")):
            return True
        definitions = self._definitions.get(name)
        if definitions is None:
            return False
        return all(self._is_uniform(source, seen | {name}) for _, sources in definitions for source in sources)

    def _evaluate(self, opcode: str, sources: Sequence[str]) -> Lanes | None:
        values = [self._value(source) for source in sources]
        known = [value for value in values if value is not None]
        stem, *modifiers = opcode.split(".")
        if len(known) < len(values):
            return None
        if stem == "setp":
            return COMPARISONS[modifiers[0]](*known).astype(np.int64) if modifiers[0] in COMPARISONS else None
        operation = OPERATIONS.get(stem)
        if operation is None or "hi" in modifiers or any(part.startswith("f") for part in modifiers):
            return None
        result = operation(*known)
        return result & 0xFFFFFFFF if modifiers and modifiers[-1][-2:] == "32" and modifiers[-1][0] in "bu" else result


def least_wavefronts(bits: int) -> int:
    """Wavefronts of an access of a warp without conflicts and without shared addresses."""
    return max(1, WARP_LANES * bits // 8 // (BANKS * BANK_BYTES))


def wavefronts(addresses: Sequence[int] | Lanes, bits: int) -> float:
    """Wavefronts that one access of a warp needs, the mean over the warps of a block.

    A wavefront serves one 4-byte word from each of 32 banks. 32-bit accesses are served for the whole warp at once,
    64-bit ones for half a warp and 128-bit ones for a quarter at a time; lanes that touch the same word share it,
    different words of one bank take turns. Where all lanes of a warp agree in pairs (lane n with n ^ 1, or n with
    n ^ 2), wide reads return two lanes at a time and take half the wavefronts.

    Args:
        addresses (Sequence[int]): byte address of each thread [threads].
        bits (int): width of the access of one lane.

    Raises:
        ValueError: a thread count that is no multiple of 32, or an unknown width.

    Source: NVIDIA, CUDA C++ Programming Guide, shared memory of compute capability 5.x and later (32 banks of 32 bits);
    NVIDIA developer forum, topic 77228 (128 bytes a cycle, and the pair rule on 7.0 to 7.5).
    """
    values = np.asarray(addresses, dtype=np.int64)
    if values.size == 0 or values.size % WARP_LANES:
        raise ValueError(f"addresses: expected a multiple of {WARP_LANES} threads, got {values.size}")
    if bits not in (8, 16, 32, 64, 128):
        raise ValueError(f"bits: expected 8, 16, 32, 64 or 128, got {bits}")
    words = max(1, bits // 32)
    total = 0
    for warp in values.reshape(-1, WARP_LANES):
        paired = any(np.array_equal(warp, warp[np.arange(WARP_LANES) ^ distance]) for distance in (1, 2))
        groups = max(1, words // 2) if paired else words
        for group in warp.reshape(groups, -1):
            first = group // max(BANK_BYTES, bits // 8) * words
            touched = np.unique(first[:, None] + np.arange(words)[None, :])
            total += int(np.bincount(touched % BANKS).max())
    return total / (values.size // WARP_LANES)

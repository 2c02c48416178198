"""Read `nvdisasm` text: instructions, basic blocks, natural loops and instruction classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx  # type: ignore[import-untyped]

INSTRUCTION = re.compile(
    r"/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P[T0-9]+)\s+)?(?P<opcode>[A-Z][\w.]*)(?:\s+(?P<operands>[^;]*?))?\s*;"
)
ENCODING = re.compile(r"/\*\s*0x(?P<word>[0-9a-f]{16})\s*\*/")
LABEL = re.compile(r"^(?P<label>\.L_\w+):")
LINE_INFO = re.compile(r'//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
TARGET = re.compile(r"`\((?P<label>\.L_\w+)\)")

# One opcode stem each; the longest matching stem of an opcode decides. Width classes are added by `classify`.
CLASS_OF_STEM: dict[str, str] = {
    **dict.fromkeys(("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2"), "fp32"),
    **dict.fromkeys(("FMNMX", "FSETP", "FSEL", "FSET", "FCHK"), "fp32_compare"),
    **dict.fromkeys(("HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSETP2", "HSET2"), "fp16"),
    **dict.fromkeys(("HADD2.F32", "F2F", "F2FP", "F2I", "I2F", "I2FP", "F2IP", "I2IP", "I2I", "FRND"), "conversion"),
    **dict.fromkeys(
        (
            *("LOP3", "LOP", "PLOP3", "IADD3", "IADD", "VIADD", "IMAD", "IMUL", "IDP", "IABS", "ISCADD", "LEA"),
            *("SHF", "SHL", "SHR", "PRMT", "SGXT", "BMSK", "FLO", "POPC", "BREV", "VABSDIFF"),
            *("ISETP", "SEL", "IMNMX", "VIMNMX"),
        ),
        "integer",
    ),
    **dict.fromkeys(
        ("MOV", "IMAD.MOV", "CS2R", "S2R", "S2UR", "R2UR", "P2R", "R2P", "R2B", "B2R", "MOVM", "CCTL"), "move"
    ),
    "MUFU": "mufu",
    **dict.fromkeys(("LDG", "LD"), "global_load"),
    **dict.fromkeys(("LDGSTS", "UBLKCP", "UTMALDG"), "global_to_shared"),
    **dict.fromkeys(("STG", "ST", "RED", "ATOMG", "ATOM"), "global_store"),
    **dict.fromkeys(("LDS", "LDSM"), "shared_load"),
    **dict.fromkeys(("STS", "STSM", "ATOMS"), "shared_store"),
    **dict.fromkeys(("LDL", "STL"), "local"),
    **dict.fromkeys(("SHFL", "REDUX"), "shuffle"),
    **dict.fromkeys(
        (
            "BAR",
            "WARPSYNC",
            "DEPBAR",
            "LDGDEPBAR",
            "MEMBAR",
            "ERRBAR",
            "FENCE",
            "SYNCS",
            "WARPGROUP",
            "ARRIVES",
            "VOTE",
            "PREEXIT",
            "ACQBULK",
        ),
        "barrier",
    ),
    **dict.fromkeys(("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "QMMA"), "tensor_core"),
    **dict.fromkeys(
        ("BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BSSY", "BSYNC", "BREAK", "BMOV", "YIELD", "KILL"), "branch"
    ),
    **dict.fromkeys(("LDC", "ULDC", "LDCU"), "constant_load"),
    "NOP": "other",
}
WIDTH_CLASSES = ("global_load", "global_to_shared", "global_store", "shared_load", "shared_store")
CLASSES: tuple[str, ...] = (*dict.fromkeys(CLASS_OF_STEM.values()), "uniform")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction of a warp.

    Args:
        offset (int): byte offset in the kernel.
        guard (str): predicate that guards it, such as "P0" or "!P0"; empty where there is none.
        opcode (str): opcode with its modifiers.
        operands (str): the operand text.
        site (int | None): line number of the line table, None where there is none.
        encoding (str): the 128-bit word in hexadecimal, empty where the text has none.
    """

    offset: int
    guard: str
    opcode: str
    operands: str
    site: int | None = None
    encoding: str = ""


@dataclass(frozen=True)
class Loop:
    """One natural loop: the blocks that reach its back edges without passing the header.

    Args:
        header (int): offset of the first instruction of the header block.
        instructions (tuple[Instruction, ...]): every instruction of the body, nested loops included.
        own (tuple[Instruction, ...]): those in no nested loop.
    """

    header: int
    instructions: tuple[Instruction, ...]
    own: tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """The instructions of one kernel and the offsets that its labels name."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> Program:
    """Read the text of `nvdisasm -c`, with or without `-g` and `-hex`.

    Args:
        text (str): disassembly of one kernel.

    Raises:
        ValueError: no instruction is found.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    site: int | None = None
    for line in text.splitlines():
        if label := LABEL.match(line.strip()):
            waiting.append(label["label"])
        elif info := LINE_INFO.search(line):
            site = int(info["line"])
        elif found := INSTRUCTION.search(line):
            offset = int(found["offset"], 16)
            labels.update(dict.fromkeys(waiting, offset))
            waiting.clear()
            word = ENCODING.search(line, found.end())
            instructions.append(
                Instruction(
                    offset,
                    found["guard"] or "",
                    found["opcode"],
                    found["operands"] or "",
                    site,
                    word["word"] if word else "",
                )
            )
        elif instructions and (word := ENCODING.search(line)):
            last = instructions[-1]
            instructions[-1] = Instruction(
                last.offset, last.guard, last.opcode, last.operands, last.site, last.encoding + word["word"]
            )
    if not instructions:
        raise ValueError("SASS text: expected nvdisasm output with instructions, got none")
    return Program(tuple(instructions), labels)


def classify(instruction: Instruction) -> str:
    """Class of an instruction; memory classes end in the access width in bits, unknown opcodes are "other"."""
    parts = instruction.opcode.split(".")
    for length in range(len(parts), 0, -1):
        kind = CLASS_OF_STEM.get(".".join(parts[:length]))
        if kind is not None:
            break
    else:
        kind = "uniform" if parts[0].startswith("U") else "other"
    if kind in WIDTH_CLASSES:
        return f"{kind}_{access_bits(instruction)}"
    return kind


def access_bits(instruction: Instruction) -> int:
    """Bits that one lane moves in a load, store or asynchronous copy."""
    parts = instruction.opcode.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return 32 * int(parts[-1]) if parts[-1].isdigit() else 32
    for part in parts[1:]:
        if part in ("128", "64", "256"):
            return int(part)
        if match := re.fullmatch(r"[US](8|16)", part):
            return int(match[1])
    return 32


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Number of instructions of each class, by name."""
    return dict(sorted(Counter(map(classify, instructions)).items()))


def control_flow(program: Program) -> tuple[nx.DiGraph, dict[int, tuple[Instruction, ...]]]:
    """Basic blocks by the offset of their first instruction, and the edges between them.

    A call returns to the instruction after it, so it ends no block.

    Raises:
        ValueError: a branch whose target is not a label (an indirect branch).
    """
    instructions = program.instructions
    index = {instruction.offset: position for position, instruction in enumerate(instructions)}
    leaders = {0} | {index[offset] for offset in program.labels.values()}
    leaders |= {position + 1 for position, instruction in enumerate(instructions) if _ends_block(instruction)}
    starts = sorted(position for position in leaders if position < len(instructions))
    graph = nx.DiGraph()
    blocks: dict[int, tuple[Instruction, ...]] = {}
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        body = instructions[start:end]
        last = body[-1]
        head = instructions[start].offset
        blocks[head] = tuple(body)
        graph.add_node(head)
        if _ends_block(last) and _stem(last) not in ("EXIT", "RET", "KILL"):
            target = TARGET.search(last.operands)
            if target is None:
                raise ValueError(
                    f"branch at {last.offset:#x}: expected a label as target, got {last.opcode} {last.operands}"
                )
            graph.add_edge(head, program.labels[target["label"]])
        if end < len(instructions) and _falls_through(last):
            graph.add_edge(head, instructions[end].offset)
    return graph, blocks


def natural_loops(program: Program) -> list[Loop]:
    """Natural loops in the order of their headers; loops that share a header are one loop.

    Source: A. V. Aho, M. S. Lam, R. Sethi, J. D. Ullman, Compilers: Principles, Techniques and Tools, 2nd ed.,
    section 9.6.
    """
    graph, blocks = control_flow(program)
    entry = min(blocks)
    dominators = nx.immediate_dominators(graph, entry)

    def dominates(above: int, below: int) -> bool:
        while below != above:
            parent = dominators.get(below)
            if parent is None or parent == below:
                return False
            below = parent
        return True

    bodies: dict[int, set[int]] = {}
    for tail, header in graph.edges:
        # What the entry does not reach is the trap after the last EXIT.
        if tail not in dominators or not dominates(header, tail):
            continue
        without_header = graph.subgraph(set(graph) - {header})
        body = {header} if tail == header else {header, tail} | nx.ancestors(without_header, tail)
        bodies.setdefault(header, set()).update(body & set(dominators))
    loops = []
    for header, body in sorted(bodies.items()):
        nested = set().union(*(other for head, other in bodies.items() if other < body))
        loops.append(Loop(header, _gather(blocks, body), _gather(blocks, body - nested)))
    return loops


def hot_loop(program: Program) -> Loop:
    """The loop whose own blocks read most from global memory: the one that walks K and V.

    Raises:
        ValueError: no loop reads global memory.
    """

    def reads(loop: Loop) -> int:
        return sum(
            access_bits(one) for one in loop.own if classify(one).startswith(("global_load", "global_to_shared"))
        )

    candidates = [loop for loop in natural_loops(program) if reads(loop)]
    if not candidates:
        raise ValueError("SASS text: expected a loop that reads global memory, got none")
    return max(candidates, key=lambda loop: (reads(loop), -len(loop.instructions)))


def _stem(instruction: Instruction) -> str:
    return instruction.opcode.split(".")[0]


def _ends_block(instruction: Instruction) -> bool:
    return _stem(instruction) in ("BRA", "BRX", "JMP", "JMX", "EXIT", "RET", "KILL")


def _falls_through(instruction: Instruction) -> bool:
    if not _ends_block(instruction):
        return True
    if instruction.guard not in ("", "PT", "UPT"):
        return True
    # A second predicate among the operands, or a divergence test, makes the branch conditional.
    operands = instruction.operands.split(",")
    return _stem(instruction) == "BRA" and (len(operands) > 1 or ".DIV" in instruction.opcode)


def _gather(blocks: dict[int, tuple[Instruction, ...]], heads: Iterable[int]) -> tuple[Instruction, ...]:
    ordered: Sequence[int] = sorted(heads)
    return tuple(instruction for head in ordered for instruction in blocks[head])

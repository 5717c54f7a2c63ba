"""The machine code of a cubin: disassembly, counts of the instructions that matter, and the faults that cost speed.

Works without a GPU: `nvdisasm` comes from NVIDIA's wheel (`pip install 'fagen[sass]'`) or from PATH. What the names mean
(SASS is documented only by its mnemonics, in the CUDA binary utilities manual): HGMMA, QGMMA and IGMMA are wgmma on 16-bit and 8-bit floating-point
and on integer operands, WARPGROUP.ARRIVE is wgmma.fence, WARPGROUP.DEPBAR wgmma.wait_group, HMMA mma.sync, UTMALDG a TMA load, SYNCS an mbarrier
operation, USETMAXREG setmaxnreg, LDGSTS cp.async, STL and LDL accesses to local memory (spills).
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import CompileError, InternalError

COUNTED = (
    *(
        "HGMMA",
        "QGMMA",
        "IGMMA",
        "HMMA",
        "WARPGROUP.DEPBAR",
        "WARPGROUP.ARRIVE",
        "BAR",
        "BAR.SYNC",
        "BAR.ARV",
        "UTMALDG",
        "UTMASTG",
        "LDGSTS",
    ),
    *("LDG.E.128", "LDSM", "STSM", "MUFU.EX2", "SYNCS", "USETMAXREG", "STL", "LDL", "SHFL", "R2UR"),
)
"""Names counted: an opcode counts if it begins with the first part and has the others among its modifiers; BAR is every BAR.*."""

INSTALL = "pip install 'fagen[sass]'"

_WHEEL = "nvidia-cuda-nvdisasm"
_SECTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L\S+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L\S+?)\)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_SHAPE = re.compile(r"\.64x(\d+)x(\d+)")


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: `predicate` ("@!P0" or ""), `op` with its modifiers, `operands` as text, `target` the index of the
    instruction that it may jump to (None: it falls through)."""

    predicate: str
    op: str
    operands: str
    target: int | None = None

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.op.partition(".")[0]

    @property
    def is_wgmma(self) -> bool:
        return self.base in ("HGMMA", "QGMMA", "IGMMA")


Code = Sequence[Instruction]


@dataclass(frozen=True)
class Fault:
    """Something in the machine code that costs speed. Codes: early-wait, spill, r2ur, s2ur (see `faults`)."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True)
class Branch:
    """What one warp role executes after its setmaxnreg: the count asked for, and one more than the highest register named there.

    `limit` None: the kernel has no setmaxnreg, the branch is the whole kernel."""

    limit: int | None
    registers: int


@dataclass(frozen=True)
class KernelSass:
    """What `analyse` finds in one kernel. `batches`: the sizes of the runs of WGMMAs, in code order (see `wgmma_batches`)."""

    counts: dict[str, int]
    batches: tuple[int, ...]
    branches: tuple[Branch, ...]
    faults: tuple[Fault, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "batches": list(self.batches),
            "branches": [[b.limit, b.registers] for b in self.branches],
            "faults": [[f.code, f.message] for f in self.faults],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KernelSass:
        return cls(
            dict(data["counts"]),
            tuple(data["batches"]),
            tuple(Branch(*b) for b in data["branches"]),
            tuple(Fault(*f) for f in data["faults"]),
        )


# ---------------------------------------------------------------------------------------------------------------- disassembly


@lru_cache(maxsize=1)
def nvdisasm() -> Path | None:
    """The disassembler: of the wheel in this environment, else on PATH, else None."""
    try:
        files = importlib.metadata.files(_WHEEL) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for f in files:
        path = Path(str(f.locate()))
        if f.name in ("nvdisasm", "nvdisasm.exe") and os.access(path, os.X_OK):
            return path
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


def disassemble(cubin: bytes) -> dict[str, tuple[Instruction, ...]] | None:
    """Instructions of every kernel by name, in code order; None where there is no nvdisasm. About 0.3 s for a large kernel."""
    tool = nvdisasm()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        run = subprocess.run([str(tool), "-c", "-ndf", f.name], capture_output=True, text=True, check=False)
    if run.returncode:
        raise CompileError(f"{tool} cannot read the cubin; a newer one: {INSTALL}", run.stderr)
    return parse(run.stdout)


def parse(listing: str) -> dict[str, tuple[Instruction, ...]]:
    """Kernels of an `nvdisasm -c` listing: name → instructions."""
    kernels: dict[str, tuple[Instruction, ...]] = {}
    name = ""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            if name:
                kernels[name] = _resolve(lines, labels)
            name, lines, labels = section[1], [], {}
        elif label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction[1])
    if name:
        kernels[name] = _resolve(lines, labels)
    return kernels


def _resolve(lines: list[str], labels: dict[str, int]) -> tuple[Instruction, ...]:
    out = []
    for text in lines:
        predicate, rest = text.split(None, 1) if text.startswith("@") else ("", text)
        op, _, operands = rest.partition(" ")
        label = _TARGET.search(operands)
        out.append(Instruction(predicate, op, operands.strip(), labels.get(label[1]) if label else None))
    return tuple(out)


# ---------------------------------------------------------------------------------------------------------------- what is in it


def analyse(cubin: bytes) -> dict[str, KernelSass] | None:
    """Counts, batches, branches and faults of every kernel; None where there is no nvdisasm."""
    kernels = disassemble(cubin)
    if kernels is None:
        return None
    return {n: KernelSass(counts(c), tuple(map(len, wgmma_batches(c))), branches(c), faults(c)) for n, c in kernels.items()}


def counts(code: Code) -> dict[str, int]:
    """How often each name of COUNTED occurs."""
    ops = Counter(x.op for x in code)
    return {name: sum(n for op, n in ops.items() if _is(op, name)) for name in COUNTED}


def _is(op: str, name: str) -> bool:
    base, *modifiers = name.split(".")
    have = op.split(".")
    return have[0] == base and all(m in have[1:] for m in modifiers)


def branches(code: Code) -> tuple[Branch, ...]:
    """The warp roles' branches in code order: what can be reached from each setmaxnreg, wherever the compiler put it."""
    starts = [i for i, x in enumerate(code) if x.op.startswith("USETMAXREG")]
    if not starts:
        return (Branch(None, _registers(code)),)
    return tuple(Branch(_limit(code[s]), _registers([code[i] for i in sorted(reachable(code, s))])) for s in starts)


def reachable(code: Code, start: int) -> set[int]:
    """Indices of the instructions that may run from `start` on, by fall-through and jumps (calls do not occur: all is inlined)."""
    seen: set[int] = set()
    todo = [start]
    while todo:
        i = todo.pop()
        while i < len(code) and i not in seen:
            seen.add(i)
            x = code[i]
            if x.target is not None:
                todo.append(x.target)
            if not x.predicate and x.op in ("EXIT", "BRA"):
                break
            i += 1
    return seen


def _limit(setmaxnreg: Instruction) -> int:
    return int(setmaxnreg.operands.split(",")[-1].strip(), 0)


def _registers(code: Code) -> int:
    """One more than the highest register named. Wide operands name their first only, but every element is named somewhere."""
    return 1 + max((int(r) for x in code for r in _REGISTER.findall(x.operands)), default=-1)


# ---------------------------------------------------------------------------------------------------------------- faults


def wgmma_batches(code: Code) -> list[list[int]]:
    """Indices of the WGMMAs, in runs of one shape without a WARPGROUP instruction in between: as the program's Mma steps, unless
    ptxas serialised them."""
    runs: list[list[int]] = []
    for i, x in enumerate(code):
        if not x.is_wgmma:
            continue
        last = runs[-1] if runs else None
        if last and _shape(code[last[0]]) == _shape(x) and not any(y.base == "WARPGROUP" for y in code[last[-1] + 1 : i]):
            last.append(i)
        else:
            runs.append([i])
    return runs


def serialised(batches: Sequence[int], steps: int | None = None) -> bool:
    """Whether ptxas serialised WGMMA batches: more runs than the program has Mma `steps`, or (None: program unknown) more than one
    run of a single WGMMA. Costs about a factor of two, and throws away the overlap that the schedule is about."""
    return batches.count(1) > 1 if steps is None else len(batches) > steps


def faults(code: Code) -> tuple[Fault, ...]:
    """What costs speed without being wrong. Looked for where WGMMAs are issued (setmaxnreg's branch, or the whole kernel)

    early-wait  under 90 % of a block's exponentials stand between "one batch open" and "none open": the second wait was moved up
    spill       local-memory accesses from the first WGMMA on
    r2ur        vector → uniform register moves inside a batch: its descriptors are not known to be uniform
    s2ur        special registers read between the first and the last WGMMA
    """
    code = _wgmma_region(code)
    runs = wgmma_batches(code)
    if not runs:
        return ()
    first, last = runs[0][0], runs[-1][-1]
    found = list(_early_waits(code, runs))
    if spills := sum(x.base in ("STL", "LDL") for x in code[first:]):
        found.append(Fault("spill", f"{spills} local-memory accesses after the first WGMMA"))
    if moves := sum(x.base == "R2UR" for run in runs for x in code[run[0] : run[-1]]):
        found.append(Fault("r2ur", f"{moves} R2UR inside WGMMA batches"))
    if reads := sum(x.base == "S2UR" for x in code[first:last]):
        found.append(Fault("s2ur", f"{reads} S2UR between the first and the last WGMMA"))
    return tuple(found)


def _wgmma_region(code: Code) -> Code:
    for start in (i for i, x in enumerate(code) if x.op.startswith("USETMAXREG")):
        region = [code[i] for i in sorted(reachable(code, start))]
        if any(x.is_wgmma for x in region):
            return region
    return code


def _early_waits(code: Code, runs: list[list[int]]) -> list[Fault]:
    waits = [i for i, x in enumerate(code) if x.op.startswith("WARPGROUP.DEPBAR")]
    found = []
    for here, there in itertools.pairwise(waits):
        before = [r for r in runs if r[-1] < here]
        if not code[here].operands.endswith("0x1") or len(before) < 2:
            continue
        expected = int(_shape(code[before[-2][0]])[0]) // 2  # of a block's 64 × N scores a thread of the warpgroup holds N / 2
        seen = sum(x.op == "MUFU.EX2" for x in code[here:there])
        if seen < 0.9 * expected:
            found.append(Fault("early-wait", f"{seen} of {expected} exponentials before the second wait"))
    return found


def _shape(wgmma: Instruction) -> tuple[str, str]:
    shape = _SHAPE.search(wgmma.op)
    if shape is None:
        raise InternalError(f"a WGMMA of unknown shape: {wgmma.op}")
    return shape[1], shape[2]

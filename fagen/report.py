"""What the compiler did with a plan: registers, spills, advisories and instruction counts, beside what was promised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from . import sass
from .errors import CompileError
from .plan.counts import expected_counts, wgmma_steps
from .plan.kernel import KernelPlan

ADVISORIES = frozenset({"C7504", "C7508", "C7509", *(f"C75{n}" for n in range(10, 19))})
"""ptxas remarks that always mean lost speed: setmaxnreg ignored (C7504, C7508) or WGMMA serialised (C7509 to C7518). C7519 also
speaks of serialisation, but NVRTC 13.0 prints it for kernels that are not serialised: it counts only if the SASS agrees."""
DOUBTFUL_ADVISORY = "C7519"

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ADVISORY = re.compile(r"\((C7[0-9]{3})\)(.*)")


@dataclass(frozen=True)
class KernelReport:
    """One kernel. Bytes are per thread for spills and stack, per CTA for shared memory."""

    name: str
    registers: int
    """A thread's registers at launch, as ptxas chose them."""
    registers_by_role: dict[str, int] | None
    """One more than the highest register that each role's code names; None if the SASS was not read."""
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    smem_bytes: int
    """Dynamic shared memory, from the plan."""
    advisories: tuple[str, ...]
    """Codes of ptxas remarks, such as C7510, in order."""
    sass: dict[str, int] | None
    """Instruction counts (`fagen.sass.COUNTED`); None if the SASS was not read."""
    expected: dict[str, int]
    """What the program implies, for the names that it settles."""
    serialised: bool | None
    """Whether the WGMMAs of one batch are waited for one by one; None if the SASS was not read."""
    faults: tuple[str, ...]
    """What else costs speed in the SASS, as "code: sentence"."""

    @property
    def differing(self) -> dict[str, tuple[int, int]]:
        """Counts that are not the program's: name → (in the SASS, expected)."""
        if self.sass is None:
            return {}
        return {n: (self.sass[n], want) for n, want in self.expected.items() if self.sass[n] != want}

    def broken(self, allow_spill_bytes: int = 0) -> tuple[str, ...]:
        """The promises that do not hold, a sentence each: spills, advisories, serialised batches, counts."""
        found = []
        if max(self.spill_stores, self.spill_loads, self.stack_bytes) > allow_spill_bytes:
            found.append(
                f"{self.spill_stores} bytes of spill stores, {self.spill_loads} of spill loads and "
                f"a stack of {self.stack_bytes} bytes a thread; allowed: {allow_spill_bytes}"
            )
        found += [f"ptxas advisory {code}" for code in dict.fromkeys(self.advisories) if code in ADVISORIES]
        if self.serialised:
            also = f" (advisory {DOUBTFUL_ADVISORY})" if DOUBTFUL_ADVISORY in self.advisories else ""
            found.append(f"WGMMA batches are serialised{also}")
        local = {"STL", "LDL"} if allow_spill_bytes else set()
        found += [
            f"{has} {name} in the SASS, {want} in the program" for name, (has, want) in self.differing.items() if name not in local
        ]
        return tuple(f"{self.name}: {x}" for x in found)


@dataclass(frozen=True)
class CompileReport:
    """All kernels of a plan; `seconds` is the compiler's time (a cache hit repeats that of the miss)."""

    arch: str
    compiler: str
    seconds: float
    kernels: tuple[KernelReport, ...]
    notes: tuple[str, ...]
    """What was not checked, and why."""

    @property
    def sass(self) -> dict[str, dict[str, int]] | None:
        """Instruction counts by kernel, or None if the SASS was not read."""
        counts = {k.name: k.sass for k in self.kernels if k.sass is not None}
        return counts if len(counts) == len(self.kernels) else None

    def broken(self, allow_spill_bytes: int = 0) -> tuple[str, ...]:
        """Broken promises of all kernels."""
        return tuple(x for k in self.kernels for x in k.broken(allow_spill_bytes))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "kernels": [_plain(k) for k in self.kernels], "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileReport:
        """Inverse of `to_dict`, exactly; KeyError or TypeError if it is not one."""
        kernels = tuple(KernelReport(**_tuples(k)) for k in data["kernels"])
        return cls(**{**data, "kernels": kernels, "notes": tuple(data["notes"])})


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}


def _plain(kernel: KernelReport) -> dict[str, Any]:
    return {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(kernel).items()}


@dataclass(frozen=True)
class Resources:
    """What the compiler's log says of one kernel."""

    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    advisories: tuple[str, ...]


def parse_log(log: str) -> dict[str, Resources]:
    """The compiler's log (`--ptxas-options=-v`) by kernel. A remark that names no kernel is counted for all of them."""
    advisories = [(m[1], m[2]) for m in _ADVISORY.finditer(log)]
    entries = list(_ENTRY.finditer(log))
    ends = [e.start() for e in entries[1:]] + [len(log)]
    out = {}
    for entry, end in zip(entries, ends):
        part, name = log[entry.end() : end], entry[1]
        frame, used = _FRAME.search(part), _REGISTERS.search(part)
        if frame is None or used is None:
            raise CompileError(f"the compiler's log does not tell the registers and spills of kernel {name!r}", log)
        mine = tuple(code for code, rest in advisories if f"'{name}'" in rest or not any(f"'{e[1]}'" in rest for e in entries))
        out[name] = Resources(int(used[1]), int(frame[1]), int(frame[2]), int(frame[3]), mine)
    return out


def kernel_report(kernel: KernelPlan, resources: Resources, code: sass.KernelSass | None) -> KernelReport:
    """Put the log's and the machine code's facts beside what the plan implies."""
    return KernelReport(
        name=kernel.name,
        registers=resources.registers,
        registers_by_role=_by_role(kernel, code.branches) if code else None,
        spill_stores=resources.spill_stores,
        spill_loads=resources.spill_loads,
        stack_bytes=resources.stack_bytes,
        smem_bytes=kernel.smem_bytes,
        advisories=resources.advisories,
        sass=code.counts if code else None,
        expected=expected_counts(kernel),
        serialised=sass.serialised(code.batches, wgmma_steps(kernel)) if code else None,
        faults=tuple(map(str, code.faults)) if code else (),
    )


def _by_role(kernel: KernelPlan, branches: tuple[sass.Branch, ...]) -> dict[str, int]:
    """Registers of each role: its branch is the one whose setmaxnreg asks for the role's count (in code order among equals).
    A kernel without setmaxnreg is one branch, which its roles share."""
    left = list(branches)
    out = {}
    for role in kernel.roles:
        branch = next((b for b in left if b.limit == role.registers), None)
        if branch is None:
            continue  # setmaxnreg is missing: the counts of USETMAXREG tell
        if branch.limit is not None:
            left.remove(branch)
        out[role.name] = branch.registers
    return out

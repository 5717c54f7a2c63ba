"""What `plan()` returns: `Plan` and its kernels, and `bind`, which turns a plan and the shapes of a call into a `Launch`.

Everything that depends on the call stands here as an `Expr` over these symbols
  batch, sq, sk, hq, hkv       sizes of the call
  q_sb, q_ss, q_sh             strides of q over batch, seq and head, in elements; likewise k_, v_, out_
  num_sms                      of the device
and the kernel's own parameters, which later expressions may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..attention import Attention
from ..errors import InputError, InternalError
from ..schedule import Schedule
from ..target import Target
from .expr import Expr
from .steps import DTYPE_BYTES, Gmem, MBar, NBar, Role, Smem

DESCALES = ("q_descale", "k_descale", "v_descale")
"""e4m3 and int8 only (which an attention has: `Attention.descales`): what q, k and v are multiplied by; of which dims is the schedule's scale_granularity (see `scales`)."""
STRIDED = ("q", "k", "v", "out")  # tensors whose strides are arguments; dims (batch, seq, heads, head_dim)


@dataclass(frozen=True)
class Problem:
    """The sizes of one call."""

    batch: int
    sq: int
    sk: int
    hq: int
    hkv: int

    @property
    def empty(self) -> bool:
        """Nothing to write: no launch."""
        return 0 in (self.batch, self.sq, self.hq)

    def __str__(self) -> str:
        return f"{self.batch},{self.hq},{self.hkv},{self.sq},{self.sk}"


TRACE_CTAS, TRACE_WORDS = 4, 131072
"""What a trace build records (see `fagen.trace`): so many CTAs, and so many words of each of their role instances."""
TRACE_HEADER_WORDS = 8
"""Of a lane in a trace buffer, behind what all lanes noted."""
TRACE_NOTE = "lane"
"""The tile in shared memory where an elected thread keeps its place in the trace buffer."""


def trace_buffer(kernel: str) -> str:
    """The workspace of a kernel's marks in a trace build."""
    return f"trace_{kernel}"


@dataclass(frozen=True)
class Param:
    """A scalar member of the kernel's Params struct: "i32" or "i64", computed on the host by `value`; "divisor", by whose `value` the
    kernel divides, handed over as multiplier and shift (`expr.division`); or "f32", whose `value` is a symbol that the call brings."""

    name: str
    ctype: str
    value: Expr


@dataclass(frozen=True)
class TensorMapRecipe:
    """How to encode a CUtensorMap (CUDA driver API, cuTensorMapEncodeTiled) for TMA loads of a (batch, seq, heads, dim) tensor.

    Five dims, innermost first: 128-byte chunk of columns, seq, chunk index, head, batch; so one instruction loads a whole tile in
    the chunked layout of `layout.swizzle`. `dims` in elements; `strides` in bytes, of dims 1 to 4. Rows past the end read as 0.
    """

    tensor: str
    dtype: str
    dims: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Workspace:
    """Global memory a kernel needs beside its tensors. `zeroed`: 0 before the first launch, and left 0 by every launch.

    `shape`: (batch, heads, rows, cols), row-major, of numbers; of counters ()."""

    name: str
    dtype: str
    count: Expr
    zeroed: bool
    shape: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class KernelPlan:
    """One kernel of a plan: its interface, memory, barriers, roles and programs."""

    name: str
    threads: int
    min_ctas: int
    """CTAs an SM must be able to hold (launch bounds)."""
    gmem: tuple[Gmem, ...]
    pointers: tuple[str, ...]
    """Gmem names passed as pointers in Params, in order, before the scalars."""
    params: tuple[Param, ...]
    """Scalars in Params: all i64 stand before all i32."""
    maps: tuple[TensorMapRecipe, ...]
    """Kernel arguments before Params, in order, named map_<tensor>."""
    smem: tuple[Smem, ...]
    mbars: tuple[MBar, ...]
    nbars: tuple[NBar, ...]
    smem_bytes: int
    roles: tuple[Role, ...]
    grid: Expr
    kinds: tuple[Expr, ...] = ()
    """Where CTAs differ in what they do: the first CTA of each kind but the first. The proof looks at one of each."""

    def smem_of(self, name: str) -> Smem:
        return next(s for s in self.smem if s.name == name)

    def gmem_of(self, name: str) -> Gmem:
        return next(g for g in self.gmem if g.name == name)

    def mbar_of(self, name: str) -> MBar:
        return next(b for b in self.mbars if b.name == name)

    def nbar_of(self, name: str) -> NBar:
        return next(b for b in self.nbars if b.name == name)


@dataclass(frozen=True)
class Plan:
    """A legal, proven kernel (or several, launched in order) for an attention under a schedule. Made by `plan()` only."""

    attention: Attention
    schedule: Schedule
    target: Target
    kernels: tuple[KernelPlan, ...]
    workspaces: tuple[Workspace, ...]
    debug: bool = False
    trace: bool = False
    without: str = ""
    """What a removal took away, "" of a plan that computes attention; see removal.py."""
    outputs: tuple[Workspace, ...] = ()
    """What a plan leaves that only quantises, in the place of out and lse."""

    def part(self, name: str) -> Plan:
        """The plan with some of its kernels, to launch them alone with the same workspaces: "quantise", those before the attention
        kernel; "attend", that one and what follows it."""
        at = next(i for i, k in enumerate(self.kernels) if k.name == "attention")
        parts = {"quantise": self.kernels[:at], "attend": self.kernels[at:]}
        return replace(self, kernels=parts[name])

    @property
    def id(self) -> str:
        """Names the pair everywhere: <attention id>-<schedule id>."""
        return f"{self.attention.id}-{self.schedule.id}" + (f"-without-{self.without}" if self.without else "")

    def bind(
        self,
        problem: Problem,
        strides: Mapping[str, tuple[int, int, int]],
        num_sms: int,
        seed: int = 0,
        descales: Mapping[str, tuple[int, ...] | float] | None = None,
        trace_first: int = 0,
        trace_count: int = TRACE_CTAS,
    ) -> Launch:
        """Evaluate everything that depends on the call. `strides[t]` for t in q, k, v, out: over batch, seq and head, in elements
        (of a V given transposed: over batch, head_dim and head). `descales[t]` for those given: the strides of an array, whose address
        goes into Params, or the number itself (address null); default 1. `seed`: of a debug build's delays; `trace_first`: the first
        CTA that a trace build records; `trace_count`: how many write marks, which can be read if no two share a lane.

        Raises InputError where a size is outside what the kernel's 32-bit tile arithmetic or the grid can hold.
        """
        env: dict[str, int] = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")}
        if problem.hkv and problem.hq % problem.hkv:
            near = [n for n in range(1, problem.hq + 1) if problem.hq % n == 0]
            raise InputError("k", f"{problem.hq} query heads are not a multiple of {problem.hkv} KV heads; legal: {near}")
        for name, what in (("sq", "seqlen_q"), ("sk", "seqlen_k"), ("batch", "batch"), ("hq", "heads")):
            if not 0 <= env[name] < 1 << 30:
                raise InputError("k" if name == "sk" else "q", f"{what} {env[name]} is outside 0 … 2^30 − 1")
        env |= {"num_sms": num_sms, "seed": seed, "trace_first": trace_first, "trace_count": trace_count}
        numbers: dict[str, float] = {}
        for name in DESCALES:
            given = (descales or {}).get(name, 1.0)
            # Only those of (batch, kv_heads) arrays are parameters; those of blocks follow from the sizes.
            sb, sh = given if isinstance(given, tuple) and len(given) == 2 else (0, 0)
            env |= {f"{name}_sb": sb, f"{name}_sh": sh}
            numbers[f"{name}_value"] = 1.0 if isinstance(given, tuple) else float(given)
        for tensor in STRIDED:
            env |= dict(zip((f"{tensor}_sb", f"{tensor}_ss", f"{tensor}_sh"), strides[tensor]))
        launches = []
        for k in self.kernels:
            scope = dict(env)
            for p in k.params:
                if p.ctype == "f32":
                    continue
                scope[p.name] = p.value.eval(scope)
                limit = 1 << (63 if p.ctype == "i64" else 31)
                if not -limit <= scope[p.name] < limit:
                    raise InputError("q", f"{p.name} = {scope[p.name]} does not fit {p.ctype}: the problem {problem} is too large")
            grid = k.grid.eval(scope)
            if not 0 < grid < 1 << 31:
                raise InputError("q", f"a grid of {grid} CTAs is outside 1 … 2^31 − 1 (the problem {problem})")
            maps = tuple(
                TensorMap(r.tensor, r.dtype, tuple(d.eval(scope) for d in r.dims), tuple(s.eval(scope) for s in r.strides), r.box)
                for r in k.maps
            )
            scalars = tuple(numbers[p.name] if p.ctype == "f32" else scope[p.name] for p in k.params)
            launches.append(KernelLaunch(k.name, grid, k.threads, k.smem_bytes, scalars, maps))
        sizes = tuple((w.name, w.count.eval(env) * DTYPE_BYTES[w.dtype], w.zeroed) for w in self.workspaces)
        return Launch(problem, tuple(launches), sizes)


@dataclass(frozen=True)
class TensorMap:
    """A `TensorMapRecipe` with its numbers."""

    tensor: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel's launch: 1-D grid and block, and the values of Params' scalars in order."""

    name: str
    grid: int
    block: int
    smem_bytes: int
    scalars: tuple[int | float, ...]
    maps: tuple[TensorMap, ...]


@dataclass(frozen=True)
class Launch:
    """A plan bound to a call: kernels in order, and workspaces as (name, bytes, zeroed)."""

    problem: Problem
    kernels: tuple[KernelLaunch, ...]
    workspaces: tuple[tuple[str, int, bool], ...]


def scalar_env(kernel: KernelPlan, launch: KernelLaunch) -> dict[str, int]:
    """The values of a kernel's integer parameters by name, as its steps' expressions see them (with n_ctas)."""
    if kernel.name != launch.name:
        raise InternalError(f"launch of {launch.name!r} does not belong to kernel {kernel.name!r}")
    named = zip((p.name for p in kernel.params), launch.scalars)
    return {name: value for name, value in named if isinstance(value, int)} | {"n_ctas": launch.grid}

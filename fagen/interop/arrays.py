"""`Array`, a tensor argument as a kernel sees it, and the checks that q, k, v, out, lse and descales fit an attention and one another.

Nothing here knows a framework or touches a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from ..attention import Attention
from ..descales import Form, check_form
from ..errors import InputError
from ..plan.kernel import DESCALES, Problem
from ..plan.steps import DTYPE_BYTES

DTYPE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "e4m3",
    "int8": "int8",
    "float32": "fp32",
}
"""Names that NumPy, ml_dtypes, torch, CuPy and JAX share → ours."""
FRAMEWORK_NAMES = {ours: theirs for theirs, ours in DTYPE_NAMES.items()}

ALIGNMENT = 16
"""Bytes: of TMA's addresses and strides, and of the widest vector load."""

_DIMS = {
    "q": ("batch", "seqlen_q", "heads", "head_dim"),
    "k": ("batch", "seqlen_k", "kv_heads", "head_dim"),
    "v": ("batch", "seqlen_k", "kv_heads", "head_dim_v"),
    "out": ("batch", "seqlen_q", "heads", "head_dim_v"),
    "lse": ("batch", "heads", "seqlen_q"),
}
_V_TRANSPOSED = ("batch", "kv_heads", "head_dim_v", "seqlen_k")


def dims_of(name: str, v_transposed: bool = False) -> tuple[str, ...]:
    """What the dimensions of an argument are. `v_transposed`: the kernel takes V so (`Schedule.v_transposed`)."""
    return _V_TRANSPOSED if v_transposed and name == "v" else _DIMS[name]


@dataclass(frozen=True)
class Array:
    """A tensor in device memory. `strides` in elements; `dtype` ours ("bf16" …) or, if unknown to us, the framework's name."""

    name: str
    device: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ptr: int
    readonly: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)


class Framework(Protocol):
    """What a launch needs of the library that owns the tensors."""

    @property
    def name(self) -> str:
        """As the messages call it."""

    def device(self, name: str, obj: Any) -> int:
        """Ordinal of the CUDA device that holds the tensor; an InputError naming the argument if none does."""

    def stream(self, device: int) -> int:
        """Handle of the stream on which the library works now."""

    def describe(self, name: str, obj: Any, stream: int) -> tuple[Array, Any]:
        """The tensor as an Array whose data `stream` may use, and an object that must live until the launch."""

    def empty(self, name: str, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """A new uninitialised tensor on the device of `like`; `name` for messages."""

    def check_output(self, name: str, obj: Any) -> None:
        """An InputError if the library forbids writing into the tensor."""

    def finish(self, stream: int) -> None:
        """After the launch: wait, if the library cannot order its own work after the stream."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements; zero sizes count as one."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides))


def effective_strides(shape: tuple[int, ...], strides: tuple[int, ...], padded_to: int = 1) -> tuple[int, ...]:
    """The strides that matter: those of dimensions with one element (or of an empty tensor) are replaced by row-major ones, of rows
    padded to a multiple of `padded_to` elements."""
    plain = contiguous_strides((*shape[:-1], -(-max(shape[-1], 1) // padded_to) * padded_to))
    if 0 in shape:
        return plain
    return tuple(p if n == 1 else s for n, s, p in zip(shape, strides, plain))


def output_shapes(attention: Attention, problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of out and lse."""
    return {
        "out": (problem.batch, problem.sq, problem.hq, attention.dv),
        "lse": (problem.batch, problem.hq, problem.sq),
    }


def check(
    attention: Attention,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array | None,
    *,
    v_transposed: bool = False,
    descales: Mapping[str, Array] | None = None,
    forms: Callable[[Problem], Mapping[str, Form]] | None = None,
) -> tuple[Problem, dict[str, tuple[int, int, int]]]:
    """The sizes of the call, and the strides over (batch, seq, heads) of q, k, v and out in elements, as `Plan.bind` takes them (of a V
    given transposed: over batch, head_dim and head).

    None for out or lse: it will be allocated row-major. `descales`: those that are arrays; `forms` says of which form they must be (as
    `descales.forms` does). Raises InputError naming the first argument that does not fit, with both values. Pointers are not looked at
    (see `check_pointers`).
    """
    given = {a.name: a for a in (q, k, v, out, lse) if a is not None}
    for name, a in given.items():
        dims = dims_of(name, v_transposed)
        if len(a.shape) != len(dims):
            raise InputError(name, f"has {len(a.shape)} dimensions {a.shape}; expected {len(dims)}: ({', '.join(dims)})")
        if a.device != q.device:
            raise InputError(name, f"is on cuda:{a.device}, q on cuda:{q.device}")
        wanted = "fp32" if name == "lse" else attention.dtype_of(name)
        if a.dtype != wanted:
            raise InputError(name, f"is {a.dtype}; this kernel {'writes' if name in ('out', 'lse') else 'reads'} {wanted}")
    problem = _problem(attention, q, k, v, v_transposed)
    form_of = forms(problem) if descales and forms is not None else {}
    for name, a in (descales or {}).items():
        if a.device != q.device:
            raise InputError(name, f"is on cuda:{a.device}, q on cuda:{q.device}")
        if a.dtype != "fp32":
            raise InputError(name, f"is {a.dtype}; a descale is fp32")
        form = form_of[name]
        check_form(name, a.shape, form)
        if form.contiguous and effective_strides(a.shape, a.strides) != contiguous_strides(a.shape):
            raise InputError(name, f"must be contiguous; shape {a.shape} has strides {a.strides}")
    for name, shape in output_shapes(attention, problem).items():
        if name in given and given[name].shape != shape:
            raise InputError(name, f"has shape {given[name].shape}; expected {shape} ({', '.join(_DIMS[name])})")
    if not problem.empty:
        check_layouts(given, v_transposed)
    strides = {"out": contiguous_strides(output_shapes(attention, problem)["out"])}
    strides |= {n: _strides(a) for n, a in given.items() if n != "lse"}
    if v_transposed:
        sb, sh, sd, _ = strides["v"]
        strides["v"] = (sb, sd, sh)
    return problem, {n: (s[0], s[1], s[2]) for n, s in strides.items()}


def _strides(a: Array) -> tuple[int, ...]:
    """Effective ones, which TMA takes."""
    return effective_strides(a.shape, a.strides, ALIGNMENT // DTYPE_BYTES[a.dtype])


def _problem(attention: Attention, q: Array, k: Array, v: Array, v_transposed: bool) -> Problem:
    batch, sq, hq, _ = q.shape
    _, sk, hkv, _ = k.shape
    expected = {
        "q": (batch, sq, hq, attention.head_dim),
        "k": (batch, sk, hkv, attention.head_dim),
        "v": (batch, hkv, attention.dv, sk) if v_transposed else (batch, sk, hkv, attention.dv),
    }
    other = (batch, sk, hkv, attention.dv) if v_transposed else (batch, hkv, attention.dv, sk)
    if v.shape == other != expected["v"]:
        layout = "needs V transposed:" if v_transposed else "takes V as"
        raise InputError(
            "v", f"has shape {v.shape}; this kernel {layout} ({', '.join(dims_of('v', v_transposed))}) = {expected['v']}"
        )
    whose = {"batch": "q's", "seqlen_k": "k's", "kv_heads": "k's", "head_dim": "the kernel's", "head_dim_v": "the kernel's"}
    for a in (q, k, v):
        for dim, have, want in zip(dims_of(a.name, v_transposed), a.shape, expected[a.name]):
            if have != want:
                raise InputError(a.name, f"has {dim} {have}, but {whose[dim]} is {want} (shape {a.shape})")
    if hq % hkv if hkv else hq:
        legal = [n for n in range(1, hq + 1) if hq % n == 0]
        raise InputError("k", f"has {hkv} KV heads; q's {hq} heads are not a multiple of that (legal: {legal})")
    return Problem(batch, sq, sk, hq, hkv)


def check_layouts(given: Mapping[str, Array], v_transposed: bool) -> None:
    """An InputError naming the first tensor whose strides no kernel takes."""
    for name, a in given.items():
        if name == "lse":
            if effective_strides(a.shape, a.strides) != contiguous_strides(a.shape):
                raise InputError(name, f"must be contiguous; shape {a.shape} has strides {a.strides}")
            continue
        strides = _strides(a)
        if strides[-1] != 1:
            raise InputError(
                name, f"the last dimension has stride {strides[-1]}; it must be contiguous (shape {a.shape}, strides {a.strides})"
            )
        for dim, s in zip(dims_of(name, v_transposed), strides[:-1]):
            nbytes = s * DTYPE_BYTES[a.dtype]
            if s < 0:
                raise InputError(name, f"{dim} has the negative stride {s} (strides {a.strides}); make a contiguous copy")
            if nbytes % ALIGNMENT:
                hint = f"; allocate the rows of seqlen_k {a.shape[3]} longer" if v_transposed and name == "v" else ""
                raise InputError(
                    name,
                    f"{dim} has stride {s}, {nbytes} bytes; it must be a multiple of {ALIGNMENT} bytes (strides {a.strides}){hint}",
                )
        if name == "out" and _may_overlap(a.shape, strides):
            raise InputError(name, f"has elements that share memory: shape {a.shape}, strides {a.strides}")


def _may_overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements may share memory: some stride does not step over all that the smaller strides reach."""
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(strides, shape) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def check_pointers(**pointers: int) -> None:
    """An InputError for the first of q, k, v, out that is not 16-byte aligned, or an lse or descale that is not 4-byte aligned."""
    for name, ptr in pointers.items():
        alignment = 4 if name == "lse" or name in DESCALES else ALIGNMENT
        if ptr % alignment:
            raise InputError(name, f"its data begins at {ptr:#x}, {ptr % alignment} bytes past a multiple of {alignment}")

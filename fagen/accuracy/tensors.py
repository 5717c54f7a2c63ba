"""Tensors of an accuracy table: random ones with outliers, or a file's; and what of them a recipe's kernel is given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast as typed

import numpy as np
import numpy.typing as npt

from .. import npz
from ..attention import Attention
from ..descales import Descales
from ..errors import InputError
from ..oracle.numeric import DTYPES, F32, Array, cast
from ..oracle.quantise import Quantiser, lse_shift, quantise
from ..plan.kernel import DESCALES, Problem

HALF_NAMES = {DTYPES[name]: name for name in ("fp16", "bf16")}


@dataclass(frozen=True)
class RandomSource:
    """Random tensors of a seed, with outliers. The reference is of the float32 numbers; kernels get them in fp16."""

    problem: Problem
    head_dim: int
    seed: int
    v_mean: float = 0.0
    """Added to V, whose weighted sums then grow with the keys; of V around 0 they do not."""

    @property
    def text(self) -> str:
        shift = f", V + {self.v_mean:g}" if self.v_mean else ""
        return f"N(0, 1) + N(0, 100) · Bernoulli(0.001){shift}, seed {self.seed}"

    @property
    def dtype(self) -> str:
        return "fp16"

    def tensors(self) -> tuple[Array, Array, Array]:
        rng, p = np.random.default_rng((self.seed, 4)), self.problem
        rows = ((p.sq, p.hq), (p.sk, p.hkv), (p.sk, p.hkv))
        q, k, v = (with_outliers(rng, (p.batch, *r, self.head_dim)) for r in rows)
        return q, k, v + np.float32(self.v_mean)


OUTLIERS, OUTLIER_STD = 0.001, np.float32(10)
"""Share of the elements that are outliers, and the standard deviation of what is added to them: those of the paper."""


def with_outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> F32:
    x: F32 = rng.standard_normal(shape, np.float32)
    hit = rng.random(shape, np.float32) < OUTLIERS
    x[hit] += OUTLIER_STD * rng.standard_normal(np.count_nonzero(hit), np.float32)
    return x


@dataclass(frozen=True)
class FileSource:
    """q, k and v of an .npz file, fp16 or bf16 (see `fagen.npz`)."""

    path: str

    @property
    def text(self) -> str:
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in self.tensors())).hexdigest()
        return f"{Path(self.path).name}, sha256 of its tensors {digest[:16]}"

    @property
    def dtype(self) -> str:
        return HALF_NAMES[self.tensors()[0].dtype]

    def tensors(self) -> tuple[Array, Array, Array]:
        return _read(self.path)


@lru_cache(maxsize=1)
def _read(path: str) -> tuple[Array, Array, Array]:
    arrays = npz.read(path, ("q", "k", "v"))
    for name, x in arrays.items():
        if x.dtype not in HALF_NAMES:
            raise InputError(path, f"{name} is {x.dtype}; the table compares kernels on fp16 or bf16 tensors")
        if x.dtype != arrays["q"].dtype:
            raise InputError(path, f"{name} is {x.dtype}, q {arrays['q'].dtype}; all must be of one type")
    return arrays["q"], arrays["k"], arrays["v"]


Source = RandomSource | FileSource


@dataclass(frozen=True)
class Part:
    """Query rows first … last − 1 of a head: what the simulator runs, and what a prediction speaks of."""

    batch: int
    head: int
    first: int
    last: int


@dataclass(frozen=True)
class Given:
    """What a kernel gets. `shift` (batch, heads, seqlen_q) is to be added to its lse, 0 but with smooth_k."""

    q: Array
    k: Array
    v: Array
    descales: Descales
    shift: F32 | None

    def part(self, part: Part, tile_q: int, tile_kv: int, causal: bool) -> Given:
        """The same for some rows of a head as a problem of its own, of one batch and one head; `first` is a multiple of tile_q.
        Under a causal mask keys that no row sees are left out, which keeps it aligned bottom-right."""
        b, kv = slice(part.batch, part.batch + 1), part.head // (self.q.shape[2] // self.k.shape[2])
        heads, kv_heads, rows = slice(part.head, part.head + 1), slice(kv, kv + 1), slice(part.first, part.last)
        keys = self.k.shape[1]
        seen = slice(0, max(0, min(keys, part.last + keys - self.q.shape[1])) if causal else keys)
        of_q = (heads, slice(part.first // tile_q, -(-part.last // tile_q)))
        of_kv = (kv_heads, slice(0, -(-seen.stop // tile_kv)))
        cut = {}
        for name in DESCALES:
            scale = self.descales.get(name)
            if isinstance(scale, np.ndarray) and scale.ndim == 2:
                scale = scale[b, kv_heads]
            elif isinstance(scale, np.ndarray) and scale.ndim == 3:
                own, which = of_q if name == DESCALES[0] else of_kv
                scale = np.ascontiguousarray(scale[b, own, which])
            if scale is not None:
                cut[name] = scale
        shift = None if self.shift is None else self.shift[b, heads, rows]
        return Given(self.q[b, rows, heads], self.k[b, seen, kv_heads], self.v[b, seen, kv_heads], typed(Descales, cut), shift)


def in_half(source: Source) -> tuple[Array, Array, Array]:
    """The tensors as a caller has them in memory: of the source's 16-bit type."""
    q, k, v = (cast(x, source.dtype) for x in source.tensors())
    return q, k, v


def given(quantiser: Quantiser | None, attention: Attention, q: Array, k: Array, v: Array) -> Given:
    """The inputs of a kernel that computes `attention`, from tensors in 16 bits; with a quantiser, 8-bit ones and descales. InputError for what it
    cannot quantise."""
    if quantiser is None:
        return Given(q, k, v, {}, None)
    z = quantise(q, k, v, quantiser)
    shift = None if z.k_mean is None else lse_shift(q, z.k_mean, attention.softmax_scale)
    descales = {n: x for n, x in zip(DESCALES, (z.q_descale, z.k_descale, z.v_descale)) if x is not None}
    return Given(z.q, z.k, z.v, typed(Descales, descales), shift)


def parts(problem: Problem, rows: int, count: int, seed: int) -> tuple[Part, ...]:
    """`count` pieces of `rows` query rows (fewer at the end of a sequence), chosen by the seed, in order."""
    per_head = -(-problem.sq // rows)
    total = problem.batch * problem.hq * per_head
    rng = np.random.default_rng((seed, 2))
    chosen: npt.NDArray[np.int64] = np.sort(rng.choice(total, min(count, total), replace=False))
    out = []
    for n in chosen.tolist():
        head, piece = divmod(n, per_head)
        batch, head = divmod(head, problem.hq)
        out.append(Part(batch, head, piece * rows, min(problem.sq, (piece + 1) * rows)))
    return tuple(out)

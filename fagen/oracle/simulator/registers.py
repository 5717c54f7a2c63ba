"""Register tiles, and the WGMMA products that hold them while in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...plan.steps import Frag
from ..numeric import F32, Array, tensor_core
from .machine import SharedSlot, SimulatedFault


class Register:
    """A `Frag` of one role instance as a 2-D float32 array (a row vector: one column). NaN before its first write.

    While a product in flight uses it, steps read NaN; after an MmaWait names it, they read what it held, or the product's result.
    A write in between spoils the register and the product.
    """

    def __init__(self, frag: Frag):
        self.name = frag.name
        self.dtype = frag.dtype
        self.shape = (frag.rows, frag.cols)
        self._value: Array = self.nan()
        self._source: SharedOperand | None = None
        self._kept: Array | Product = self._value
        self._users: list[Product] = []
        self._spoiled = False

    @property
    def value(self) -> Array:
        """What it holds. A load on its way arrives: of what the slot had when it was asked and has now, what is the same."""
        if self._source is not None:
            now, self._source = self._source.now(), None
            self._value = np.where(now == self._value, self._value, np.float32(np.nan))
        return self._value

    @value.setter
    def value(self, value: Array) -> None:
        self._value, self._source = value, None

    def load(self, source: SharedOperand) -> None:
        """A load from shared memory, which may read at any time until its value is used."""
        self.write(source.now().copy())
        self._source = source

    def nan(self) -> Array:
        return np.full(self.shape, np.nan, np.float32)

    def write(self, value: Array) -> None:
        if self._users:
            self._spoiled = True
            for product in self._users:
                product.spoiled = True
        else:
            self.value = value

    def lend(self, product: Product, *, as_result: bool) -> Array | Product:
        """Hand the tile to a product: as its accumulator (`as_result`) or as its A operand. Returns what the product finds in it."""
        content = self._kept if self._users else self.value
        self._kept = product if as_result else content
        self._users.append(product)
        self.value = self.nan()
        return content

    def settle(self) -> None:
        """An MmaWait has named it: readable again, unless a product that uses it is still open."""
        if not self._users or any(p.result is None for p in self._users):
            return
        kept = self._kept.result if isinstance(self._kept, Product) else self._kept
        assert kept is not None
        self.value = self.nan() if self._spoiled else kept
        self._users.clear()
        self._spoiled = False


@dataclass
class SharedOperand:
    """A tile (or its `rows` from `first`, `cols` from `col`) that a product reads at some moment until it completes."""

    slot: SharedSlot
    first: int
    rows: int
    col: int
    cols: int

    def __post_init__(self) -> None:
        self._version = self.slot.version
        self._visible = not self.slot.unfenced

    def now(self) -> Array:
        """What the tile holds at this moment: a synchronous reader's view."""
        part: Array = self.slot.data[self.first : self.first + self.rows, self.col : self.col + self.cols]
        return part

    def read(self) -> Array:
        """What a product reads: NaN if the slot has changed since the product was issued, or was not visible to it."""
        data = self.now()
        if self._visible and self._version == self.slot.version:
            return data
        return np.full(data.shape, np.nan, np.float32)


class Product:
    """One WGMMA group: d (+)= a · b. Computed when it completes, from what its operands hold then; `result` is None until then."""

    def __init__(
        self,
        step: str,
        d: Register,
        a: Register | SharedOperand,
        b: SharedOperand,
        *,
        accumulate: bool,
        trans_b: bool,
        exact_sums: bool = False,
    ) -> None:
        self._step, self._shape, self._trans_b, self._b = step, d.shape, trans_b, b
        self._exact_sums = exact_sums
        self.spoiled = False
        self.result: Array | None = None
        self._a = a.lend(self, as_result=False) if isinstance(a, Register) else a
        before = d.lend(self, as_result=True)
        self._c = before if accumulate else None

    def complete(self) -> None:
        """The hardware is done with it (groups complete in the order of their issue)."""
        a = self._a.read() if isinstance(self._a, SharedOperand) else _content(self._a)
        c = None if self._c is None else _content(self._c)
        if self.spoiled:
            self.result = np.full(self._shape, np.nan, np.float32)
        else:
            self.result = multiply(
                self._step, self._shape, a, self._b.read(), self._trans_b, c, self._b.slot.dtype, self._exact_sums
            )


def _content(x: Array | Product) -> Array:
    if isinstance(x, Product):
        assert x.result is not None
        return x.result
    return x


def multiply(
    step: str,
    shape: tuple[int, int],
    a: Array,
    b: Array,
    trans_b: bool,
    c: Array | None,
    dtype: str = "fp32",
    exact_sums: bool = False,
) -> F32:
    """c + a · b as the tensor core sums products of `dtype`; b is [n][k], with `trans_b` [k][n]."""
    n, k = b.shape[::-1] if trans_b else b.shape
    if a.shape != (shape[0], k) or n != shape[1]:
        raise SimulatedFault(f"{step}: {a.shape} · {(k, n)} does not give {shape}")
    d: F32 = tensor_core(a, b if trans_b else b.T, dtype, terms=exact_sums, start=c)
    return d

"""The rotation of Q and K before they are rounded to 8 bits (incoherent processing): signs, then Hadamard butterflies.

A column of Q or K that is far larger than the rest takes the whole range of e4m3. The rotation R = H · D spreads each row over all
its columns: D flips the signs of some columns, H is the Hadamard matrix. (R q) · (R k) = head_dim · (q · k), so scores need no
correction but a factor, which goes into the descales: head_dim ** −0.5 each. Idea: QuIP (arXiv 2307.13304), FlashAttention-3
(arXiv 2407.08608, section 3.3).

Kernels, simulator and oracle take signs and order of summation from here.
"""

from __future__ import annotations

from functools import lru_cache

_WORD = (1 << 64) - 1


@lru_cache(maxsize=8)
def signs(head_dim: int) -> tuple[int, ...]:
    """The diagonal of D: +1 or −1 for each column, a fixed pseudo-random pattern of the head_dim.

    Column i takes the lowest bit of the mixed 64-bit word (head_dim · 2^16 + i + 1) · 0x9E3779B97F4A7C15 (the SplitMix64 generator's
    increment and output function: Steele, Lea, Flood, OOPSLA 2014). Any regular pattern would do worse: a row of H is one, and D
    would only permute the rows.
    """
    return tuple(1 - 2 * (_mixed(((head_dim << 16) + i + 1) * 0x9E3779B97F4A7C15 & _WORD) & 1) for i in range(head_dim))


def _mixed(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
    return z ^ (z >> 31)


def butterfly_strides(head_dim: int) -> tuple[int, ...]:
    """Distances between the two columns of a butterfly (a, b) → (a + b, a − b), stage by stage: 1, 2, 4, … head_dim / 2.

    Float32 sums depend on their order: nearest columns first, so that a thread which holds neighbours begins within its registers.
    head_dim: a power of 2.
    """
    return tuple(1 << i for i in range(head_dim.bit_length() - 1))

"""Third layer: fields together, of kernels that multiply by WGMMA."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import Violation
from ...schedule import Schedule
from .common import lacking


def wgmma(s: Schedule) -> Iterator[Violation]:
    if s.warps is not None:
        yield Violation("warps", "warps", f"{s.warps} given, but a wgmma kernel is sized by `consumers`", (None,))
    if s.consumers is None:
        yield Violation("consumers", "consumers", "a wgmma kernel needs the number of warpgroups that compute", (1, 2, 3, 4))
    elif s.tile_q != 64 * s.consumers:
        message = f"{s.tile_q} is not 64 rows for each of {s.consumers} warpgroups"
        yield Violation("tile-q", "tile_q", message, (64 * s.consumers,))
    if s.roles == "uniform":
        if s.overlap not in ("none", "within"):
            yield Violation("overlap", "overlap", f"{s.overlap!r} needs roles 'producer'", ("none", "within"))
        if s.registers is not None:
            yield Violation(
                "registers", "registers", f"{s.registers} given, but uniform roles keep what they are launched with", (None,)
            )
    elif s.overlap in ("pingpong", "both") and s.consumers == 1:
        yield Violation(
            "overlap", "overlap", f"{s.overlap!r} takes turns between at least 2 consumers, there is 1", ("none", "within")
        )
    if s.reference == "stale" and s.overlap not in ("within", "both"):
        message = (
            f"a stale reference saves time where the softmax runs under the warpgroup's own product, not with overlap {s.overlap!r}"
        )
        yield Violation("reference", "reference", message, ("running",))
    if s.fuse_tiles:
        missing = lacking(s, parallelism="persistent_dynamic", roles="producer", reference="stale")
        if missing:
            message = f"joins one tile to the next, which needs {missing}"
            yield Violation("fuse-tiles", "fuse_tiles", message, (False,))
    if s.parallelism == "batch_heads":
        legal = ("query_tiles", "persistent_static", "persistent_dynamic")
        yield Violation("parallelism", "parallelism", "'batch_heads' is for mma_sync kernels", legal)
    for field, mine in (("loop_order", "q_outer"), ("partition", "split_q"), ("normalise", "once")):
        if getattr(s, field) != mine:
            yield Violation(field.replace("_", "-"), field, f"{getattr(s, field)!r} is for mma_sync kernels", (mine,))

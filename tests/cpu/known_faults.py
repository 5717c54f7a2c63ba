"""What `fagen.sass.faults` finds in kernels that are as fast as they can be, and why it may stay. Everything else is a regression."""

from __future__ import annotations

from fagen.compile import Built

ALLOWED_R2UR = {
    # (dtype, head_dim, mask, fuse_tiles): (at most so many R2UR inside WGMMA batches, why they cost nothing)
    ("16-bit", 64, "causal", True): (8, "a CTA's first tile is decoded between the products of its first block: once a CTA"),
    ("16-bit", 64, "causal", False): (1, "a descriptor of a tile's first product, once a tile"),
    ("16-bit", 128, "causal", True): (8, "as at head_dim 64"),
    ("16-bit", 256, "causal", True): (8, "as at head_dim 64"),
    ("16-bit", 256, "full", False): (8, "tiles in a fixed order: the descriptors of a tile's first product, once a tile"),
    ("8-bit", 64, "full", True): (
        2,
        "a descriptor of a tile's first product, once a tile; timed faster than tiles that do not join",
    ),
    ("8-bit", 128, "full", True): (2, "as at head_dim 64"),
    ("8-bit", 128, "causal", True): (2, "as at head_dim 64, once a tile"),
    ("8-bit", 256, "full", True): (1, "as at head_dim 64"),
}
EARLY_WAIT = (
    "with a running maximum ptxas moves the wait for the products up, in front of the exponentials; pinned where the program has it, "
    "fa3 was slower (731 against 757 TFLOP/s at head_dim 128): the registers that this takes cost more"
)


def unexpected_faults(built: Built) -> list[str]:
    """The faults of a kernel that stand in no list here."""
    a, s = built.plan.attention, built.plan.schedule
    r2ur, _ = ALLOWED_R2UR.get(("8-bit" if a.has_descales else "16-bit", a.head_dim, a.mask, s.fuse_tiles), (0, ""))
    found = []
    for text in (f for kernel in built.report.kernels for f in kernel.faults):
        code, _, message = text.partition(": ")
        if code == "r2ur" and int(message.split()[0]) <= r2ur:
            continue
        if code == "early-wait" and s.reference == "running":
            continue  # EARLY_WAIT
        if code == "early-wait" and a.has_descales and s.fuse_tiles:
            continue  # where a tile joins the next, once a tile; timed faster than tiles that do not join
        found.append(text)
    return found

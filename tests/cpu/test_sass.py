"""Reading machine code: listings by hand for every fault, and two small kernels compiled and disassembled."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from fagen import sass
from fagen.errors import CompileError
from fagen.nvrtc import compile_cubin

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")


def listing(*kernels: tuple[str, str]) -> str:
    """An `nvdisasm -c` listing of kernels given as one instruction or label a line."""
    out = ["\t.target\tsm_90a"]
    for name, body in kernels:
        out += ["", f'\t.section\t.text.{name},"ax",@progbits', f"        .global         {name}", f"{name}:", f".text.{name}:"]
        for n, line in enumerate(x.strip() for x in body.strip().splitlines()):
            out.append(line if line.endswith(":") else f"        /*{16 * n:04x}*/                   {line} ;")
    return "\n".join(out)


def code(body: str) -> tuple[sass.Instruction, ...]:
    return sass.parse(listing(("k", body)))["k"]


def wgmma(n: int, accumulator: int = 24, columns: int = 128) -> str:
    return f"HGMMA.64x{columns}x16.F32.BF16 R{accumulator}, gdesc[UR8], R{accumulator}, gsb0\n" * n


BATCH = "WARPGROUP.ARRIVE\n" + wgmma(8)
EX2 = "MUFU.EX2 R24, R24\n"


def test_parse_predicates_operands_and_targets() -> None:
    k = sass.parse(
        listing(
            ("f", ".L_x_1:\nSYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR14], R3\n@!P1 BRA `(.L_x_1)\nEXIT"),
            ("g", "@P0 BRA `(.L_x_2)\nFADD R1, R2, R3\n.L_x_2:\nEXIT\n"),
        )
    )
    assert set(k) == {"f", "g"}
    assert k["f"][1] == sass.Instruction("@!P1", "BRA", "`(.L_x_1)", 0)
    assert k["f"][2] == sass.Instruction("", "EXIT", "")
    assert k["g"][0].target == 2


def test_counts_by_opcode_and_modifiers() -> None:
    found = sass.counts(
        code("""
        LDG.E.128.CONSTANT R4, desc[UR6][R2.64]
        LDG.E.64 R4, desc[UR6][R2.64]
        BAR.SYNC.DEFER_BLOCKING 0x0
        BAR.ARV R3, 0x100
        @P0 HMMA.16816.F32.BF16 R4, R8, R2, R4
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24
        QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24
        WARPGROUP.DEPBAR.LE gsb0, 0x1
        WARPGROUP.ARRIVE
        STL.64 [R1], R2
        LDL.LU R2, [R1]
        LDGSTS.E.BYPASS.128 [R3], desc[UR6][R2.64]
        UTMALDG.5D [UR8], [UR4], desc[UR6]
        USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0
        MUFU.EX2 R2, R2
        MUFU.RCP R2, R2
        LDSM.16.MT88.4 R4, [R3]
        SHFL.BFLY PT, R2, R2, 0x1, 0x1f
        R2UR UR4, R2
        EXIT""")
    )
    once = {"LDG.E.128", "BAR.SYNC", "BAR.ARV", "HMMA", "HGMMA", "QGMMA", "WARPGROUP.DEPBAR", "WARPGROUP.ARRIVE", "STL", "LDL"}
    once |= {"LDGSTS", "UTMALDG", "USETMAXREG", "MUFU.EX2", "LDSM", "SHFL", "R2UR"}
    assert found == {name: 2 if name == "BAR" else int(name in once) for name in sass.COUNTED}


def test_registers_by_branch_follow_jumps_not_the_order_of_code() -> None:
    branches = sass.branches(
        code("""
        MOV R99, R1
        @P0 BRA `(.L_x_9)
        USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0
        FADD R203, R2, R3
        @P1 BRA `(.L_x_8)
        .L_x_7:
        EXIT
        .L_x_9:
        USETMAXREG.DEALLOC.CTAPOOL 0x18
        @P2 EXIT
        UIADD3 UR250, UR250, 0x1, URZ
        MOV R11, R2
        EXIT
        .L_x_8:
        FADD R230, R2, R3
        BRA `(.L_x_7)
        """)
    )
    assert branches == (sass.Branch(240, 231), sass.Branch(24, 12))


def test_without_setmaxnreg_the_kernel_is_one_branch() -> None:
    assert sass.branches(code("FADD R203, R2, R3\nEXIT")) == (sass.Branch(None, 204),)
    assert sass.branches(code("NOP\nEXIT")) == (sass.Branch(None, 0),)


def test_batches_end_at_warpgroup_instructions_and_at_another_shape() -> None:
    two = code(BATCH + BATCH + "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert [len(b) for b in sass.wgmma_batches(two)] == [8, 8]
    shapes = code("WARPGROUP.ARRIVE\n" + wgmma(4, columns=176) + wgmma(11))
    assert [len(b) for b in sass.wgmma_batches(shapes)] == [4, 11]
    apart = code("WARPGROUP.ARRIVE\n" + wgmma(1) + "SHFL.BFLY PT, R2, R2, 0x1, 0x1f\n" + wgmma(7))
    assert [len(b) for b in sass.wgmma_batches(apart)] == [8]


def test_serialised_batches() -> None:
    one_by_one = code(("WARPGROUP.ARRIVE\n" + wgmma(1) + "WARPGROUP.DEPBAR.LE gsb0, 0x0\n") * 8)
    sizes = tuple(map(len, sass.wgmma_batches(one_by_one)))
    assert sizes == (1,) * 8
    assert sass.serialised(sizes) and sass.serialised(sizes, steps=1)
    assert not sass.serialised((8, 8)) and not sass.serialised((8, 8), steps=2)
    assert sass.serialised((8, 4, 4), steps=2)
    assert not sass.serialised((1, 1), steps=2)  # steps of a single k-step each


def codes(body: str) -> list[str]:
    return [f.code for f in sass.faults(code(body))]


GOOD = BATCH + BATCH + "WARPGROUP.DEPBAR.LE gsb0, 0x1\n" + EX2 * 64 + "WARPGROUP.DEPBAR.LE gsb0, 0x0\n" + "EXIT"


def test_a_good_loop_has_no_fault() -> None:
    assert codes(GOOD) == []
    assert codes("FADD R1, R2, R3\nSTL [R1], R2\nEXIT") == []  # no WGMMA: nothing to say


@pytest.mark.parametrize(
    ("change", "into", "fault"),
    [
        (EX2 * 64, EX2 * 57 + "WARPGROUP.DEPBAR.LE gsb0, 0x0\n" + EX2 * 7, "early-wait"),
        ("EXIT", "STL.64 [R1], R2\nEXIT", "spill"),
        (BATCH, BATCH[:-1].replace("\nHGMMA", "\nR2UR UR8, R3\nHGMMA", 2) + "\n", "r2ur"),
        (EX2 * 64, EX2 * 64 + "S2UR UR4, SR_CgaCtaId\n" + BATCH, "s2ur"),
    ],
)
def test_faults(change: str, into: str, fault: str) -> None:
    assert codes(GOOD.replace(change, into, 1)) == [fault]


def test_58_of_64_exponentials_are_enough() -> None:
    assert codes(GOOD.replace(EX2 * 64, EX2 * 58 + "WARPGROUP.DEPBAR.LE gsb0, 0x0\n" + EX2 * 6)) == []


def test_faults_are_those_of_the_consumers_branch() -> None:
    producer = "USETMAXREG.DEALLOC.CTAPOOL 0x18\nSTL [R1], R2\nS2UR UR4, SR_CgaCtaId\nEXIT\n"
    assert codes("@P0 BRA `(.L_x_1)\n" + producer + ".L_x_1:\nUSETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0\n" + GOOD) == []


def test_analysis_round_trips() -> None:
    c = code(GOOD.replace(EX2 * 64, EX2))
    k = sass.KernelSass(sass.counts(c), (8, 8), sass.branches(c), sass.faults(c))
    assert k.faults and sass.KernelSass.from_dict(k.to_dict()) == k


TWO = """
extern "C" __global__ void first(float* p) { p[threadIdx.x] = exp2f(p[threadIdx.x]); }
extern "C" __global__ void second(float4* p) { __syncthreads(); p[0] = p[1]; __syncthreads(); }
"""


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_real_cubin(arch: str) -> None:
    found = sass.analyse(compile_cubin(TWO, arch, "two").cubin)
    assert found is not None and set(found) == {"first", "second"}
    assert found["first"].counts["MUFU.EX2"] == 1 and found["first"].counts["BAR"] == 0
    assert found["second"].counts["BAR.SYNC"] == found["second"].counts["BAR"] == 2
    assert found["second"].counts["LDG.E.128"] == 1
    assert found["first"].branches[0].registers > 2 and found["first"].batches == ()


@needs_nvdisasm
def test_something_else_than_a_cubin() -> None:
    with pytest.raises(CompileError, match="cannot read the cubin"):
        sass.analyse(b"not a cubin")


def test_the_wheel_goes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    sass.nvdisasm.cache_clear()
    try:
        monkeypatch.setattr(importlib.metadata, "files", absent)
        assert sass.nvdisasm() == tool
        tool.unlink()
        sass.nvdisasm.cache_clear()
        assert sass.nvdisasm() is None and sass.analyse(b"") is None
    finally:
        sass.nvdisasm.cache_clear()

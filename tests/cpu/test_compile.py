"""Source to cubin without a GPU: messages, promises, report, cache, and built kernels on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fagen
from fagen import cache, nvrtc, sass
from fagen.compile import Built, build, load_built, write_built
from fagen.emit import Source, emit
from fagen.errors import CompileError, InputError
from fagen.evidence import store
from fagen.nvrtc import compile_cubin
from fagen.plan import Plan, plan
from fagen.report import CompileReport, KernelReport, parse_log

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")
compilation = importlib.import_module("fagen.compile")  # the module: fagen.compile may also be a function
REPOSITORY = Path(fagen.__file__).parents[1]
TINY = 'extern "C" __global__ void tiny(int* p) { p[0] = 3; }\n'


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("FAGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def planned(name: str) -> tuple[Plan, Source]:
    attention, schedule = fagen.load(name, head_dim=64)
    p = plan(attention, schedule)
    return p, emit(p, name)


@pytest.fixture(scope="module")
def fa3() -> Built:
    return build(*planned("fa3"))


def with_text(source: Source, old: str, new: str) -> Source:
    assert source.text.count(old) >= 1, f"{old!r} is not in the source"
    return dataclasses.replace(source, text=source.text.replace(old, new))


# ------------------------------------------------------------------------------------------------------------------- NVRTC


def test_compile_names_the_compiler_and_gives_its_log() -> None:
    c = compile_cubin(TINY, "sm_90a", "tiny")
    assert c.cubin.startswith(b"\x7fELF") and b"sm_90a" in c.cubin
    assert c.compiler == nvrtc.compiler() and c.compiler.startswith("NVRTC 1")
    assert 0 < c.seconds < 10
    assert parse_log(c.log)["tiny"].spill_stores == 0
    assert compile_cubin(TINY, "sm_90a", "tiny").cubin == c.cubin
    assert compile_cubin(TINY, "sm_80", "tiny").cubin != c.cubin


def test_the_compilers_version_is_known_without_loading_it() -> None:
    code = "from fagen import nvrtc; print(nvrtc.compiler(), 'cuda.bindings' in __import__('sys').modules)"
    out = child(code)
    assert out.stdout.split() == [*nvrtc.compiler().split(), "False"], out.stderr


def test_an_error_names_line_source_and_step() -> None:
    source = """
extern "C" __global__ void f(int* p) {
  for (;;) {  // [consumer.early]
    p[1] = 2;
  }
#pragma unroll 1
  for (;;) {  // [consumer.steady]
    p[0] = 3;
    p[0] = undefined_thing;
  }
}
"""
    with pytest.raises(CompileError) as e:
        compile_cubin(source, "sm_90a", "bad", step_ids={"consumer.early", "consumer.steady"})
    assert str(e.value).splitlines() == [
        'bad.cu(9): error: identifier "undefined_thing" is undefined',
        "     9 | p[0] = undefined_thing;",
        "in step consumer.steady",
    ]
    assert "1 error detected" in e.value.log


def test_an_error_in_inline_ptx_is_traced_back_to_the_source() -> None:
    source = """
__device__ __forceinline__ void inner(int x) {
  asm volatile("bogus.instr %0;" ::"r"(x));
}
__device__ __forceinline__ void outer(int x) { inner(x + 1); }
extern "C" __global__ void f(int* p) {
  p[0] = 3;
  // [consumer.qk] the product
  outer(p[1]);
}
"""
    with pytest.raises(CompileError) as e:
        compile_cubin(source, "sm_90a", "bad")
    first, *shown, step = str(e.value).splitlines()
    assert first.startswith("bad.cu(3): error in the PTX: ")
    assert [x.split(" | ")[0].strip() for x in shown] == ["3", "5", "9"]
    assert step == "in step consumer.qk"
    assert "ptxas fatal" in e.value.log


@pytest.mark.parametrize(
    ("line", "step"),
    [(3, "producer.fill"), (6, "producer.fill"), (7, "producer.load_k"), (9, None), (14, "consumer.qk"), (15, None), (16, None)],
)
def test_step_of_a_line(line: int, step: str | None) -> None:
    source = """\
void f() {  // producer
  // [producer.fill] see layout.swizzle
#pragma unroll
  for (;;) {

    x();
    load();  // producer.load_k
  }
  y();
}
// [consumer]
void g() {
  // consumer.qk
  z();
}
int h;
""".splitlines()
    assert nvrtc.step_at(source, line, {"producer.fill", "producer.load_k", "consumer.qk"}) == step


def test_an_unknown_target_is_one_sentence() -> None:
    with pytest.raises(CompileError, match=r"^tiny\.cu: nvrtc: error: invalid value for --gpu-architecture"):
        compile_cubin(TINY, "sm_20", "tiny")


# ------------------------------------------------------------------------------------------------------------------- surroundings


def child(code: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")}
    env["PYTHONPATH"] = str(REPOSITORY)
    return subprocess.run(
        [sys.executable, *flags, "-c", code], env={**env, **variables}, capture_output=True, text=True, timeout=60
    )


COMPILE = f"""
import hashlib
from fagen import nvrtc
c = nvrtc.compile_cubin({TINY!r}, "sm_90a", "tiny")
print(c.compiler, hashlib.sha256(c.cubin).hexdigest())
"""


def test_a_toolkit_of_another_version_does_not_disturb(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").write_text("not a library")
    (tmp_path / "lib64" / "libnvrtc.so.12").write_text("not a library")
    c = compile_cubin(TINY, "sm_90a", "tiny")
    want = f"{c.compiler} {hashlib.sha256(c.cubin).hexdigest()}\n"
    for home in (":/usr/local/cuda", str(tmp_path)):
        out = child(COMPILE, CUDA_HOME=home, CUDA_PATH=home, CUDA_VISIBLE_DEVICES="")
        assert out.stdout == want, out.stderr


def test_without_nvrtc_the_error_says_what_to_install(tmp_path: Path) -> None:
    """A Python that sees the bindings but not the wheel of the compiler."""
    import cuda.bindings

    site = Path(cuda.bindings.__file__).parents[2]
    for path in (site / "cuda", *site.glob("cuda_bindings*"), *site.glob("cuda_pathfinder*"), *site.glob("numpy*")):
        (tmp_path / path.name).symlink_to(path)
    code = COMPILE.replace("c =", "import sys\ntry: c =").replace(
        "print", "except nvrtc.CompileError as e: sys.exit(str(e))\nprint"
    )
    out = child(code, "-S", PYTHONPATH=f"{REPOSITORY}:{tmp_path}")
    if out.returncode == 0:
        pytest.skip(f"the system has an NVRTC of its own: {out.stdout.split()[:2]}")
    (line,) = out.stderr.splitlines()
    assert line.startswith("no NVRTC to compile with: pip install nvidia-cuda-nvrtc cuda-bindings (the loader says: "), out.stderr
    assert "libnvrtc" in line


def test_without_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc cuda-bindings"):
        compile_cubin(TINY, "sm_90a", "tiny")


def test_another_loaded_nvrtc_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.compiler.cache_clear()
    try:
        monkeypatch.setattr(nvrtc, "_loaded_library", lambda: Path("/opt/cuda/lib64/libnvrtc.so.13.0.88"))
        assert nvrtc.compiler() == "NVRTC 13.0.88"
    finally:
        nvrtc.compiler.cache_clear()


# ------------------------------------------------------------------------------------------------------------------- the log


LOG = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to this in the function 'qk'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'pv' for 'sm_90a'
ptxas info    : Function properties for pv
ptxas         .     512 bytes stack frame, 1148 bytes spill stores, 1152 bytes spill loads
ptxas info    : Used 152 registers, used 16 barriers, 512 bytes cumulative stack size
ptxas info    : Compiling entry function 'qk' for 'sm_90a'
ptxas info    : Function properties for qk
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
"""


def test_the_log_by_kernel() -> None:
    found = parse_log(LOG)
    assert dataclasses.astuple(found["pv"]) == (152, 512, 1148, 1152, ("C7508",))
    assert dataclasses.astuple(found["qk"]) == (8, 0, 0, 0, ("C7510", "C7508"))
    with pytest.raises(CompileError, match="does not tell the registers and spills of kernel 'qk'"):
        parse_log(LOG[: LOG.rindex("Used 8")])


def kernel_report(**changes: object) -> KernelReport:
    base = KernelReport(
        "attention", 168, {"consumer": 220}, 0, 0, 0, 1024, (), {"BAR": 3, "LDL": 0}, {"BAR": 3, "LDL": 0}, False, ()
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spill_stores": 4}, "4 bytes of spill stores"),
        ({"spill_loads": 8}, "8 of spill loads"),
        ({"stack_bytes": 8}, "a stack of 8 bytes"),
        ({"advisories": ("C7508",)}, "advisory C7508"),
        ({"advisories": ("C7518", "C7518")}, "advisory C7518"),
        ({"advisories": ("C7519",), "serialised": True}, r"serialised \(advisory C7519\)"),
        ({"serialised": True}, "batches are serialised$"),
        ({"sass": {"BAR": 4, "LDL": 0}}, "4 BAR in the SASS, 3 in the program"),
        ({"sass": {"BAR": 3, "LDL": 1}}, "1 LDL in the SASS, 0 in the program"),
    ],
)
def test_broken_promises(changes: dict[str, object], sentence: str) -> None:
    (found,) = kernel_report(**changes).broken()
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(found)
    assert found.startswith("attention: ")


def test_promises_kept() -> None:
    assert kernel_report().broken() == ()
    assert kernel_report(advisories=("C7519", "C7600")).broken() == ()  # 13.0 prints C7519 for kernels that are not serialised
    assert kernel_report(sass=None, serialised=None).broken() == ()
    spilled = kernel_report(spill_stores=16, spill_loads=12, stack_bytes=16, sass={"BAR": 3, "LDL": 2})
    assert spilled.broken(allow_spill_bytes=16) == () and len(spilled.broken(allow_spill_bytes=15)) == 1


# ------------------------------------------------------------------------------------------------------------------- build


@needs_nvdisasm
def test_fa3_is_what_was_planned(fa3: Built) -> None:
    (k,) = fa3.report.kernels
    assert (fa3.report.arch, fa3.report.compiler, fa3.report.notes) == ("sm_90a", nvrtc.compiler(), ())
    assert fa3.report.broken() == () and k.spill_stores == k.spill_loads == k.stack_bytes == 0
    assert k.smem_bytes == fa3.plan.kernels[0].smem_bytes and not k.serialised
    assert k.sass is not None and k.differing == {}
    assert all(k.sass[n] for n in ("HGMMA", "UTMALDG", "USETMAXREG", "MUFU.EX2", "BAR", "WARPGROUP.DEPBAR"))
    assert k.sass["LDGSTS"] == k.sass["STL"] == k.sass["LDL"] == k.sass["HMMA"] == 0
    limits = {r.name: r.registers for r in fa3.plan.kernels[0].roles}
    assert k.registers_by_role is not None and list(k.registers_by_role) == ["producer", "consumer"]
    assert all(0 < k.registers_by_role[name] <= (limits[name] or 0) for name in limits)
    assert k.registers_by_role["consumer"] > k.registers > k.registers_by_role["producer"]


@needs_nvdisasm
def test_fa2_is_what_was_planned() -> None:
    (k,) = build(*planned("fa2")).report.kernels
    assert k.sass is not None and k.differing == {}
    assert k.sass["HMMA"] and k.sass["LDGSTS"] and k.sass["MUFU.EX2"]
    assert k.sass["HGMMA"] == k.sass["UTMALDG"] == k.sass["STL"] == k.sass["LDL"] == 0
    assert k.registers_by_role is not None and list(k.registers_by_role) == ["warps"]


def test_a_hit_is_the_miss_and_takes_milliseconds(fa3: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compilation, "compile_cubin", never)
    monkeypatch.setattr(sass, "disassemble", never)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert build(fa3.plan, fa3.source) == fa3
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02


def test_a_build_takes_about_a_second(fa3: Built) -> None:
    assert fa3.report.seconds < 5


def test_without_the_cache_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError("cache used")

    monkeypatch.setattr(cache, "default", never)
    p, source = planned("fa3")
    seen = []
    monkeypatch.setattr(compilation, "compile_cubin", lambda *a, **k: seen.append(a) or compile_cubin(TINY, "sm_90a", "tiny"))
    with pytest.raises(CompileError, match="no kernel 'attention' in the source; it has tiny"):
        build(p, source, use_cache=False)
    assert seen == [(source.text, "sm_90a", "fa3")]


@needs_nvdisasm
def test_an_injected_wait_shows(fa3: Built) -> None:
    edited = with_text(fa3.source, "pack(P, S);", "wgmma_wait<0>(), pack(P, S);")
    with pytest.raises(
        CompileError, match=r"^fa3 compiles, but not to what was planned:\nattention: \d WARPGROUP.DEPBAR in the SASS, \d in"
    ) as e:
        build(fa3.plan, edited)
    assert "Used 128 registers" in e.value.log
    built = build(fa3.plan, edited, enforce=False)
    assert built.report.broken() and built.report.kernels[0].differing.keys() == {"WARPGROUP.DEPBAR"}


@needs_nvdisasm
def test_a_missing_wait_serialises(fa3: Built) -> None:
    edited = with_text(fa3.source, "wgmma_wait<1>(), pin(S);", "")
    with pytest.raises(CompileError, match=r"advisory C7514\n.*serialised"):
        build(fa3.plan, edited)


def test_local_memory_is_refused_unless_allowed(fa3: Built) -> None:
    edited = with_text(
        fa3.source, "      fill(O, 0.f);", "      volatile float local[4]; local[m % 4] = 1.f; fill(O, local[h % 4]);"
    )
    with pytest.raises(CompileError, match="a stack of 16 bytes a thread; allowed: 0"):
        build(fa3.plan, edited)
    assert build(fa3.plan, edited, allow_spill_bytes=16).report.kernels[0].stack_bytes == 16


def test_an_error_of_a_plans_source_names_its_step(fa3: Built) -> None:
    with pytest.raises(
        CompileError, match=r'fa3\.cu\(\d+\): error: identifier "alphaa".*\n.*rescale\(O, alphaa\);\nin step consumer\..*steady'
    ):
        build(fa3.plan, with_text(fa3.source, "rescale(O, alpha);", "rescale(O, alphaa);"))


@needs_nvdisasm
def test_without_nvdisasm_it_is_said_and_done_later(monkeypatch: pytest.MonkeyPatch, fa3: Built) -> None:
    source = dataclasses.replace(fa3.source, text=fa3.source.text + "// once more\n")
    with monkeypatch.context() as m:
        m.setattr(sass, "nvdisasm", lambda: None)
        report = build(fa3.plan, source).report
    assert report.sass is None and report.kernels[0].registers_by_role is None and report.kernels[0].serialised is None
    assert any("pip install 'fagen[sass]'" in n for n in report.notes)
    assert CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    for _ in range(2):  # completed, then stored
        assert dataclasses.replace(build(fa3.plan, source).report, seconds=0.0) == dataclasses.replace(fa3.report, seconds=0.0)
        monkeypatch.setattr(sass, "analyse", lambda cubin: pytest.fail("read again"))


@needs_nvdisasm
def test_an_entry_that_counts_other_instructions_is_completed(monkeypatch: pytest.MonkeyPatch, fa3: Built) -> None:
    """As a version leaves it that knew fewer names."""
    source = dataclasses.replace(fa3.source, text=fa3.source.text + "// counted before\n")
    with monkeypatch.context() as m:
        m.setattr(sass, "COUNTED", tuple(n for n in sass.COUNTED if n != "IGMMA"))
        with pytest.raises(KeyError, match="IGMMA"):  # the program implies a number of them
            build(fa3.plan, source).report.broken()
    for _ in range(2):  # completed, then stored
        assert dataclasses.replace(build(fa3.plan, source).report, seconds=0.0) == dataclasses.replace(fa3.report, seconds=0.0)
        monkeypatch.setattr(sass, "analyse", lambda cubin: pytest.fail("read again"))


def test_the_report_round_trips(fa3: Built) -> None:
    assert CompileReport.from_dict(json.loads(json.dumps(fa3.report.to_dict()))) == fa3.report


# ------------------------------------------------------------------------------------------------------------------- on disk


def test_write_and_load(fa3: Built, tmp_path: Path) -> None:
    paths = write_built(fa3, tmp_path / "new" / "folder", "fa3")
    assert [p.name for p in paths] == ["fa3.cu", "fa3.cubin", "fa3.json"]
    assert sorted(p.name for p in paths[0].parent.iterdir()) == ["fa3.cu", "fa3.cubin", "fa3.json"]
    assert load_built(paths[0].parent, "fa3") == fa3


def test_comments_may_be_edited(fa3: Built, tmp_path: Path) -> None:
    cu, _, _ = write_built(fa3, tmp_path, "fa3")
    cu.write_text("// read by someone\n\n" + cu.read_text())
    assert load_built(tmp_path, "fa3").cubin == fa3.cubin


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("fa3.cu", lambda p: p.unlink(), "cannot be read: No such file"),
        ("fa3.cubin", lambda p: p.unlink(), "cannot be read: No such file"),
        ("fa3.json", lambda p: p.unlink(), "cannot be read: No such file"),
        ("fa3.cu", lambda p: p.write_text(p.read_text().replace("pack(P, S);", "")), "is not the source of which fa3.json speaks"),
        ("fa3.cubin", lambda p: p.write_bytes(p.read_bytes()[:-1]), "is not the machine code of which fa3.json speaks"),
        (
            "fa3.cubin",
            lambda p: edit_json(p.with_suffix(".json"), lambda r: r["report"].update(arch="sm_100a")),
            "was compiled for sm_100a",
        ),
        ("fa3.json", lambda p: p.write_text("{"), "is not JSON"),
        ("fa3.json", lambda p: p.write_text("[]"), "is not a JSON object"),
        ("fa3.json", lambda p: edit_json(p, lambda r: r.pop("report")), "is not the record of a kernel"),
        ("fa3.json", lambda p: edit_json(p, lambda r: r["schedule"].update(tile_kv=7)), "is not the record of a kernel"),
        ("fa3.json", lambda p: edit_json(p, lambda r: r["schedule"].update(new_knob=7)), "is not the record of a kernel"),
        ("fa3.json", lambda p: edit_json(p, lambda r: r.update(interface_sha256="0")), "built by another version of fagen"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    fa3: Built, tmp_path: Path, file: str, damage: Callable[[Path], object], reason: str
) -> None:
    write_built(fa3, tmp_path, "fa3")
    damage(tmp_path / file)
    with pytest.raises(InputError, match=reason) as e:
        load_built(tmp_path, "fa3")
    assert e.value.argument == str(tmp_path / file)


def test_evidence_stays_with_its_code(fa3: Built, tmp_path: Path) -> None:
    _, _, path = write_built(fa3, tmp_path, "fa3")
    evidence = {"code_sha256": fa3.source.code_sha256, "gpu": "H200", "cases": []}
    edit_json(path, lambda r: r.update(evidence=evidence, variants={"x": 1}))
    write_built(fa3, tmp_path, "fa3")
    assert json.loads(path.read_text())["evidence"] == evidence
    other = dataclasses.replace(fa3, source=dataclasses.replace(fa3.source, text=fa3.source.text + "int unused;\n"))
    write_built(other, tmp_path, "fa3")
    record = json.loads(path.read_text())
    assert record["evidence"] == {**evidence, "stale": True} and record["variants"] == {"x": 1}
    write_built(fa3, tmp_path, "fa3")
    assert json.loads(path.read_text())["evidence"] == evidence


def test_a_second_build_changes_no_byte_of_the_record(fa3: Built, tmp_path: Path) -> None:
    _, _, path = write_built(fa3, tmp_path, "fa3")
    case = {"shape": [1, 2, 1, 1, 1], "mask": "full", "inputs": "normal", "layout": "contiguous", "error": 0.0, "passed": True}
    store(path, fa3.source.code_sha256, [case], gpu="H200", driver="580", compiler="NVRTC 13.5")
    store(path, "other", [case, case], gpu="H200", driver="580", compiler="NVRTC 13.5", variant="hd64-bf16-full")
    before = path.read_bytes()
    write_built(fa3, tmp_path, "fa3")
    assert path.read_bytes() == before and before.count(b'{"shape"') == 3


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_changes_nothing(fa3: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write_built(fa3, tmp_path, "fa3")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    other = dataclasses.replace(fa3, cubin=b"other")
    with pytest.raises(InputError, match="cannot be written: No space left"):
        write_built(other, tmp_path, "fa3")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_an_unusable_folder_or_record_is_named(fa3: Built, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot be written"):
        write_built(fa3, tmp_path / "file", "fa3")
    (tmp_path / "fa3.json").write_text("not json")
    with pytest.raises(InputError, match=r"fa3\.json: is not JSON"):
        write_built(fa3, tmp_path, "fa3")
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["fa3.json", "file"]

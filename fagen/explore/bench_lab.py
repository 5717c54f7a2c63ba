"""torch's side of a bench: tensors, loaded kernels, peers; every function verified, then captured as a task."""

from __future__ import annotations

import importlib.util
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from .. import driver
from ..attention import Attention
from ..compile import load_built
from ..errors import FagenError, InputError, LaunchError
from ..interop.arrays import FRAMEWORK_NAMES
from ..launch import Kernel
from ..oracle.quantise import Quantiser
from ..oracle.yardstick import quantiser_of
from ..plan.kernel import Problem
from ..plan.quantised import moved_bytes
from . import peers, verify
from .bench_inputs import descales, make_inputs, normal
from .bench_result import BenchSpec, CaseSpec, KernelRef, Machine, Prediction, Row
from .explain import predict, sentence
from .timing import GraphTask, Task, TorchClock, open_sensors

GEMM_SIZE = 8192
COPY_BYTES = 1 << 30

PREPARE_SECONDS = 120.0
"""For imports, inputs, the reference, and a peer's first call, which may load 100 MB of kernels and search plans."""
LAUNCH_SECONDS = 20.0
"""For a first launch of a kernel, and for one measurement."""


class Doing(Protocol):
    def __call__(self, what: str, seconds: float, case: int | None, function: str | None) -> None:
        """The next thing done is `what`, of this function of this case (by its number in the spec); longer than `seconds` is a hang."""


def silent(what: str, seconds: float, case: int | None, function: str | None) -> None:
    """A `Doing` for those who do not watch."""


@dataclass(frozen=True)
class Candidate:
    """A function of a case before it is timed: what its row will say of it, and its task if it is to be timed."""

    row: Row
    task: Task | None


def check_device() -> None:
    """LaunchError in one line where there is no GPU or no torch; imports neither, so that a caller may still start a worker."""
    driver.device_count()
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("bench measures through torch, which is not installed; pip install 'fagen[torch]'")


def require_torch() -> Any:
    """torch, on a machine where it sees a GPU. LaunchError in one line where there is no GPU or no torch."""
    check_device()
    try:
        import torch
    except (ImportError, OSError) as e:
        raise LaunchError(f"bench measures through torch, which cannot be imported: {_one_line(e)}") from None
    if not torch.cuda.is_available():
        raise LaunchError(f"bench measures through torch, and torch {torch.__version__} sees no GPU (is it a CPU build?)")
    return torch


class Lab:
    """The GPU, for one spec. LaunchError where there is no GPU or no torch; InputError for a built kernel that cannot be used."""

    def __init__(self, spec: BenchSpec, doing: Doing = silent):
        self._spec, self._doing = spec, doing
        self._case: int | None = None
        self._open: list[Callable[[], None]] = []  # what frees the memory of the case's functions
        self._at("torch starts", PREPARE_SECONDS)
        torch = self._torch = require_torch()
        self._index = int(torch.cuda.current_device())
        self._kernels = self._load()
        uuid = torch.cuda.get_device_properties(self._index).uuid
        self.sensors = open_sensors(f"GPU-{uuid}")
        self.clock = TorchClock(torch, self.sensors.sm_mhz, lambda name: self._at(f"{name} is timed", LAUNCH_SECONDS, name))

    def _at(self, what: str, seconds: float, function: str | None = None) -> None:
        if self._case is not None:
            what = f"{what} on {self._spec.cases[self._case].problem}"
        self._doing(what, seconds, self._case, function)

    def _load(self) -> dict[tuple[str, str], Kernel]:
        kernels: dict[tuple[str, str], Kernel] = {}
        for case in self._spec.cases:
            for ref in case.kernels:
                place = f"{ref.directory}/{ref.file}"
                if (ref.directory, ref.file) not in kernels:
                    built = load_built(ref.directory, ref.file, ref.without)
                    kind = "debug" if built.plan.debug else "trace" if built.plan.trace else None
                    if kind is not None:
                        raise InputError(
                            ref.label, f"{place} is a {kind} build, whose speed means nothing; build it without --{kind}"
                        )
                    kernels[ref.directory, ref.file] = Kernel(built.plan, built.source.text, built.cubin, built.report)
                attention = kernels[ref.directory, ref.file].plan.attention
                if attention != case.attention:
                    raise InputError(ref.label, f"{place} computes {attention.label}, not {case.attention.label}")
        return kernels

    def machine(self) -> Machine:
        info, s = driver.device_info(self._index), self.sensors
        capability = "{}.{}".format(*info.compute_capability)
        return Machine(
            info.name, capability, info.num_sms, info.memory_bytes, s.driver, s.power_limit_watts, s.max_sm_mhz, s.source
        )

    def versions(self) -> dict[str, str]:
        """Of everything that had a part, but the kernels' compilers."""
        from .. import __version__

        torch = self._torch
        return {
            "fagen": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "torch_cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            **{f"peer {name}": text for name, text in peers.versions(torch, self._spec.peers).items()},
        }

    def ceiling_tasks(self) -> tuple[Task, tuple[Task, ...]]:
        """A matrix product, and copies of `COPY_BYTES` by different means: which is fastest depends on GPU and driver.

        torch's own copy is a memcpy node in the graph, which the driver may give to a copy engine; those are built for PCIe and NVLink
        and fall short of HBM. The others are kernels on all SMs, with loads of 16 bytes; bits are only copied or flipped.
        """
        torch = self._torch
        self._at("the matrix product and the copies are prepared", PREPARE_SECONDS)
        a, b = (normal(torch, (GEMM_SIZE, GEMM_SIZE), "bf16", i) for i in range(2))
        product = torch.empty_like(a)
        source = torch.randint(0, 1 << 30, (COPY_BYTES // 4,), dtype=torch.int32, device=a.device)
        target = torch.empty_like(source)
        ways: dict[str, Callable[[], Any]] = {
            "memcpy": lambda: target.copy_(source),
            "bitwise_not": lambda: torch.bitwise_not(source, out=target),
            "add": lambda: torch.add(source, 1, out=target),
        }
        gemm = GraphTask(torch, "matrix product", lambda: torch.mm(a, b, out=product), self.clock)
        return gemm, tuple(GraphTask(torch, name, call, self.clock) for name, call in ways.items())

    @contextmanager
    def case(self, number: int) -> Iterator[None]:
        """Around the work on a case: an error of torch (a kernel that trapped shows at the next synchronisation) becomes a LaunchError,
        and memory is given back, graphs and kernels' workspaces too, so that every case starts alike."""
        self._case = number
        case = self._spec.cases[number]
        try:
            yield
        except RuntimeError as e:
            raise LaunchError(f"{case.attention.label} on {case.problem}: {_one_line(e)}") from e
        self._torch.cuda.synchronize()
        while self._open:
            self._open.pop()()
        self._torch.cuda.empty_cache()
        self._case = None

    def candidates(self, case: CaseSpec) -> list[Candidate]:
        """The case's functions on fresh inputs, each verified, the right ones captured."""
        p, a, seed = case.problem, case.attention, self._spec.seed
        self._at("inputs and reference are made", PREPARE_SECONDS)
        blocks = [self._kernels[ref.directory, ref.file].plan.schedule.tile_kv for ref in case.kernels]
        q, k, v = make_inputs(self._torch, a, p, self._spec.inputs, seed, min(blocks, default=128))
        scales = descales(a, self._spec.inputs)
        meant = (q, k) if not scales else (q.float() * scales["q_descale"], k.float() * scales["k_descale"])
        wants: dict[tuple[Quantiser | None, str], verify.Expected] = {}
        ours = []
        for ref in case.kernels:
            schedule = self._kernels[ref.directory, ref.file].plan.schedule
            rounding = quantiser_of(schedule), schedule.reference
            if rounding not in wants:
                wants[rounding] = verify.expected(self._torch, a, p, *meant, v, seed, schedule)
            ours.append(self._schedule(case, ref, q, k, v, scales, wants[rounding]))
        if not self._spec.peers:
            return ours
        if scales:  # no peer computes int8: the same values in v's type, judged by what they are then
            a = a.replace(dtype=a.value_dtype, v_dtype=None)
            q, k = (x.to(self._dtype(a.dtype)) for x in meant)
        want = verify.expected(self._torch, a, p, q, k, v, seed)
        return ours + [self._peer(a, name, q, k, v, want, f" {a.dtype}" if scales else "") for name in self._spec.peers]

    def _schedule(
        self, case: CaseSpec, ref: KernelRef, q: Any, k: Any, v: Any, scales: Mapping[str, float], want: verify.Expected
    ) -> Candidate:
        torch, p, a = self._torch, case.problem, case.attention
        loaded = self._kernels[ref.directory, ref.file]
        # one of its own, so that unloading it ends no other's graph
        kernel = Kernel(loaded.plan, loaded.source, loaded.cubin, loaded.report)
        part = Kernel(loaded.plan.part(ref.part), loaded.source, loaded.cubin, loaded.report) if ref.part else kernel

        def release() -> None:
            part.unload()
            kernel.unload()

        ids = kernel.plan.schedule.id, kernel.plan.id, kernel.report.compiler
        kind = "removal" if ref.without else "schedule"
        row = Row(ref.label, kind, None, *ids, "failed", "", None, None, None, None, ref.about, ref.part)
        self._at(f"{ref.label} runs for the first time", LAUNCH_SECONDS, ref.label)
        try:
            out = torch.full((p.batch, p.sq, p.hq, a.dv), float("nan"), dtype=self._dtype(a.output_dtype), device=q.device)
            lse = torch.full((p.batch, p.hq, p.sq), float("nan"), dtype=torch.float32, device=q.device)
            kernel(q, k, v, out=out, lse=lse, **scales)
            if ref.part == "attend":  # all kernels have run: what the part needs is there
                out.fill_(float("nan"))
            if ref.part:
                part(q, k, v, out=out, lse=lse, **scales)
            row = replace(row, prediction=None if ref.part else prediction(kernel, p))
            if ref.part == "quantise":
                row = replace(row, bytes=moved_bytes(kernel.plan, p))
        except (FagenError, torch.cuda.OutOfMemoryError) as e:
            self._check_alive(ref.label, e)
            release()  # the functions after it may need what it got hold of
            return Candidate(replace(row, reason=_one_line(e)), None)
        self._check_alive(ref.label)
        if ref.without:  # wrong by design: there is nothing to verify
            return self._captured(
                replace(row, outcome="timed"), partial(kernel, q, k, v, out=out, lse=lse, **scales), kernel.unload
            )

        def whole_and_part() -> None:
            kernel(q, k, v, out=out, lse=lse, **scales)  # leaves what the part reads
            part(q, k, v, out=out, lse=lse, **scales)  # loads it: `release` has unloaded it with an earlier graph

        warm = whole_and_part if ref.part else None
        return self._judged(row, partial(part, q, k, v, out=out, lse=lse, **scales), out, lse, want, release, warm)

    def _peer(self, attention: Attention, name: str, q: Any, k: Any, v: Any, want: verify.Expected, what: str) -> Candidate:
        """`what` it computes, behind its title, where that is not the case's own type."""
        title = f"{peers.PEERS[name].title}{what}"
        row = Row(title, "peer", name, None, None, None, "absent", "", None, None, None, None)
        self._at(f"{title} runs for the first time", PREPARE_SECONDS, title)
        try:
            call, out = peers.prepare(name, self._torch, attention, q, k, v)
        except peers.PeerAbsent as e:
            self._check_alive(title, e)
            return Candidate(replace(row, reason=str(e)), None)
        return self._judged(row, call, out, None, want)

    def _judged(
        self,
        row: Row,
        call: Callable[[], Any],
        out: Any,
        lse: Any,
        want: verify.Expected,
        release: Callable[[], None] = lambda: None,
        warm: Callable[[], Any] | None = None,
    ) -> Candidate:
        self._at(f"{row.function} is verified", PREPARE_SECONDS, row.function)
        verdict = verify.judge(self._torch, want, out, lse)
        ratio = float(verdict.error_ratio) if math.isfinite(verdict.error_ratio) else None
        row = replace(row, outcome="timed" if verdict.passed else "wrong", reason=verdict.reason, error_ratio=ratio)
        if not verdict.passed:
            release()
            return Candidate(row, None)
        return self._captured(row, call, release, warm)

    def _captured(
        self, row: Row, call: Callable[[], Any], release: Callable[[], None], warm: Callable[[], Any] | None = None
    ) -> Candidate:
        self._at(f"{row.function} is captured", PREPARE_SECONDS, row.function)
        try:
            task = GraphTask(self._torch, row.function, call, self.clock, release, warm)
            self._open.append(task.close)
            return Candidate(row, task)
        except (FagenError, RuntimeError) as e:  # cannot be captured, or no memory for its graph
            self._check_alive(row.function, e)
            release()
            return Candidate(replace(row, outcome="failed", reason=f"in a CUDA graph: {_one_line(e)}"), None)

    def _check_alive(self, label: str, error: BaseException | None = None) -> None:
        """An error that ended the GPU context ends the run, since nothing after it can be measured."""
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as e:
            raise LaunchError(f"{label} ended the GPU context: {_one_line(error or e)}") from e

    def _dtype(self, name: str) -> Any:
        return getattr(self._torch, FRAMEWORK_NAMES[name])


def prediction(kernel: Kernel, problem: Problem) -> Prediction:
    """`explain`'s numbers for one row."""
    found = predict(kernel.plan, problem, kernel.report)
    return Prediction(found.times_us, found.binds, found.bound_us, found.sm_bytes, found.dram_bytes, sentence(found))


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

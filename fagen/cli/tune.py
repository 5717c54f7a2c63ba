"""fagen tune: which of many schedules is fastest?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from ..host import cores
from . import common
from .bar import Bar
from .tune_options import parse_axes, parse_budget, problems_of, write_file

if TYPE_CHECKING:
    from ..explore.tune import Memory
    from ..explore.tune_result import Candidate, Gpu, Prepared, Runner, TuneResult
    from ..explore.tune_space import Axes, Space
    from ..schedule import Schedule
    from ..tuned import Table

PEERS = "cudnn,fa2,fa3"
COMPILE_SHARE = 0.5
"""Of a budget: after that no compilation begins."""


@click.command()
@click.argument("schedule", metavar="SCHEDULE")
@click.option("--shape", "shapes", multiple=True, metavar="B,HQ,HKV,SQ,SK", help="Tune for this size; repeatable.")
@click.option(
    "--grid", metavar="NAME", help="Tune for the sizes of a grid of `fagen bench`. Default: paper, unless --shape is given."
)
@common.set_option
@common.causal_option
@click.option(
    "--over",
    multiple=True,
    metavar="KNOB=A:B:…",
    help="Try these values of a knob, such as stages=2:3:4,3; repeatable. Default: every knob that matters at this head_dim.",
)
@click.option(
    "--exclude-known", is_flag=True, help="Leave the built-in and the tuned schedules out, and time the tuned one beside."
)
@click.option("--keep", type=click.IntRange(1), default=24, show_default=True, help="Schedules that the model keeps of each size.")
@click.option("--budget", metavar="TIME", help="Come to an end within this time, such as 300s or 5m, with what is known by then.")
@click.option("--store", metavar="DIR", help="Keep a JSON record of every candidate there, written as soon as it is known.")
@click.option("--resume", is_flag=True, help="Reuse the records of --store.")
@click.option("--cluster", metavar="ADDRESS", help="Work on the workers of this dask scheduler (host:port), one GPU each.")
@click.option("--vs", default=PEERS, show_default=True, metavar="PEERS", help="Peers to time beside the last candidates, or none.")
@click.option(
    "--rounds", type=click.IntRange(1), default=14, show_default=True, help="Measurements of each candidate that gets to the end."
)
@click.option("--jobs", type=click.IntRange(1), help="Processes at a time on the CPU. Default: one a core.")
@click.option("--build-only", metavar="DIR", help="Compile the candidates into DIR, and stop. Needs no GPU.")
@click.option("--from", "folder", metavar="DIR", help="Measure the candidates that --build-only left there. Needs no compiler.")
@click.option("--table", metavar="FILE", help="Put the winners into this tuned table; a new one begins as a copy of fagen's own.")
@click.option("--output", metavar="FILE", help="Write the results there as JSON.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random inputs, and of a sampled space.")
@common.json_option
def command(**options: Any) -> int:
    """Find the fastest schedule for some sizes, around SCHEDULE.

    Combinations of knobs around SCHEDULE (as --set changes it) are checked for legality; the model keeps those with a chance; these are compiled
    in parallel and compared with float64, then raced in rotating order on each size: the slower half drops out, rounds double, and the
    last ones are timed beside the peers. Those that fail are listed with the reason. Exit code 1 if nothing could be compiled, or a size
    has no winner.
    """
    return _Tune(**options).run()


class _Tune:
    """One run of the command; the options are its attributes."""

    def __init__(
        self,
        *,
        schedule: str,
        shapes: tuple[str, ...],
        grid: str | None,
        settings: tuple[str, ...],
        causal: bool,
        over: tuple[str, ...],
        exclude_known: bool,
        keep: int,
        budget: str | None,
        store: str | None,
        resume: bool,
        cluster: str | None,
        vs: str,
        rounds: int,
        jobs: int | None,
        build_only: str | None,
        folder: str | None,
        table: str | None,
        output: str | None,
        seed: int,
        as_json: bool,
    ):
        from ..evidence import variant_id
        from ..explore.bench import check_peers

        self.began = time.time()
        self.item = common.select([schedule], settings, causal)[0]
        self.name = f"{self.item.stem}.{variant_id(self.item.attention)}"
        self.problems = problems_of(self.item, shapes, grid)
        self.peers = tuple(dict.fromkeys(n.strip() for n in vs.split(",") if n.strip() not in ("", "none")))
        check_peers(self.peers)
        self.budget = None if budget is None else parse_budget(budget)
        self.axes = parse_axes(over)
        self.exclude_known, self.keep, self.rounds, self.seed = exclude_known, keep, rounds, seed
        self.store, self.resume, self.cluster, self.jobs = store, resume, cluster, jobs or cores()
        self.build_only, self.folder, self.table, self.output, self.as_json = build_only, folder, table, output, as_json
        self._refuse_clashes(over)
        self.seconds: dict[str, float] = {}

    def run(self) -> int:
        from ..explore import tune_run
        from ..explore.bench_lab import check_device

        if not self.build_only and not self.cluster:
            check_device()
        with tempfile.TemporaryDirectory(prefix="fagen-tune-") as scratch:
            place = Path(self.build_only or self.folder or scratch)
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise InputError("--build-only", f"{place} cannot be made: {e.strerror or e}") from e
            runner: Runner
            if self.cluster:
                from ..explore.tune_cluster import Cluster, connect

                runner = Cluster(connect(self.cluster), place, seed=self.seed)
            else:
                runner = tune_run.Workshop(place, self.jobs, seed=self.seed)
            gpu = None if self.build_only else runner.device()
            if self.table and gpu is not None:
                from ..explore.tune import check_buckets

                check_buckets(self.problems, gpu.sms)
            memory = self._memory(gpu, place)
            prepared = self._read() if self.folder else self._prepare(runner, gpu, memory)
            if self.build_only:
                write_file(tune_run.manifest(place, self.name), prepared.to_json() + "\n")
                if self.as_json:
                    common.write_json(prepared.to_dict())
                else:
                    from .tune_report import tell_prepared

                    tell_prepared(prepared, str(place))
                return int(not prepared.candidates)
            result = self._measure(prepared, runner, memory)
        self._leave(result)
        return int(not result.ok)

    # the phases -----------------------------------------------------------------------------------------------------------

    def _prepare(self, runner: Runner, gpu: Gpu | None, memory: Memory) -> Prepared:
        from ..explore import tune
        from ..library import builtin_names
        from ..tuned import BUILTIN

        start = self.item.schedule
        with self._phase("space"), Bar("looking at the rules"):
            space, known, axes = self._space()
        with self._phase("model"), Bar("predicting", None if space.sampled else len(space.candidates)) as bar:
            space, times = tune.predicted(space, self.problems, runner, axes, bar.step)
        candidates, lost = tune.pruned(space, times, self.problems, self._name, keep=self.keep, always=(start, *known))
        common.note(
            f"{self.name}: {len(space.candidates)} of {space.enumerated} schedules are legal"
            f"{_left_out(space)}, {len(candidates)} kept by the model"
        )
        candidates = (*candidates, *self._beside(gpu, {c.schedule for c in candidates}))
        again = [
            f for c in candidates for p in self.problems[:1] if (f := memory.failed(c, p)) is not None and f.stage == "compile"
        ]
        if again:
            common.note(f"{self.name}: {len(again)} did not compile in an earlier run, and are not compiled again")
        todo = tuple(c for c in candidates if c.name not in {f.name for f in again})
        base = self.item.stem if self.item.stem in builtin_names() else BUILTIN[self.item.attention.dtype]
        with self._phase("compile"), Bar("compiling", len(todo)) as bar:
            prepared = tune.prepare(space, todo, (*lost, *again), base, start, runner, bar.step, self._expired(COMPILE_SHARE))
        by_name = {c.name: c for c in todo}
        for f in prepared.failures:
            if f.stage == "compile" and f.name in by_name:
                for p in self.problems:
                    memory.keep(by_name[f.name], p, f.stage, f.reason, None, f.bundle)
        return prepared

    def _measure(self, prepared: Prepared, runner: Runner, memory: Memory) -> TuneResult:
        from ..explore import tune

        deadline = None if self.budget is None else self.began + self.budget
        with Bar("verifying and racing") as bar:
            return tune.tune(
                prepared,
                self.problems,
                runner,
                date=_today(),
                memory=memory,
                peers=self.peers,
                rounds=self.rounds,
                heard=bar.step,
                deadline=deadline,
                seconds=self.seconds,
                clock=time.monotonic,
            )

    def _leave(self, result: TuneResult) -> None:
        from .tune_report import report

        if self.output:
            write_file(Path(self.output), result.to_json() + "\n")
        if self.table:
            _record(self.table, result)
        if self.as_json:
            common.write_json(result.to_dict())
        else:
            common.write(*report(result))

    def _phase(self, name: str) -> _Phase:
        return _Phase(name, self.seconds)

    def _expired(self, share: float) -> Callable[[], bool]:
        return lambda: self.budget is not None and time.time() > self.began + share * self.budget

    # what there is to try -------------------------------------------------------------------------------------------------

    def _name(self, schedule: Schedule) -> str:
        return f"{self.name}.{schedule.id}"

    def _space(self) -> tuple[Space, tuple[Schedule, ...], Axes]:
        """The space, what is known for this head_dim (part of it, so that a winner is never slower than what it replaces, or left out), and the
        knobs."""
        from ..errors import FagenError
        from ..explore.tune_space import default_axes, enumerate_space
        from ..library import builtin_names, load
        from ..tuned import HALF_TYPES, builtin_tables, read

        attention, start = self.item.attention, self.item.schedule
        tables = [*builtin_tables(), *([read(self.table)] if self.table and Path(self.table).exists() else [])]
        entries = [e for t in tables if t.arch == start.arch for e in t.entries if e.head_dim == attention.head_dim]
        eight = attention.has_descales  # whose schedules are no guide for 16-bit types
        known = [e.schedule for e in entries if (e.dtype not in HALF_TYPES) == eight and not e.unusable(attention)]
        if self.exclude_known:
            for name in builtin_names():
                try:
                    known.append(load(name, head_dim=attention.head_dim).schedule)
                except FagenError:  # a built-in that has no tiles for this head_dim
                    continue
        axes = self.axes or default_axes(attention, start)
        also, exclude = ((), known) if self.exclude_known else (known, ())
        with common.refusing(self.item):
            space = enumerate_space(attention, start, axes, also, exclude=exclude, seed=self.seed)
        return space, tuple(also), axes

    def _beside(self, gpu: Gpu | None, there: set[Schedule]) -> tuple[Candidate, ...]:
        """With --exclude-known, what the tuned table has for each problem."""
        from .. import tuned
        from ..explore.tune_result import Candidate

        if not self.exclude_known:
            return ()
        known = tuned.H200 if gpu is None else replace(tuned.H200, name=gpu.name, num_sms=gpu.sms)
        chosen = (tuned.choose(self.item.attention, p, known).schedule for p in self.problems)
        return tuple(Candidate(self._name(s), s, beside=True) for s in dict.fromkeys(chosen) if s not in there)

    def _read(self) -> Prepared:
        from ..explore.tune_run import read_prepared

        prepared = read_prepared(self.folder or "", self.name)
        if prepared.attention != self.item.attention:
            raise InputError(
                "--from", f"{self.folder} has candidates for {prepared.attention.label}, not for {self.item.attention.label}"
            )
        return prepared

    def _memory(self, gpu: Gpu | None, place: Path) -> Memory:
        from ..explore.tune_memory import Forgetful, StoreMemory
        from ..explore.tune_run import compiler_of
        from ..explore.tune_store import Store

        if self.store is None or gpu is None:
            return Forgetful()
        compiler = compiler_of(place if self.folder else None)
        return StoreMemory(Store(self.store), self.item.attention, gpu, compiler, _today(), place, self.resume)

    def _refuse_clashes(self, over: Sequence[str]) -> None:
        if self.build_only and self.folder:
            raise InputError("--build-only", "compiles candidates, and --from takes compiled ones; one of them is enough")
        if self.build_only and (self.table or self.output or self.store or self.cluster or self.budget):
            raise InputError(
                "--build-only", "measures nothing, so there is nothing for --table, --output, --store, --cluster or --budget"
            )
        if self.folder and (over or self.exclude_known):
            raise InputError(
                "--over" if over else "--exclude-known", "has no effect on candidates that are compiled already (--from)"
            )
        if self.folder and not Path(self.folder).is_dir():
            raise InputError("--from", f"there is no folder {self.folder}")
        if self.resume and not self.store:
            raise InputError("--resume", "needs the --store that an earlier run wrote")
        if self.table and self.item.schedule.arch != "sm_90a":
            raise InputError("--table", f"holds schedules for sm_90a; {self.item.stem} is for {self.item.schedule.arch}")
        for option, path in (("--table", self.table), ("--output", self.output)):
            if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
                raise InputError(option, f"{path} cannot be written: it is a folder, or lies in none")


class _Phase:
    """Notes how long something takes."""

    def __init__(self, name: str, into: dict[str, float]):
        self._name, self._into = name, into

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._into[self._name] = time.monotonic() - self._began


# what was found -----------------------------------------------------------------------------------------------------------


def _record(path: str, result: TuneResult) -> None:
    from .. import tuned
    from ..explore.tune import entries

    found = entries(result)
    tuned.record(path, found, beginning(result.gpu))
    common.note(f"{len(found)} entr{'y' if len(found) == 1 else 'ies'} written to {path}")


def beginning(gpu: str) -> Table:
    """What a new table for a GPU begins as: fagen's own of its family, or an empty one."""
    from .. import tuned

    known = [t for t in tuned.builtin_tables() if t.arch == "sm_90a" and t.device in gpu]
    return known[0] if known else tuned.Table("sm_90a", gpu.removeprefix("NVIDIA "), ())


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def _left_out(space: Space) -> str:
    from .tune_report import counted

    return counted(space.illegal) + (f", {space.excluded} known ones left out" if space.excluded else "")

"""The command line: one module a command, imported when it is called, so that `fagen --help` answers at once.

Exit codes: 0 fine; 1 a check failed, a kernel did not compile or run; 2 usage, an illegal schedule, an unusable file; 70 a fault of
fagen's own; 130 interrupted; 141 the reader of the output went away. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module

import click

from ..errors import CompileError, FagenError

COMMANDS = {
    "build": "Compile schedules: NAME.cu, NAME.cubin and NAME.json. Needs no GPU.",
    "check": "Compare kernels with float64, on the GPU or in the simulator.",
    "run": "Run a kernel on the tensors of an .npz file.",
    "bench": "Time schedules beside cuDNN and FlashAttention 2 and 3.",
    "tune": "Find the fastest schedule for some sizes.",
    "trace": "What each warp role does when: a timeline from inside the kernel.",
    "model": "Predicted beside measured times: how well the model ranks schedules.",
    "explain": "Loop nest, memory and registers of a kernel, and what binds it.",
    "diff": "Knobs, programs, code and instructions of two schedules side by side.",
    "prove": "Prove a kernel's synchronisation for every trip count that matters.",
    "ls": "The built-in schedules, and whether their evidence is fresh.",
    "cache": "The cache of compiled kernels.",
    "repro": "Run the case of a repro bundle again.",
}
"""Name → short help; the command is `command` in this package's module of that name, but for those of MODULES."""

MODULES = {"run": "run_command"}
"""Modules with another name than their command's: importing fagen.cli.run would hide the function `run` of this package."""

INTERNAL, INTERRUPTED, BROKEN_PIPE = 70, 130, 141


class _Commands(click.Group):
    """Imports a command's module when it is needed; the list of commands needs none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = import_module(f"{__name__}.{MODULES.get(name, name)}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS)
            hint = f"did you mean {' or '.join(near)}?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .. import __version__

        click.echo(f"fagen {__version__}")
        ctx.exit()


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """A code-generating kernel compiler for attention.

    SCHEDULE is the name of a built-in schedule (see `fagen ls`) or the path of a Python file that defines `attention` and `schedule`.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> None:
    """The console script: runs a command and ends the process with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Mistakes of the user become one message on stderr, never a traceback."""
    warnings.showwarning = _show_warning
    try:
        result = cli.main(list(arguments), prog_name="fagen", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (BrokenPipeError, SystemExit):  # click turns a broken pipe into an exit, and nothing else
        # Python flushes stdout once more when it ends: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (KeyboardInterrupt, click.exceptions.Abort):
        _say("interrupted")
        return INTERRUPTED
    except click.ClickException as e:
        context = getattr(e, "ctx", None)
        where = f" (see {context.command_path} --help)" if context else ""
        _say(f"{e.format_message()}{where}")
        return 2
    except CompileError as e:
        _say(str(e))
        if e.log and e.log not in str(e):
            print(e.log, file=sys.stderr)
        return e.exit_code
    except FagenError as e:
        _say(str(e))
        return e.exit_code
    except MemoryError as e:
        _say(f"this machine has too little memory for sizes like these: {e or 'out of memory'}")
        return 1
    except Exception as e:
        if _interrupted(e):
            _say("interrupted")
            return INTERRUPTED
        traceback.print_exc()
        _say("this is a fault of fagen, not yours; please report it with the lines above")
        return INTERNAL


def _interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is what an error came of: it may stop a library in the middle of its start, whose end then fails."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


def _say(text: str) -> None:
    print(f"fagen: {text}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _say(f"warning: {message}")

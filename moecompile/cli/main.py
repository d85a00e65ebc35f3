"""Parse the command line, run one subcommand, and turn the package's errors into one sentence and exit code 2."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from rich.console import Console

from moecompile.errors import MoeCompileError
from moecompile.runtime.launcher import RankError

from . import demo, inspect_model, list_passes, report, verify_model

INTERRUPTED = 130
FAILED = 2
_COMMANDS = (demo, inspect_model, list_passes, verify_model, report)


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    made = argparse.ArgumentParser(
        prog="moecompile",
        description="A compiler for Mixture-of-Experts training.",
        epilog="example: moecompile demo --steps 20",
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("--traceback", action="store_true", help="show where an error was raised")
        command.set_defaults(run=module.run)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 a comparison failed, 2 an error, 130 Ctrl-C."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments, Console()))
    except KeyboardInterrupt:
        print("stopped; no process is left", file=sys.stderr)
        return INTERRUPTED
    except (MoeCompileError, RankError) as error:
        if arguments.traceback:
            traceback.print_exc()
        else:
            print(f"moecompile {arguments.command}: {sentence(error)}", file=sys.stderr)
        return FAILED


def sentence(error: BaseException) -> str:
    """The error's first paragraph; for a rank that failed with one of this package's errors, that error's."""
    if isinstance(error, RankError) and isinstance(error.__cause__, MoeCompileError):
        return f"rank {error.rank}: {error.__cause__}"
    return str(error).split("\n\n")[0] if isinstance(error, RankError) else str(error)

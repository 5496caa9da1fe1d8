"""The ``octavo`` command: one module per sub-command, of this folder or a plug-in (``octavo.plugins``).

A command module has ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). It
imports heavy packages such as torch inside ``run``, so that help and usage errors appear at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, cast

from octavo import __version__, plugins
from octavo.cli.parser import EXIT_ERROR, Parser
from octavo.cli.settings import environment_warnings
from octavo.errors import OctavoError
from octavo.names_of_others import translated

COMMANDS = (
    *("serve", "chat", "generate", "pull", "list", "show", "rm", "models"),
    *("launch", "run-batch", "doctor", "tune", "cache", "state", "simulate", "plan", "explain", "debug", "completion"),
)
"""In the order of the help; then come the other plug-ins."""

EXAMPLES = """\
octavo chat                          chat with a small model, in this terminal
octavo serve                         serve it at http://127.0.0.1:8000/v1
octavo serve Qwen/Qwen3-8B           serve a model of the Hugging Face Hub
octavo launch claude                 start Claude Code with a server of its own
octavo doctor                        what this machine has, and what is missing
octavo run-batch in.jsonl out.jsonl  answer the requests in a file
octavo COMMAND --help                the flags of a command
"""
EXIT_INTERRUPTED = 130
"""Exit status that a shell reports for a process ended by SIGINT."""
EXIT_BROKEN_PIPE = 141


class Command(Protocol):
    """Interface of a command module."""

    NAME: str
    HELP: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def commands() -> Iterator[Command]:
    """Every command, in the order of the help. A plug-in that cannot be imported is left out with a warning."""
    others = plugins.parts(plugins.COMMANDS)
    for name in (*COMMANDS, *(name for name in others if name not in COMMANDS)):
        try:
            found = others[name].load() if name in others else importlib.import_module(f"octavo.cli.{name}")
        except ImportError as error:
            print(f"octavo: warning: no command {name!r}: {error}", file=sys.stderr)
        else:
            yield cast(Command, found)


def build_parser(only: str | None = None) -> Parser:
    """The parser of all commands; with ``only``, without the arguments of others, which take long to add."""
    parser = Parser(prog="octavo", description="Serve and run large language models.")
    parser.usage = "octavo COMMAND [options]"
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    table = parser.add_subparsers(
        prog="octavo", title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for command in commands():
        sub = table.add_parser(command.NAME, help=command.HELP, description=command.HELP[0].upper() + command.HELP[1:])
        sub.set_defaults(run=command.run, parser=sub)
        if only in (None, command.NAME):
            command.add_arguments(sub)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``; exit after printing help, the version or a usage error."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(next((word for word in argv if not word.startswith("-")), ""))
    if not argv:
        parser.print_help()
        print(f"\nexamples:\n{EXAMPLES}", end="")
        parser.exit(EXIT_ERROR)
    names = [command.NAME for command in commands()]
    if not argv[0].startswith("-") and argv[0] not in names:
        parser.error(f"there is no command {argv[0]!r}; {_instead(argv[0], names)}")
    argv, notes = translated(argv)
    args, rest = parser.parse_known_args(argv)
    if rest:
        args.parser.refuse(rest)
    for note in notes:
        print(f"octavo: {note}", file=sys.stderr)
    return args


def _instead(name: str, names: Collection[str]) -> str:
    """What may have been meant, as the end of a message."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"commands are {', '.join(names)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by ``argv`` (default: ``sys.argv``); return its exit code."""
    args = parse_arguments(argv)
    for warning in environment_warnings(os.environ):
        print(f"octavo: warning: {warning}", file=sys.stderr)
    try:
        return int(args.run(args))
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe, as `| head` does. The interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE

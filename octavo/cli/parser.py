"""The argument parser of all commands: short help, whole help, and suggestions for what is misspelt."""

from __future__ import annotations

import argparse
import difflib
import shutil
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from octavo.names_of_others import ADVICE

EXIT_ERROR = 2
SETTINGS = "settings"
"""Last word of the titles of groups of settings, and the title of all in short help."""
CLOSE = 0.8
"""How alike an unknown flag and the one that is suggested are; less alike ones mean something else."""
WIDEST = 110
"""Columns of help on a wide terminal."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses abbreviated flags and suggests the closest known flag for an unknown one.

    ``--help`` leaves out the settings that few need, see ``keep_for_whole_help``; ``--help=all`` shows them.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, add_help=False, **options)  # type: ignore[arg-type]
        self._rare: frozenset[str] = frozenset()
        self._help = self.add_argument("-h", "--help", action=_Help, help="show this help and exit")

    def keep_for_whole_help(self, names: Collection[str]) -> None:
        """Leave these arguments to ``--help=all``, and say so."""
        self._rare = frozenset(names)
        self._help.help = "show this help and exit; with =all every setting"

    def short_help(self) -> str:
        """The help without rare arguments; of those with long texts, the first part of each."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        sections: dict[str, list[argparse.Action]] = {}
        for group in self._action_groups:
            title = SETTINGS if (group.title or "").endswith(f" {SETTINGS}") else group.title or ""
            shown = [_brief(action) for action in group._group_actions if action.dest not in self._rare]
            sections.setdefault(title, []).extend(action for action in shown if action.help != argparse.SUPPRESS)
        for title, actions in sections.items():
            if actions:
                formatter.start_section(title)
                formatter.add_arguments(actions)
                formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def print_short_help(self) -> None:
        print(self.short_help() if self._rare else self.format_help(), end="")

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def refuse(self, arguments: Sequence[str]) -> NoReturn:
        """Exit with an error about all unknown arguments; words behind an unknown flag are its values."""
        flags = [argument for argument in arguments if argument.startswith("-")]
        self.error("; ".join(map(self._refusal, flags or arguments[:1])))

    def _refusal(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        if flag in ADVICE:
            return f"there is no flag {flag}: {ADVICE[flag]}"
        close = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=CLOSE)
        return f"unknown argument {argument!r}" + (f"; did you mean {close[0]}?" if close else "")


class _Help(argparse.Action):
    """``--help`` and ``--help=all``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs="?", metavar="all", default=argparse.SUPPRESS, **options
        )

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        if values == "all":
            parser.print_help()
        else:
            parser.print_short_help()
        parser.exit()


def _brief(action: argparse.Action) -> argparse.Action:
    """The action with the first part of its help, without the alternatives and defaults that follow."""
    if not action.help or not action.option_strings or action.help == argparse.SUPPRESS:
        return action
    name = next(option for option in action.option_strings if option.startswith("--"))
    short = [option for option in action.option_strings if not option.startswith("--")]
    copy = argparse.Action([*short, name], action.dest, action.nargs, metavar=action.metavar)
    copy.help = action.help if action.dest == argparse.SUPPRESS else action.help.partition(";")[0].partition(" (")[0]
    return copy


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(shutil.get_terminal_size().columns, WIDEST) - 2
    return argparse.HelpFormatter(prog, max_help_position=36, width=width)

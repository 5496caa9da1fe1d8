"""``octavo completion SHELL``: print a script that completes commands, flags and their values in a shell."""

from __future__ import annotations

import argparse

from octavo.config import ServeConfig, settings

NAME = "completion"
HELP = "print a script that completes commands, flags and values in bash, zsh or fish"
INSTALLATION = """\
for this shell, and for each new one in the file named last:
  eval "$(octavo completion bash)"     ~/.bashrc
  eval "$(octavo completion zsh)"      ~/.zshrc, after compinit
  octavo completion fish | source      ~/.config/fish/config.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = INSTALLATION
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script, made from the definitions of all commands."""
    import shtab

    from octavo.cli import build_parser

    parser = build_parser()
    _add_values(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Set the values of every setting as choices: parsers leave them out, because values are checked later."""
    choices = {item.name: item.choices for item in settings(ServeConfig) if item.choices}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _add_values(command)
        elif action.nargs is None and action.dest in choices:
            action.choices = choices[action.dest]

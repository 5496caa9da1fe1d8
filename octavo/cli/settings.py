"""Settings on the command line: flags, ``OCTAVO_*`` variables and YAML files, all from ``octavo.config``.

A flag overrides a variable, a variable the file, and the file the default. The error for an invalid value
names its source, such as ``OCTAVO_PORT: expected int, got 'x'``.
"""

from __future__ import annotations

import argparse
import difflib
import os
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from octavo.cli.parser import SETTINGS, Parser
from octavo.config import EngineConfig, ServeConfig, settings
from octavo.errors import ConfigError
from octavo.names_of_others import FLAGS_OF_OTHERS, VARIABLES_OF_OTHERS
from octavo.setting import MOST, MOST_REAL, SECRETS, Setting

PREFIX_OF_INFERENGINE = "INFERENGINE_"
PREFIX = "OCTAVO_"
OTHER_VARIABLES = frozenset({"OCTAVO_CACHE_DIR"})
"""Variables that Octavo reads and that are not settings."""

Config = TypeVar("Config", bound=EngineConfig)


class Given(NamedTuple):
    """A value as given, not yet parsed, and its source."""

    value: Any
    source: str


def flag_name(name: str) -> str:
    """``max_num_seqs`` as a flag: ``--max-num-seqs``."""
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    """``max_num_seqs`` as an environment variable: ``OCTAVO_MAX_NUM_SEQS``."""
    return PREFIX + name.upper()


def add_settings(
    parser: argparse.ArgumentParser,
    config_class: type[EngineConfig],
    common: Collection[str] = (),
    takes_several: bool = False,
) -> None:
    """Add ``[MODEL]``, ``--config`` and a flag for each setting of ``config_class``, grouped by owner.

    With ``takes_several`` further models are ``other_models``. Short help shows the ``common`` settings alone.
    Values stay text until ``load_config``, so that every source is checked by the same code.
    """
    parser.usage = f"{parser.prog} [MODEL{' ...' if takes_several else ''}] [options]"
    parser.epilog = (
        f"Every setting can also be given as an environment variable, such as {variable_name('max_num_seqs')}=8, "
        "or in the YAML file of --config. Flags override the environment, which overrides the file."
    )
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    if takes_several:
        help = "more models behind this port; also NAME=MODEL"
        parser.add_argument("other_models", nargs="*", metavar="...", help=help)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings by name; settings of other commands are ignored"
    )
    owners = typing.get_type_hints(config_class)
    groups: dict[str, Any] = {}
    for item in settings(config_class):
        if item.group not in groups:
            groups[item.group] = parser.add_argument_group(f"{item.group} {SETTINGS}", owners[item.group].__doc__)
        add_flag(groups[item.group], item)
    assert isinstance(parser, Parser)
    parser.keep_for_whole_help({item.name for item in settings(config_class)} - set(common))


def add_some_settings(
    parser: argparse.ArgumentParser, names: Collection[str], config_class: type[EngineConfig] = EngineConfig
) -> None:
    """Add the flags of a few settings, for ``load_config``."""
    for item in settings(config_class):
        if item.name in names:
            add_flag(parser, item)
    parser.set_defaults(config=None, model_argument=None)


def add_flag(group: Any, item: Setting) -> None:
    """Add the flag of one setting to a parser or a group of one, and those of other servers that mean the same."""
    aliases = [alias for alias, name in FLAGS_OF_OTHERS.items() if name == item.name]
    if item.type is bool:
        help = item.help + ("" if item.default is None else f" (default: {'on' if item.default else 'off'})")
        group.add_argument(flag_name(item.name), dest=item.name, action=argparse.BooleanOptionalAction, help=help)
        for alias in aliases:
            action = argparse.BooleanOptionalAction
            group.add_argument(alias, dest=item.name, action=action, default=None, help=argparse.SUPPRESS)
        return
    help = item.help.replace("%", "%%") + ("" if item.default is None else f" (default: {item.default})")
    metavar = "{" + ",".join(item.choices) + "}" if item.choices else item.type.__name__.upper()
    group.add_argument(flag_name(item.name), dest=item.name, metavar=metavar, help=help)
    for alias in aliases:
        group.add_argument(alias, dest=item.name, help=argparse.SUPPRESS)


def load_config(
    config_class: type[Config], args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> Config:
    """The settings from flags, environment and file combined; raises ``ConfigError`` naming the source."""
    known = {item.name: item for item in settings(config_class)}
    given = given_settings(known, args, environ)
    values = {name: known[name]._replace(name=source).parse(value) for name, (value, source) in given.items()}
    try:
        return typing.cast(Config, config_class.from_flat(values))
    except ConfigError as error:
        # An invalid combination. The message names settings; add their sources.
        sources = [f"{name} is from {given[name].source}" for name in given if name in str(error)]
        raise ConfigError("; ".join([str(error), *sources])) from None


def given_settings(
    known: Mapping[str, Setting], args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> dict[str, Given]:
    """The settings that are given, each by the source that overrides the others. Raises ``ConfigError``."""
    file = from_file(Path(args.config)) if args.config else {}
    everything = {**file, **from_environment(known, environ), **from_flags(known, args)}
    return {name: value for name, value in everything.items() if name in known}


def refuse_settings(args: argparse.Namespace, names: Collection[str], advice: str) -> None:
    """Raise ``ConfigError`` if one of these settings is given, as it would have no effect."""
    known = {item.name: item for item in settings(EngineConfig) if item.name in names}
    for given in given_settings(known, args).values():
        raise ConfigError(f"{given.source}: {advice}")


def from_flags(known: Mapping[str, Setting], args: argparse.Namespace) -> dict[str, Given]:
    """The settings given as flags or as ``MODEL``."""
    given = {name: Given(value, flag_name(name)) for name in known if (value := getattr(args, name, None)) is not None}
    if args.model_argument is not None:
        if "model" in given and given["model"].value != args.model_argument:
            raise ConfigError(f"two models are given: {args.model_argument!r} and --model {given['model'].value!r}")
        given["model"] = Given(args.model_argument, "MODEL")
    return given


def from_environment(known: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, Given]:
    """The settings given as ``OCTAVO_*`` variables; an empty variable is an error, because its meaning is ambiguous."""
    given = {}
    for name in known:
        variable = variable_name(name)
        if variable in environ:
            if not environ[variable]:
                raise ConfigError(f"{variable}: is empty; give a value or unset it")
            given[name] = Given(environ[variable], variable)
    return given


def from_file(path: Path) -> dict[str, Given]:
    """The settings in a YAML file: flat names, with ``-`` or ``_``; unknown names raise ``ConfigError``."""
    known = [item.name for item in settings(ServeConfig)]
    given: dict[str, Given] = {}
    for key, value in _read_yaml(path):
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}{_suggestion(name, known)}")
        if name in given:
            raise ConfigError(f"{path}: {name} is given twice")
        given[name] = Given(value, f"{path}: {key}")
    return given


def _read_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a YAML file of ``name: value`` lines, duplicates included."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"--config: {path} must hold lines of 'name: value'")
        for key, value in root.value:
            yield str(key.value), loader.construct_object(value, deep=True)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None


def environment_warnings(environ: Mapping[str, str]) -> Iterator[str]:
    """One line per ``OCTAVO_*`` variable that Octavo does not read."""
    known = [variable_name(item.name) for item in settings(ServeConfig)]
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known and variable not in OTHER_VARIABLES:
            yield f"{variable} is not a setting{_suggestion(variable, known, PREFIX)}"
        elif variable.startswith(PREFIX_OF_INFERENGINE):
            name = VARIABLES_OF_OTHERS.get(variable)
            yield f"{variable} is not read; " + (f"use {variable_name(name)}" if name else "nothing here stands for it")


def secret_warnings(args: argparse.Namespace) -> Iterator[str]:
    """One line per secret that was given as a flag."""
    for name in sorted(SECRETS):
        if getattr(args, name, None) is not None:
            yield (
                f"{flag_name(name)} shows the key to every user of this machine, for example in ps; "
                f"give it as {variable_name(name)} or in the file of --config"
            )


def _suggestion(name: str, known: Sequence[str], prefix: str = "") -> str:
    """The closest match among ``known``, as the end of a message; a ``prefix`` of all names is not compared."""
    close = difflib.get_close_matches(name.removeprefix(prefix), [other.removeprefix(prefix) for other in known], n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def positive(text: str) -> int:
    """Parse a flag's integer of at least 1. Raises ``ArgumentTypeError``, or ``ValueError`` if it is not an integer."""
    return _whole(text, 1)


def at_least_0(text: str) -> int:
    """Parse a flag's integer of at least 0. Raises ``ArgumentTypeError``, or ``ValueError`` if it is not an integer."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"must be at most {MOST}, got {text}")
    return value


def above_zero(text: str) -> float:
    """Parse a flag's number above 0. Raises ``ArgumentTypeError``, or ``ValueError`` if it is not a number."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def bounded(text: str) -> float:
    """Parse a flag's number above 0 that is not infinite. Raises as ``above_zero``."""
    value = above_zero(text)
    if value > MOST_REAL:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_REAL}, got {text}")
    return value

"""``octavo state``: check, copy and compact what a server keeps in ``--state-dir``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from octavo.cli.settings import add_some_settings, load_config
from octavo.cli.terminal import note, size_text, table
from octavo.config import ServeConfig
from octavo.errors import ConfigError

NAME = "state"
HELP = "check, export or vacuum the responses, files and batches that a server keeps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, and the folders."""
    parser.usage = f"{parser.prog} check|export|vacuum --state-dir FOLDER [options]"
    parser.add_argument(
        "action",
        choices=["check", "export", "vacuum"],
        help="check: read everything and report damage; export: copy the database to FILE, also while a server uses "
        "it; vacuum: make the database as small as its content",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="new file for export")
    add_some_settings(parser, ["state_dir", "journal"], ServeConfig)


def run(args: argparse.Namespace) -> int:
    """Do it; return 1 if check finds damage."""
    settings = load_config(ServeConfig, args).server
    if (args.file is None) == (args.action == "export"):
        raise ConfigError(f"state: {args.action} takes {'the' if args.action == 'export' else 'no'} file")
    is_sound = True
    if settings.journal is not None and args.action == "check":
        is_sound = _check_journal(Path(settings.journal).expanduser())
    if settings.state_dir is not None:
        return 0 if _act(args, Path(settings.state_dir).expanduser()) and is_sound else 1
    if settings.journal is None or args.action != "check":
        raise ConfigError("state_dir: give the server's --state-dir")
    return 0 if is_sound else 1


def _act(args: argparse.Namespace, folder: Path) -> bool:
    """Do what ``args`` say with the database; return whether it is sound."""
    from octavo_server.durable import stored_state

    if args.action == "check":
        return _check(folder)
    if args.action == "export":
        target = Path(args.file).expanduser()
        note(f"wrote {target} ({size_text(stored_state.export(folder, target))})")
    else:
        note(f"the database has {size_text(stored_state.vacuum(folder))} now")
    return True


def _check(folder: Path) -> bool:
    from octavo_server.durable.stored_state import check

    report = check(folder)
    rows = [["content", "items", "size", "oldest"]]
    for kind in report.kinds:
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(kind.oldest))
        rows.append([kind.name, str(kind.num_items), size_text(kind.num_bytes), day])
    rows.append(["the file", "", size_text(report.num_bytes), ""])
    rows.append(["unused in it", "", size_text(report.num_unused), ""])
    print(table(rows, right=[1, 2]))
    for problem in report.problems:
        note(f"damaged: {problem}")
    return not report.problems


def _check_journal(folder: Path) -> bool:
    """Print how many records the journal has; return whether all could be read."""
    from octavo_server.durable.synced_log import Damage, log_files

    damage = Damage()
    try:
        sizes = [len(payload) for file in log_files(folder) for payload in file.read(damage)]
    except OSError as error:
        raise ConfigError(f"journal: {folder} cannot be read: {error.strerror}") from None
    print(f"journal: {len(sizes)} records, {size_text(sum(sizes))}")
    if damage.tail_bytes:
        note(f"the last {damage.tail_bytes} bytes of the journal were not written completely; a server skips them")
    if damage.records:
        note(f"damaged: {damage.records} gaps between records of the journal")
    return not damage.records

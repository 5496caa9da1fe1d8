"""Logging to standard error, as lines for people or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
TIME = "%H:%M:%S"
PLAIN, DIM, YELLOW, RED = "\x1b[0m", "\x1b[2m", "\x1b[33m", "\x1b[31m"


class JSONFormatter(logging.Formatter):
    """A JSON object on a line for each record; the attribute ``fields`` of a record adds members."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class ColourFormatter(logging.Formatter):
    """Text with colours for a terminal: yellow for warnings and statuses of 400 and above, red for errors and 500."""

    def __init__(self) -> None:
        super().__init__()
        text = f"{DIM}%(asctime)s{PLAIN} COLOUR%(levelname).1s %(name)s:{PLAIN} %(message)s"
        self._formatters = {
            colour: logging.Formatter(text.replace("COLOUR", colour), TIME) for colour in (PLAIN, DIM, YELLOW, RED)
        }

    def format(self, record: logging.LogRecord) -> str:
        return self._formatters[_colour(record)].format(record)


def _colour(record: logging.LogRecord) -> str:
    status = getattr(record, "fields", {}).get("status", 0)
    if record.levelno >= logging.ERROR or status >= 500:
        return RED
    if record.levelno >= logging.WARNING or status >= 400:
        return YELLOW
    return DIM if record.levelno < logging.INFO else PLAIN


PACKAGES = ("octavo", "octavo_kernels", "octavo_server", "octavo_fleet")
"""Whose loggers have the level of the log."""


def has_colours() -> bool:
    """Whether standard error shows colours: on a terminal, unless ``NO_COLOR`` is set; always with ``FORCE_COLOR``."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def log_to_stderr(level: str, form: str = "text") -> None:
    """Log to standard error at ``level`` or above, in one of ``FORMATS``."""
    text = ColourFormatter() if has_colours() else logging.Formatter(TEXT, TIME)
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if form == "json" else text)
    logging.basicConfig(handlers=[handler])
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


def current_level() -> str:
    """The level of this process's log, for child processes."""
    return logging.getLevelName(logging.getLogger("octavo").getEffectiveLevel())


def current_format() -> str:
    """The format of this process's log, for child processes."""
    is_json = any(isinstance(handler.formatter, JSONFormatter) for handler in logging.getLogger().handlers)
    return "json" if is_json else "text"

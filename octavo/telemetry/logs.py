"""Logging to standard error, as lines for people or as JSON."""

from __future__ import annotations

import json
import logging
import time

FORMATS = ("text", "json")


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


def log_to_stderr(level: str, form: str = "text") -> None:
    """Log to standard error at ``level`` or above, in one of ``FORMATS``."""
    text = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if form == "json" else text)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("octavo").setLevel(level.upper())


def current_level() -> str:
    """The level of this process's log, for child processes."""
    return logging.getLevelName(logging.getLogger("octavo").getEffectiveLevel())


def current_format() -> str:
    """The format of this process's log, for child processes."""
    is_json = any(isinstance(handler.formatter, JSONFormatter) for handler in logging.getLogger().handlers)
    return "json" if is_json else "text"

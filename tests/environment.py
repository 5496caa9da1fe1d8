"""What tests and the processes they start see of the environment: the same on every machine."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import ssl
import sys
from pathlib import Path
from typing import Any

import certifi

from octavo.config import ServeConfig, settings
from octavo.system.cpus import num_cpus

ROOT = Path(__file__).parent.parent
KEPT = {"OCTAVO_CACHE_DIR"}
"""Where the default model and compiled kernels are kept."""
THREADS = "OMP_NUM_THREADS"
OF_TERMINALS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
OF_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def _set_up(environment: dict[str, str] | os._Environ[str]) -> None:
    """Leave out settings of a server, of terminals and of systemd; let processes import what is tested, from any folder
    and whatever is installed, and let no proxy come between client and server.

    Workers that share the processors get as many threads as there are processors for each: more would spend half of
    their time waiting for each other.
    """
    of_servers = {f"OCTAVO_{setting.name.upper()}" for setting in settings(ServeConfig)} - KEPT
    for name in (*of_servers, *OF_TERMINALS, *OF_SYSTEMD):
        environment.pop(name, None)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *paths])
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, (environment.get(name), "127.0.0.1", "localhost", "::1")))
    if num_workers := int(environment.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        environment.setdefault(THREADS, str(max(1, num_cpus() // num_workers)))


_create_context = ssl.create_default_context
_usual_context = functools.cache(_create_context)
AUTHORITIES = (certifi.where(), os.environ.get("SSL_CERT_FILE"))


def _shared_context(*args: Any, **options: Any) -> ssl.SSLContext:
    """One context for the HTTP clients of all tests, most of which have no TLS to verify: reading all certificates may
    take a tenth of a second."""
    is_usual = not args and options.keys() == {"cafile"} and options["cafile"] in AUTHORITIES
    return (_usual_context if is_usual else _create_context)(*args, **options)


_read_entry_points = importlib.metadata.entry_points


@functools.cache
def _entry_points_on(path: tuple[str, ...], *wanted: tuple[str, str]) -> Any:
    return _read_entry_points(**dict(wanted))


def _known_entry_points(**wanted: str) -> Any:
    """Those that were read for the same search path: they take a file for each installed package, and each application
    and model of the tests asks for some."""
    return _entry_points_on(tuple(sys.path), *wanted.items())


ssl.create_default_context = _shared_context
importlib.metadata.entry_points = _known_entry_points
_set_up(os.environ)  # at once: torch looks at the number of threads when it is imported

"""What tests and the processes they start see of the environment: the same on every machine."""

from __future__ import annotations

import os
from pathlib import Path

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


_set_up(os.environ)  # at once: torch looks at the number of threads when it is imported

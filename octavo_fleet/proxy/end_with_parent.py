"""Run a command that is ended with its parent, however that dies: ``python -m ... COMMAND ARGUMENT...`` (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command; it keeps the parent-death signal (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    command = sys.argv[1:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"upstream_command: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()

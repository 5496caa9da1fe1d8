"""A peer's own interpreter, loaded once and asked for one piece of work at a time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

SCRIPTS = Path(__file__).parent / "peers"


class PeerProcess:
    """A script of ``peers/``: says who it is in one line of JSON, then answers each line with a line.

    ``errors`` is the file that its standard error goes to; by default it is shown. Raises ``ConfigError`` if it cannot
    be started.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, errors: Path | None = None
    ) -> None:
        with contextlib.ExitStack() as files:
            err = files.enter_context(errors.open("wb")) if errors else None
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=err, env=env, text=True)
            except OSError as error:
                raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from None
        self.about: dict[str, Any] = self._read()

    def run(self, work: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Its answer to ``work``. Raises ``ConfigError`` when it ends, or takes more than ``seconds`` and is ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        timer = threading.Timer(seconds, self._process.kill) if seconds else None
        start = time.monotonic()
        if timer:
            timer.start()
        try:
            return self._read()
        except ConfigError as error:
            if seconds and time.monotonic() - start >= seconds:
                raise ConfigError(f"the work did not end in the {seconds:.0f} s that were left") from error
            raise
        finally:
            if timer:
                timer.cancel()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("the peer ended without an answer; run its script by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end by itself, or end it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=30)
        self._process.wait(timeout=30)

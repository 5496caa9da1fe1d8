"""A rank of a tensor-parallel engine but the first: loads its part of the model and executes the engine's messages.

Run as ``python -m octavo.rank_process CONNECTION MEMORY PARENT``, with two inherited descriptors and the process id of
its parent, with which it ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from octavo.errors import CANCELLATIONS, OctavoError, RanksLost
from octavo.system.garbage_collection import importing


class EngineGone(Exception):
    """The engine process has ended."""


def main() -> NoReturn:
    """Run a rank until its parent ends."""
    parent = int(sys.argv[3])  # it may have ended before this line
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # also while it computes, waits or is stopped

    def check() -> None:
        if os.getppid() != parent:
            raise EngineGone

    code = 1
    try:
        check()
        code = _run(Connection(int(sys.argv[1])), int(sys.argv[2]), check)
    except (EngineGone, EOFError, ConnectionError):
        pass
    except RanksLost as error:
        logging.getLogger("octavo.rank").error("%s", error)
    except CANCELLATIONS:
        raise
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # skips the interpreter's shutdown, which would wait for threads


def _run(connection: Connection, memory_descriptor: int, check: Callable[[], None]) -> int:
    # Imported late: torch takes a second, in which the parent may end.
    with importing():
        from octavo.build.build_engine import build_rank
        from octavo.config import EngineConfig
        from octavo.ops.device_backend import IDLE, WORKS, backend_of
        from octavo.plugins import CPU
        from octavo.runtime.memory_budget import Limits
        from octavo.runtime.ranks.rank_executor import Follower, RankExecutor
        from octavo.runtime.ranks.start_messages import (
            RankFailed,
            RankLoaded,
            RankReady,
            RankSettled,
            StartRank,
            hear,
            tell,
        )
        from octavo.steps.messages import unpack
        from octavo.telemetry.logs import log_to_stderr

    start = hear(connection, StartRank)
    log_to_stderr(start.log_level, start.log_format)
    if start.gpus:  # read when CUDA is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
    shared = backend_of(CPU).shared_memory()
    assert shared is not None, "the engine has found it"
    layout = start.layout
    memory = shared.view(memory_descriptor, start.rank, layout.size, layout.num_stages, layout.num_nodes)

    def settle(free: int) -> Limits:
        tell(connection, RankLoaded(free))
        return hear(connection, RankSettled).limits

    try:
        executor = build_rank(EngineConfig.from_flat(start.config), memory, check, settle)
    except OctavoError as error:
        tell(connection, RankFailed(type(error).__name__, str(error)))
        return 1
    rank = Follower(RankExecutor(executor, memory))
    reader = memory.reader(check)
    tell(connection, RankReady())
    while True:
        message = reader.next()
        memory.note(WORKS)
        rank.execute(unpack(message))
        memory.note(IDLE)


if __name__ == "__main__":
    main()

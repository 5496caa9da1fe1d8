"""Child processes that cannot be started, and how long others are waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Any

import pytest

from octavo.errors import Unavailable
from octavo.system import child_process
from octavo.system.child_process import ChildLost, ChildProcess
from octavo.text.chat_template import ChatTemplate


@pytest.mark.parametrize(("module", "name"), [(socket, "socketpair"), (subprocess, "Popen")])
def test_a_machine_without_resources_is_not_the_clients_fault(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that needs a child process is answered with 503, so that clients try again."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    template = ChatTemplate("{{ messages[0].content }}", {})
    monkeypatch.setattr(module, name, fail)
    for start in (lambda: ChildProcess("octavo.text.template_worker", {}), lambda: template.render([{"role": "user"}])):
        with pytest.raises(Unavailable, match="Too many open files") as raised:
            start()
        assert (raised.value.status, raised.value.retry_after) == (503, 1)


LIMITS = {"source": "a", "tool_source": None, "max_seconds": 0.4, "max_memory": 512 << 20, "max_output": 1000}


@pytest.mark.parametrize(
    ("ticks_of_a_look", "answers"),
    [(0, False), (0.5, True), (20, False)],
    ids=["uses nothing", "uses little", "uses all"],
)
def test_a_child_is_waited_for_as_long_as_it_uses_some_of_its_time(
    ticks_of_a_look: float, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may let it wait; here it is stopped for twenty looks, five times what it may do nothing for."""
    child, num_looks = ChildProcess("octavo.text.template_worker", LIMITS), 0

    def look(pid: int) -> tuple[int, bool]:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 20:
            os.kill(pid, signal.SIGCONT)
        return int(num_looks * ticks_of_a_look), False

    monkeypatch.setattr(child_process, "time_of_process", look)
    os.kill(child.id, signal.SIGSTOP)
    if answers:
        assert child.ask(None)[0] == b"T"
    else:
        with pytest.raises(ChildLost, match=r"more than 0\.4 seconds"):
            child.ask(None)
    child.close()

"""Child processes that cannot be started."""

from __future__ import annotations

import socket
import subprocess
from typing import Any

import pytest

from octavo.errors import Unavailable
from octavo.system.child_process import ChildProcess
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

"""The source of a chat template, compiled and rendered in a child process, as the server does.

Fuzzing sees no coverage of the child: a template is a program, which may take all time and memory that it gets.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.system.child_worker import FAILED, INVALID, OUT_OF_MEMORY, REFUSED, RENDERED, answer_of
from octavo.text.template_worker import Renderer
from tests.fuzz.target import Fault, Target
from tests.text.family_templates import LLAMA3, QWEN3

KINDS = (RENDERED, INVALID, REFUSED, FAILED)
BROKEN = 99
CHILD_SECONDS = 2
CHILD_BYTES = 512 << 20
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi {{ there }}"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
]


def make() -> Target:
    return Template()


class Template(Target):
    max_seconds = 2.0 * CHILD_SECONDS
    seeds = [LLAMA3.encode(), QWEN3.encode()]
    words = (
        *(b"{%", b"%}", b"{{", b"}}", b"{%-", b"for x in range(10**9)", b"endfor", b"macro f(x)", b"endmacro"),
        *(b"f(f)", b"recursive", b"loop(", b"|tojson", b"|batch(2)", b"'x' * 10**10", b"raise_exception(1)"),
        *(b"messages.__class__", b"namespace(", b"generation", b"set x =", b"10**10**8", b"|replace('', 'xx')"),
    )

    def read(self, data: bytes) -> None:
        renderer = Renderer({"source": data.decode(errors="replace"), "max_output": 1 << 20})
        variables: dict[str, Any] = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True}
        in_child(lambda: answer_of(renderer.serve, variables)[0] in KINDS)


def in_child(work: Callable[[], bool]) -> None:
    """Run ``work``, which must give true, in a fork with the limits of a ``ChildWorker``, which may end it."""
    pid = os.fork()
    if not pid:
        status = BROKEN
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CHILD_SECONDS, CHILD_SECONDS))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + CHILD_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            status = 0 if work() else BROKEN
        except MemoryError:
            status = OUT_OF_MEMORY
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    was_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    if not was_late and os.waitstatus_to_exitcode(status) not in (0, OUT_OF_MEMORY):
        raise Fault(f"the child process ended with status {status}")

"""Workers for tests of the backend grpc: the ONNX worker in a process of its own, and one in this process that fails as
asked."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from octavo_fleet.worker import messages
from octavo_fleet.worker.onnx_worker import OnnxWorker, make_server

SIZES = ("--max-model-len", "256", "--num-blocks", "64", "--block-size", "4", "--threads", "1")


class WorkerProcess:
    """An ONNX worker; ``start`` may be called again, at the same port, when it has ended."""

    def __init__(self, model: Path) -> None:
        self.model, self.port = model, 0
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it serves."""
        command = [sys.executable, "-m", "octavo_fleet.worker.onnx_worker", str(self.model), "--port", str(self.port)]
        self.process = subprocess.Popen([*command, *SIZES], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("worker of"), line
        self.port = int(line.rsplit(":", 1)[1])

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of a server that uses this worker."""
        return "--backend", "grpc", "--grpc-worker", f"127.0.0.1:{self.port}"

    def end(self, number: int) -> None:
        """Send a signal, and wait for the end."""
        self.process.send_signal(number)
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()


class FakeWorker(OnnxWorker):
    """Its next token is the last one plus 1. Its ``fault`` says how it answers."""

    def __init__(self, **changes: Any) -> None:
        sizes = {"vocab_size": 50, "max_model_len": 64, "block_size": 4, "num_blocks": 64, "shares_blocks": True}
        super().__init__(None, messages.Description(**{"model": "fake", **sizes, **changes}))  # type: ignore[arg-type]
        self.fault = ""
        self.steps: list[Any] = []

    def execute(self, steps: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The method ``Execute``."""
        for step in steps:
            self.steps.append(step)
            match self.fault:
                case "ends":
                    return
                case "aborts":
                    context.abort(grpc.StatusCode.INTERNAL, "out of luck")
                case "hangs":
                    while context.is_active():
                        time.sleep(0.01)
                    return
                case "skips":
                    step.number += 1
                case "floods":
                    while context.is_active():
                        yield messages.StepResult(number=step.number, logits=self._logits(step))
                case "huge":
                    yield messages.StepResult(number=step.number, logits=b"x" * (16 << 20))
                    continue
                case "long error":
                    error = messages.Error(code=8, message="no\n\x1b[31m" + "memory " * 500_000)
                    yield messages.StepResult(number=step.number, error=error)
                    continue
                case "error":
                    yield messages.StepResult(number=step.number, error=messages.Error(code=8, message="no memory"))
                    continue
            yield messages.StepResult(number=step.number, logits=self._logits(step))

    def _logits(self, step: Any) -> bytes:
        description = self._description
        last = [i for part in step.sequences for i in list(part.token_ids)[len(part.token_ids) - part.num_logits :]]
        rows = np.zeros((len(last), description.vocab_size), np.float32)
        rows[np.arange(len(last)), (np.array(last, dtype=int) + 1) % description.vocab_size] = 8.0
        if self.fault == "nan":
            rows[:, 0] = np.nan
        if self.fault == "inf":
            rows[:, 0] = np.inf
        if self.fault == "rows":
            rows = rows[1:]
        if description.logits_type == messages.BFLOAT16:
            return (rows.view(np.uint32) >> 16).astype("<u2").tobytes()
        return rows.tobytes()


@contextlib.contextmanager
def serving(worker: FakeWorker, *secrets: Any, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve ``worker`` in this process; gives its address. ``secrets`` are those of ``make_server``."""
    server, port = make_server(worker, f"{host}:0", *secrets)
    server.start()
    yield f"{host}:{port}"
    server.stop(grace=0).wait()

"""What a worker of the backend grpc sends: its description, or, if the first byte is odd, the result of a step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from octavo.config import EngineConfig
from octavo.errors import ConfigError, WorkerLost
from octavo_fleet.worker import build_remote, messages
from octavo_fleet.worker.connection import SequencePart, WorkerConnection, WorkerError
from tests.fuzz.target import Target

DESCRIPTION = messages.Description(
    vocab_size=264,
    max_model_len=256,
    block_size=16,
    num_blocks=32,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    model="a",
).SerializeToString()
RESULT = messages.StepResult(number=0, logits=bytes(4 * 264)).SerializeToString()
ERROR = messages.StepResult(number=0, error=messages.Error(code=13, message="no")).SerializeToString()
SECONDS = 2.0


def make() -> Target:
    return Worker()


class Worker(Target):
    max_seconds = 4 * SECONDS
    seeds = [b"\x00" + DESCRIPTION, b"\x01" + RESULT, b"\x01" + ERROR]
    words = (
        b"\xff\xff\xff\xff\x0f",
        b"\x80\x80\x80\x80\x08",
        b"\x08",
        b"\x10",
        b"\x12",
        b"\x1a",
        b"\xff\xff\xff\xff\x07",
    )

    def __init__(self) -> None:
        super().__init__()
        self._logger = logging.getLogger("octavo.worker")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)
        self._described, self._result = DESCRIPTION, RESULT
        self._server = grpc.server(ThreadPoolExecutor(8))
        methods = {
            "Describe": grpc.unary_unary_rpc_method_handler(lambda request, context: self._described),
            "Execute": grpc.stream_stream_rpc_method_handler(self._execute),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, methods),))
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _execute(self, steps: Iterator[Any], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in steps:
            yield self._result

    def read(self, data: bytes) -> None:
        is_result = data[:1] and data[0] % 2
        self._described, self._result = (DESCRIPTION, data[1:]) if is_result else (data[1:], RESULT)
        config = EngineConfig.from_flat({"model": "a", "backend": "grpc", "grpc_worker": self._address})
        with contextlib.suppress(ConfigError):
            connection = WorkerConnection(self._address, SECONDS)
            try:
                build_remote._check(config, connection.description, {"vocab_size": 264})
                with contextlib.suppress(WorkerError, WorkerLost):
                    assert isinstance(connection.step([SequencePart(0, [1], [0], 1)]), bytes)
            finally:
                connection.close()

    def close(self) -> None:
        self._server.stop(None)
        self._logger.setLevel(self._level)
        super().close()

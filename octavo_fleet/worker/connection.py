"""Octavo's end of a connection to a worker: what the worker serves, and one call in which steps are computed.

Needs the package ``grpcio``, which is imported on first use.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from octavo.errors import ConfigError, WorkerLost
from octavo_fleet.worker import credentials, messages

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
MAX_DESCRIPTION_BYTES = 64 << 10
MAX_MESSAGE_BYTES = (2 << 30) - 1
"""gRPC's own limit."""
SPARE_BYTES = 8 << 20
"""Of a result in addition to its logits, such as the message of an error."""
MAX_TEXT = 300
"""Characters of a worker's text that are kept."""

logger = logging.getLogger(__name__)


class WorkerError(Exception):
    """A step that the worker did not compute, or computed wrongly; it can go on with other steps."""


class SequencePart(NamedTuple):
    """Consecutive tokens of a sequence; see ``Sequence`` in ``worker.proto``."""

    start: int
    token_ids: list[int]
    block_table: list[int]
    num_logits: int


class WorkerConnection:
    """A worker at ``address`` (``HOST:PORT``), which must answer within ``timeout`` seconds."""

    def __init__(self, address: str, timeout: float, ca_certs: str | None = None, key: str | None = None) -> None:
        """Ask what the worker serves, and wait until it answers. Raises ``ConfigError`` if it does not.

        ``ca_certs``: file of the CAs one of which has signed the worker's certificate; ``None``: no TLS. ``key`` is
        sent with every call.
        """
        try:
            import grpc
        except ImportError:
            raise ConfigError("backend grpc needs the package grpcio: pip install 'octavo[grpc]'") from None
        self.address, self._timeout = address, timeout
        self._num_steps = 0
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Steps, and last ``None``."""
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Results, and last a ``WorkerLost``."""
        self._call: Any = None
        self._lost: WorkerLost | None = None
        self.on_lost: Callable[[int], None] | None = None
        """Called in another thread, with 1, when the call ends, also between steps."""
        self._is_closed = False
        self.max_result_bytes = MAX_MESSAGE_BYTES
        """Longest result of a step that is received."""
        self._ca_certs = ca_certs
        self._metadata = credentials.metadata(key)
        self._channel = self._open(MAX_DESCRIPTION_BYTES)
        describe = self._channel.unary_unary(
            f"/{messages.SERVICE}/Describe",
            messages.DescribeRequest.SerializeToString,
            messages.Description.FromString,
        )
        request = messages.DescribeRequest()
        try:
            self.description: Any = describe(request, timeout=timeout, wait_for_ready=True, metadata=self._metadata)
        except grpc.RpcError as error:
            self.close()
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(f"grpc_api_key: the worker at {address} refuses it: {_status(error)}") from None
            secured = "" if ca_certs is None else f", with a certificate that {ca_certs} verifies,"
            raise ConfigError(
                f"grpc_worker: no worker answers at {address}{secured} within {timeout:g} s ({_status(error)})"
            ) from None

    def expect_results(self, num_rows: int, row_bytes: int) -> None:
        """Receive no result with more than ``num_rows`` rows of logits, each of ``row_bytes``."""
        self.max_result_bytes = min(num_rows * row_bytes + SPARE_BYTES, MAX_MESSAGE_BYTES)

    def step(self, parts: list[SequencePart]) -> bytes:
        """The logits of a step, with at least one part, as the worker sent them.

        Raises ``WorkerError`` if this step failed, and ``WorkerLost`` if the call ended, or the result is late; then no
        block has content any more, and this connection is of no further use.
        """
        if self._lost is not None:
            raise self._lost
        if self._call is None:
            self._begin()
        step = messages.Step(number=self._num_steps)
        for part in parts:
            step.sequences.add(**part._asdict())
        self._num_steps += 1
        self._sent.put(step)
        try:
            result = self._received.get(timeout=self._timeout)
        except queue.Empty:
            result = self._loss(f"did not answer within {self._timeout:g} s")
        if not isinstance(result, WorkerLost) and result.number != step.number:
            result = self._loss(f"sent the result of step {result.number} in place of step {step.number}")
        if isinstance(result, WorkerLost):
            self._lost = result
            self.close()
            raise result
        if result.HasField("error"):
            raise WorkerError(f"worker {self.address}: {shown(result.error.message)} (code {result.error.code})")
        logits: bytes = result.logits
        return logits

    def close(self) -> None:
        """End the call, and the connection."""
        self._is_closed = True
        self._sent.put(None)
        self._channel.close()

    def _open(self, max_bytes: int) -> Any:
        options = [*OPTIONS, ("grpc.max_receive_message_length", max_bytes)]
        return credentials.open_channel(self.address, self._ca_certs, options)

    def _begin(self) -> None:
        self._channel.close()
        self._channel = self._open(self.max_result_bytes)
        execute = self._channel.stream_stream(
            f"/{messages.SERVICE}/Execute", messages.Step.SerializeToString, messages.StepResult.FromString
        )
        self._call = execute(iter(self._sent.get, None), metadata=self._metadata)
        # A read has no deadline of its own, so a thread reads, and ``step`` waits for it.
        threading.Thread(target=self._read, args=(self._call,), name="worker-results", daemon=True).start()

    def _read(self, results: Iterator[Any]) -> None:
        import grpc

        lost = self._loss("ended the call")
        try:
            for result in results:
                if not self._received.empty():  # it would send more without an end
                    lost = self._loss("sent a result that no step had asked for")
                    self._call.cancel()
                    break
                self._received.put(result)
        except grpc.RpcError as error:
            lost = self._loss(f"ended the connection ({_status(error)})")
        self._received.put(lost)
        if self.on_lost is not None and not self._is_closed:
            logger.error("%s", lost)
            self.on_lost(1)

    def _loss(self, problem: str) -> WorkerLost:
        return WorkerLost(f"worker {self.address} {problem}")


def _status(error: Any) -> str:
    """The status of a failed call, such as "UNAVAILABLE: connection refused"."""
    return f"{error.code().name}: {shown(error.details() or 'no details')}"


def shown(text: str) -> str:
    """A worker's text as it may be logged and shown: one line, and not longer than ``MAX_TEXT``."""
    line = "".join(sign if sign.isprintable() else " " for sign in text[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]}..."

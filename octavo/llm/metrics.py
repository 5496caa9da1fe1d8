"""When a request arrived, was scheduled and got its tokens. Field names are vLLM's."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request and its continuations together, and the durations between them, in seconds.

    The fields that end in ``_ts`` are readings of ``time.monotonic()``; 0 means that it has not happened, and a
    duration that needs it is 0 too.
    """

    queued_ts: float
    """When the request was given to the engine."""
    scheduled_ts: float = 0.0
    """When it was first admitted to the running batch."""
    first_token_ts: float = 0.0
    """End of the step that gave the first output token."""
    last_token_ts: float = 0.0
    """End of the step that gave the last output token so far."""
    num_generation_tokens: int = 0

    @property
    def arrival_time(self) -> float:
        """``queued_ts`` as a reading of ``time.time()``."""
        return time.time() - time.monotonic() + self.queued_ts

    @property
    def queued_time(self) -> float:
        """From arrival until it was scheduled."""
        return _between(self.queued_ts, self.scheduled_ts)

    @property
    def prefill_time(self) -> float:
        """From being scheduled until the first token."""
        return _between(self.scheduled_ts, self.first_token_ts)

    @property
    def decode_time(self) -> float:
        """From the first token until the last one."""
        return _between(self.first_token_ts, self.last_token_ts)

    @property
    def inference_time(self) -> float:
        """From being scheduled until the last token."""
        return _between(self.scheduled_ts, self.last_token_ts)

    @property
    def first_token_latency(self) -> float:
        """From arrival until the first token (TTFT)."""
        return _between(self.queued_ts, self.first_token_ts)

    @property
    def e2e_latency(self) -> float:
        """From arrival until the last token."""
        return _between(self.queued_ts, self.last_token_ts)


def _between(start: float, end: float) -> float:
    return end - start if start and end else 0.0

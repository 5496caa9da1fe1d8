"""A live request and the journal of its output, from which it is replayed after an engine restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from octavo.telemetry.counts import Timing
from octavo.types import Output, Request
from octavo_server.engines.engine_client import OutputListener
from octavo_server.engines.lora_adapters import adapter_name


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One accepted request with its output so far and its listener."""

    request: Request
    listener: OutputListener
    timing: Timing
    tokens: list[int] = field(init=False)
    """All output tokens so far; updated before the listener is notified."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""
    prompt_logprobs_end: int = 0
    """Log-probabilities of prompt positions below this were delivered."""
    num_computed: int = 0
    """Most prompt tokens that any engine process has computed or found in the cache."""
    is_submitted: bool = False
    """Whether the current engine process has it."""
    num_deaths: int = 0
    """Engine processes that ended while they had it."""
    has_advanced: bool = False
    """Whether the current engine process has finished a step with it."""
    evidence: int = 0
    """Weight of the engine deaths since its last progress; see ``octavo_server.engines.crash_isolation``."""
    total_evidence: int = 0
    """Weight of all engine deaths during its lifetime."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the trace that its HTTP request is part of; see ``octavo_server.observe.tracing``."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.output_tokens)

    @property
    def id(self) -> int:
        return self.request.id

    def replay(self) -> Request:
        """The request to resubmit to a new engine process: with the output so far, from which it continues."""
        if len(self.tokens) == len(self.request.output_tokens):
            return self.request
        return msgspec.structs.replace(self.request, output_tokens=list(self.tokens))

    def note_tokens(self, tokens: list[int]) -> None:
        """Journal new output tokens; this is progress."""
        self.tokens += tokens
        self.has_advanced = True
        self.evidence = 0

    def note_computed(self, num_computed: int) -> None:
        """Record the number of computed prompt tokens; more than ever before is progress."""
        self.has_advanced = True
        if num_computed > self.num_computed:
            self.num_computed = num_computed
            self.evidence = 0

    def drop_delivered_prompt_logprobs(self, output: Output) -> None:
        """Remove from ``output`` the prompt log-probabilities that an earlier engine process delivered."""
        rows = output.prompt_logprobs
        if not rows:
            return
        end = output.prompt_logprobs_start + len(rows)
        known = max(0, self.prompt_logprobs_end - output.prompt_logprobs_start)
        output.prompt_logprobs = rows[known:] or None
        output.prompt_logprobs_start += min(known, len(rows))
        self.prompt_logprobs_end = max(self.prompt_logprobs_end, end)


def adapters_of(requests: Iterable[LiveRequest]) -> tuple[frozenset[str], frozenset[str]]:
    """The adapters of requests that were scheduled, and those of requests that still wait."""
    running: set[str] = set()
    waiting: set[str] = set()
    for live in requests:
        if live.request.adapter:
            (running if live.has_advanced else waiting).add(adapter_name(live.request.adapter))
    return frozenset(running), frozenset(waiting)

"""A request that somebody is waiting for: the journal that its replay is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from octavo.server.engine_client import OutputListener
from octavo.telemetry.counts import Timing
from octavo.types import Output, Request


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One accepted request, what it has emitted so far, and who listens."""

    request: Request
    listener: OutputListener
    timing: Timing
    tokens: list[int] = field(init=False)
    """All output so far; complete before the listener hears of it."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""
    prompt_logprobs_end: int = 0
    """Prompt positions below this have had their log-probabilities delivered."""
    num_computed: int = 0
    """Prompt tokens that were computed or found in the cache, at most, by any engine process."""
    is_submitted: bool = False
    """Whether the engine process of now has it."""
    num_deaths: int = 0
    """Engine processes that ended while they had it."""
    has_advanced: bool = False
    """Whether the engine process of now has finished a step with it."""
    evidence: int = 0
    """What the deaths of engine processes since its last progress weigh; see ``octavo.server.crash_isolation``."""
    total_evidence: int = 0
    """The same of its whole life."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.output_tokens)

    @property
    def id(self) -> int:
        return self.request.id

    def replay(self) -> Request:
        """The request as a new engine process must get it, to go on where this one stands."""
        if len(self.tokens) == len(self.request.output_tokens):
            return self.request
        return msgspec.structs.replace(self.request, output_tokens=list(self.tokens))

    def note_tokens(self, tokens: list[int]) -> None:
        """It got output."""
        self.tokens += tokens
        self.has_advanced = True
        self.evidence = 0

    def note_computed(self, num_computed: int) -> None:
        """So many of its prompt's tokens are computed; with more than ever before, it has made progress."""
        self.has_advanced = True
        if num_computed > self.num_computed:
            self.num_computed = num_computed
            self.evidence = 0

    def drop_delivered_prompt_logprobs(self, output: Output) -> None:
        """Take out of ``output`` the prompt positions that an earlier engine process already answered."""
        rows = output.prompt_logprobs
        if not rows:
            return
        end = output.prompt_logprobs_start + len(rows)
        known = max(0, self.prompt_logprobs_end - output.prompt_logprobs_start)
        output.prompt_logprobs = rows[known:] or None
        output.prompt_logprobs_start += min(known, len(rows))
        self.prompt_logprobs_end = max(self.prompt_logprobs_end, end)

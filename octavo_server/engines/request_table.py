"""The table of live requests: what is delivered to a client is recorded first, so that it can be replayed."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo.errors import CANCELLATIONS, RequestError, RequestFailed
from octavo.server_settings import ServerSettings
from octavo.telemetry.metrics import Metrics
from octavo.telemetry.request_events import Event
from octavo.types import REPETITION, FinishReason, Output
from octavo_server.engines.engine_client import LiveProgress
from octavo_server.engines.live_request import LiveRequest
from octavo_server.observe.timelines import Timelines
from octavo_server.observe.tracing import TRACE_HEADERS, Tracing

GRAMMARS = "grammars"
"""Name of an empty file in the folder of ``--journal``, from the first request with a grammar on."""

logger = logging.getLogger("octavo.server")


def had_grammars(settings: ServerSettings) -> bool:
    """Whether an earlier process with the same ``--journal`` had requests with a grammar."""
    if settings.journal is None:
        return False
    folder = Path(settings.journal).expanduser()  # a server of several models has a folder in it for each
    return any(path.name == GRAMMARS for path in (*folder.glob(GRAMMARS), *folder.glob(f"*/{GRAMMARS}")))


class RequestJournal:
    """Live requests with their output so far: the part that every ``EngineClient`` with requests of its own shares."""

    metrics: Metrics
    timelines: Timelines

    def __init__(self) -> None:
        self.tracing: Tracing | None = None
        """Makes a span of each request."""
        self.num_live_of: Counter[str] = Counter()
        """Number of live requests by tenant."""
        self.live_owners: Counter[str] = Counter()
        """Number of live requests by API key."""
        self._live: dict[int, LiveRequest] = {}
        self.ids = itertools.count(1)
        """Of requests; the engines of one server share them."""

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._live)

    @property
    def _used_adapters(self) -> set[str]:
        """What live requests name in the engine."""
        return {live.request.adapter for live in self._live.values()}

    def progress(self) -> Iterator[LiveProgress]:
        """How far each live request is, oldest first."""
        for live in self._live.values():
            request = live.request
            yield LiveProgress(
                live.id,
                prompt=len(request.prompt_tokens),
                computed=live.num_computed,
                output=len(live.tokens),
                max_tokens=request.max_tokens,
                running=live.has_advanced,
                owner=request.owner,
            )

    def next_id(self) -> int:
        """A request id unique within this server."""
        return next(self.ids)

    def _keep(self, live: LiveRequest) -> None:
        if self.tracing is not None:
            live.trace_headers = TRACE_HEADERS.get()
        self._live[live.id] = live
        self.num_live_of[live.request.tenant] += 1
        self.live_owners[live.request.owner] += 1

    def _forget(self, live: LiveRequest) -> None:
        """Stop the computation of a request that ended here."""
        raise NotImplementedError

    def _end(self, live: LiveRequest, reason: FinishReason, is_repetition: bool = False) -> None:
        del self._live[live.id]
        request = live.request
        for counts, name in ((self.num_live_of, request.tenant), (self.live_owners, request.owner)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
        counted, sizes = REPETITION if is_repetition else reason, (len(request.prompt_tokens), len(live.tokens))
        self.metrics.observe_end(live.timing, counted, *sizes, request.max_tokens)
        if self.tracing is not None:
            self.tracing.end(live, reason, self.timelines)

    def _note_computed(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind == "chunk" and (live := self._live.get(event.request_id)) is not None:
                live.note_computed(event.start + event.tokens)

    def _fail(self, live: LiveRequest, error: RequestError) -> None:
        """End a request with an error, and notify its listener, unless the listener of another one has aborted it."""
        if live.id not in self._live:
            return
        self._end(live, "error")
        self._forget(live)
        try:
            live.listener.on_error(error)
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("the listener of request %d failed on an error", live.id)

    def _deliver(self, live: LiveRequest, output: Output, now: float) -> None:
        """Journal the output, then update metrics, then notify the listener."""
        tokens = output.tokens
        if tokens:
            live.note_tokens(tokens)
            timing = live.timing
            if timing.first_token:
                self.metrics.observe_tokens(timing, len(tokens), now)
            else:
                timing.first_scheduled = output.first_scheduled
                self.metrics.observe_first_tokens(
                    timing, len(tokens), now, len(live.request.prompt_tokens), output.num_cached_tokens
                )
        if output.prompt_logprobs is not None:
            live.drop_delivered_prompt_logprobs(output)
        if output.error is not None:
            live.is_submitted = False
            logger.warning("request %d failed: %s", live.id, output.error)
            self._fail(live, RequestFailed(output.error))
            return
        if output.finish_reason is not None:
            self._end(live, output.finish_reason, output.stop_token_id == REPETITION)
        try:
            live.listener.on_output(output)
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("the listener of request %d failed; the request ends", live.id)
            if live.id in self._live:
                self._fail(live, RequestFailed("The server failed to handle the output of this request."))

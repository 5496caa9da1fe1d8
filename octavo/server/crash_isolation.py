"""Which request kills the engine? Who may enter a restarted engine, and when, so that the guilty one is found.

A request that is in the engine when the engine dies may be the reason, or just be there. Progress is the proof of
innocence, a token or a stretch of the prompt that no engine process computed before: it shows that the engine survives
the step that came next for this request. So a request gathers evidence from the deaths since its last progress:

- ``FAULT`` from an engine process that ended by its own fault: a crash, a hang, or memory that ran out;
- ``KILL``, far less, from one that another process ended by a signal, unless it had finished a step with the request.
  Such a signal says nothing of the request by itself, but whoever ends processes that take too much memory, other
  than the kernel, sends the same one.

From ``SUSPICION`` on it is a suspect. After a death every request enters again at once as long as there is no suspect.
Suspects enter one at a time: the next one when the one on trial made progress or ended. If the engine dies during a
trial, that suspect is the first to enter the next engine, alone. A suspect that was alone in the engine when it died is
convicted when the evidence against it reaches ``CONVICTION``. The others only ever wait for a trial, most of them not
even that: once the first suspect is through, they run beside the trials.

So a request that crashes the engine each time costs at most 4 restarts, and one at which it is killed each time at most
50. ``MOST_EVIDENCE`` bounds what is left: a request that lives on by a token or two each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.server.live_request import LiveRequest

FAULT = 16
KILL = 1
SUSPICION = 2 * FAULT
CONVICTION = 3 * FAULT
MOST_EVIDENCE = 100 * FAULT


def _is_suspect(live: LiveRequest) -> bool:
    return live.evidence >= SUSPICION


class CrashIsolation:
    """Decides who enters the engine."""

    def __init__(self) -> None:
        self.holds_back = False
        """Whether a request may not simply enter, so that ``admit`` must be asked."""
        self._on_trial: LiveRequest | None = None
        self._is_alone = False
        self._prime: LiveRequest | None = None

    def admit(self, everyone: Collection[LiveRequest]) -> list[LiveRequest]:
        """Those of the live requests that enter the engine now, in this order; they count as submitted from here."""
        if self._on_trial is not None and (self._on_trial not in everyone or not _is_suspect(self._on_trial)):
            self._on_trial = None
        if self._on_trial is not None and self._is_alone:
            return []
        waiting = [live for live in everyone if not live.is_submitted]
        entering = [live for live in waiting if not _is_suspect(live)]
        suspects = [live for live in waiting if _is_suspect(live)]
        if suspects and self._on_trial is None:
            self._on_trial = self._choose(suspects)
            self._is_alone = len(waiting) == len(everyone)
            entering = [self._on_trial] if self._is_alone else [*entering, self._on_trial]
        for live in entering:
            live.is_submitted = True
        is_closed = self._on_trial is not None and self._is_alone
        self.holds_back = is_closed or len(entering) < len(waiting)
        return entering

    def on_death(self, everyone: Iterable[LiveRequest], is_from_outside: bool) -> list[LiveRequest]:
        """The engine died; return the convicted requests. None counts as submitted any more.

        ``is_from_outside``: another process ended it.
        """
        accused = self._on_trial if self._on_trial is not None and _is_suspect(self._on_trial) else None
        convicted = []
        for live in everyone:
            if not live.is_submitted:
                continue
            weight = FAULT if not is_from_outside else 0 if live.has_advanced else KILL
            live.is_submitted = live.has_advanced = False
            live.num_deaths += 1
            live.evidence += weight
            live.total_evidence += weight
            is_proven = live is accused and self._is_alone and live.evidence >= CONVICTION
            if is_proven or live.total_evidence >= MOST_EVIDENCE:
                convicted.append(live)
        self._prime = accused
        self._on_trial = None
        self.holds_back = True
        return convicted

    def _choose(self, suspects: list[LiveRequest]) -> LiveRequest:
        """Who is tried next: who was on trial at the last death; else the newest, for the engine lived before it."""
        if self._prime in suspects:
            return self._prime
        return max(suspects, key=lambda live: (live.evidence, live.id))

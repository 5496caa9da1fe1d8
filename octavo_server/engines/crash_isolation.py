"""Finds requests that crash the engine, by controlling which requests enter a restarted engine and when.

A request that was in the engine when the engine died may be the cause or a bystander. Progress clears a request (a
token, or part of the prompt that no engine process computed before), since the engine survived the next step of that
request. So a request accumulates evidence from engine deaths since its last progress:

- ``FAULT`` if the engine process caused its own end: a crash, a hang, or running out of memory;
- ``KILL``, far less, if another process ended it by a signal, unless it had finished a step with the request. Such a
  signal is weak evidence: a user-space out-of-memory killer sends the same one.

At ``SUSPICION`` a request becomes a suspect. While there is no suspect, all requests are resubmitted at once after a
death. Suspects are resubmitted one at a time (a trial), the next one when the one on trial made progress or ended. If
the engine dies during a trial, that suspect is the first to enter the next engine, alone. A suspect that was alone in
the engine when it died is failed as the cause once its evidence reaches ``PROOF``. Other requests wait at
most for the first suspect's trial; after it they run concurrently with the trials.

So a request that always crashes the engine costs at most 4 restarts, and one during which it is always killed at most
50. ``MOST_EVIDENCE`` bounds the remaining case: a request that progresses by a token or two before each death.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo_server.engines.live_request import LiveRequest

FAULT = 16
KILL = 1
SUSPICION = 2 * FAULT
PROOF = 3 * FAULT
MOST_EVIDENCE = 100 * FAULT


def _is_suspect(live: LiveRequest) -> bool:
    return live.evidence >= SUSPICION


class CrashIsolation:
    """Decides which live requests are submitted to the engine."""

    def __init__(self) -> None:
        self.holds_back = False
        """Whether new requests must go through ``admit`` instead of being submitted directly."""
        self._on_trial: LiveRequest | None = None
        self._is_alone = False
        self._prime: LiveRequest | None = None

    def admit(self, everyone: Collection[LiveRequest]) -> list[LiveRequest]:
        """The live requests to submit now, in this order; marks them as submitted."""
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

    def hold_all(self, everyone: Iterable[LiveRequest]) -> None:
        """The engine process was ended on purpose: mark all requests as not submitted, without evidence."""
        for live in everyone:
            live.is_submitted = live.has_advanced = False
        self._on_trial = None
        self.holds_back = True

    def on_death(self, everyone: Iterable[LiveRequest], is_from_outside: bool) -> list[LiveRequest]:
        """Record an engine death: mark all requests as not submitted, and return those found to be the cause.

        ``is_from_outside``: another process ended the engine process by a signal.
        """
        accused = self._on_trial if self._on_trial is not None and _is_suspect(self._on_trial) else None
        causes = []
        for live in everyone:
            if not live.is_submitted:
                continue
            weight = FAULT if not is_from_outside else 0 if live.has_advanced else KILL
            live.is_submitted = live.has_advanced = False
            live.num_deaths += 1
            live.evidence += weight
            live.total_evidence += weight
            is_proven = live is accused and self._is_alone and live.evidence >= PROOF
            if is_proven or live.total_evidence >= MOST_EVIDENCE:
                causes.append(live)
        self._prime = accused
        self._on_trial = None
        self.holds_back = True
        return causes

    def _choose(self, suspects: list[LiveRequest]) -> LiveRequest:
        """The next suspect to try: the one on trial at the last death; else that with the most evidence, newest first,
        as the engine ran without it before."""
        if self._prime in suspects:
            return self._prime
        return max(suspects, key=lambda live: (live.evidence, live.id))

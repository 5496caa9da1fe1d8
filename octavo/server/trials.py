"""Which request kills the engine? Who may enter a restarted engine, and when, so that the guilty one is found.

A request that is in the engine when the engine dies may be the reason, or just be there. A token is the proof
of innocence: it shows that the engine survives the step that came next for this request. So a request counts
the deaths since its last token, and from ``SUSPICION`` of them on it is a suspect.

After a death everybody enters again at once as long as nobody is a suspect. Suspects enter one at a time: the
next one when the one on trial got a token or ended. If the engine dies during a trial, that suspect is the
first to enter the next engine, alone. Who was alone in the engine when it died is convicted. The others only
ever wait for a trial, most of them not even that: once the first suspect is through, they run beside the trials.

So a request that always kills the engine costs at most ``SUSPICION`` + 2 restarts, and kills at random convict
nobody who gets a token in one of three lives. ``MAX_DEATHS`` bounds what is left: a request that lives on by a
token or two each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.server.live import LiveRequest

SUSPICION = 2
MAX_DEATHS = 100


def _is_suspect(live: LiveRequest) -> bool:
    return live.deaths >= SUSPICION


class Trials:
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

    def on_death(self, everyone: Iterable[LiveRequest]) -> list[LiveRequest]:
        """The engine died; return who is convicted. Nobody counts as submitted any more."""
        accused = self._on_trial if self._on_trial is not None and _is_suspect(self._on_trial) else None
        convicted = []
        for live in everyone:
            if not live.is_submitted:
                continue
            live.is_submitted = False
            live.deaths += 1
            live.total_deaths += 1
            if (live is accused and self._is_alone) or live.total_deaths >= MAX_DEATHS:
                convicted.append(live)
        self._prime = accused
        self._on_trial = None
        self.holds_back = True
        return convicted

    def _choose(self, suspects: list[LiveRequest]) -> LiveRequest:
        """Who is tried next: who was on trial at the last death; else the newest, for the engine lived before it."""
        if self._prime in suspects:
            return self._prime
        return max(suspects, key=lambda live: (live.deaths, live.id))

"""Report where a request spent its time, from its events and those of concurrent requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from octavo.telemetry.request_events import Event

MAX_NEIGHBOURS = 10


class StepRun(NamedTuple):
    """Consecutive steps in which a request ran: after ``first`` finished steps, up to ``last``."""

    first: int
    last: int


def explain(events: Sequence[Event], others: Iterable[Sequence[Event]] = ()) -> dict[str, Any]:
    """The report of a request, as JSON: times by phase, counts, concurrent requests and the events.

    ``events`` are those of one request in order, the first an arrival; ``others`` are the events of requests that may
    have shared steps with it. Seconds are ``waiting`` (for its first admission, or again after a preemption),
    ``prefill`` (to the last chunk of the prompt) and ``decode``. The times of a running request extend to its last
    event.
    """
    seconds = dict.fromkeys(("waiting", "prefill", "decode"), 0.0)
    for before, after in itertools.pairwise(events):
        seconds[_phase(before, after)] += after.time - before.time
    admitted = [event for event in events if event.kind == "admitted"]
    runs = runs_of(events)
    steps, num_scheduled_seqs = _steps_and_seqs(events)
    last = events[-1]
    return {
        "request": events[0].request_id,
        "status": last.reason
        if last.kind == "ended"
        else "running"
        if runs and last.kind != "preempted"
        else "waiting",
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
        "prompt_tokens": events[0].tokens,
        "output_tokens": last.tokens if last.kind == "ended" else None,
        "cached_tokens": admitted[0].tokens if admitted else None,
        "session": _session(admitted[0]) if admitted else None,
        "waited_behind": events[0].others,
        "chunks": [event.tokens for event in events if event.kind == "chunk"],
        "steps": steps,
        "mean_sequences_per_step": round(num_scheduled_seqs / steps, 2) if steps else None,
        "drafts": {"verified": last.drafts, "accepted": last.accepted} if last.drafts else None,
        "preempted_by": [event.by for event in events if event.kind == "preempted"],
        "faults": sum(event.kind == "fault" for event in events),
        "submissions": sum(event.kind == "arrived" for event in events),
        "shared_steps_with": _neighbours(runs, others),
        "events": [_shown(event, events[0].time) for event in events],
    }


def _session(admitted: Event) -> dict[str, Any] | None:
    """Of a turn of a session: which one it is, and what it found of the turn before."""
    found = min(admitted.tokens, admitted.before)
    return {"turn": admitted.turn, "tokens_before": admitted.before, "found": found} if admitted.turn else None


def _phase(before: Event, after: Event) -> str:
    """The phase of a request between two consecutive events."""
    if before.kind in ("arrived", "preempted"):
        return "waiting"
    if after.kind == "chunk":
        return "prefill"
    return "decode"


def runs_of(events: Sequence[Event]) -> list[StepRun]:
    """The runs of a request; an unfinished one extends to its last event."""
    runs = []
    begun: int | None = None
    for event in events:
        if event.kind == "admitted":
            begun = event.step
        elif begun is not None and event.kind in ("preempted", "ended", "arrived"):
            runs.append(StepRun(begun, max(begun, event.step)))
            begun = None
    if begun is not None:
        runs.append(StepRun(begun, max(begun, events[-1].step)))
    return runs


def _steps_and_seqs(events: Sequence[Event]) -> tuple[int, int]:
    """Number of steps of a request, and the sum of sequences in them."""
    steps = num_scheduled_seqs = 0
    begun: Event | None = None
    for event in events:
        if begun is not None and event.kind in ("preempted", "ended"):
            steps += max(0, event.step - begun.step)
            num_scheduled_seqs += max(0, event.num_scheduled_seqs - begun.num_scheduled_seqs)
        if event.kind in ("admitted", "preempted", "ended", "arrived"):
            begun = event if event.kind == "admitted" else None
    return steps, num_scheduled_seqs


def _neighbours(runs: Sequence[StepRun], others: Iterable[Sequence[Event]]) -> list[dict[str, int]]:
    """The ``MAX_NEIGHBOURS`` requests that shared most steps with ``runs``."""
    shared = []
    for events in others:
        count = sum(max(0, min(a.last, b.last) - max(a.first, b.first)) for a in runs for b in runs_of(events))
        if count:
            shared.append({"request": events[0].request_id, "steps": count})
    return sorted(shared, key=lambda entry: (-entry["steps"], entry["request"]))[:MAX_NEIGHBOURS]


def _shown(event: Event, start: float) -> dict[str, Any]:
    """An event as JSON: its time since arrival, its step, and the fields that are set."""
    fields = msgspec.structs.asdict(event)
    shown: dict[str, Any] = {"at": round(event.time - start, 6), "event": event.kind, "step": event.step}
    for name in ("tokens", "start", "others"):
        if fields[name]:
            shown[name] = fields[name]
    if event.by >= 0:
        shown["by"] = event.by
    if event.reason:
        shown["reason"] = event.reason
    return shown


def as_text(report: dict[str, Any]) -> str:
    """A report as text."""
    seconds = report["seconds"]
    lines = [
        f"request {report['request']}: {report['status']}, {sum(seconds.values()):.3f} s",
        f"  waiting {seconds['waiting']:.3f} s behind {report['waited_behind']} others,"
        f" prefill {seconds['prefill']:.3f} s, decode {seconds['decode']:.3f} s",
        f"  {report['prompt_tokens']} prompt tokens, {report['cached_tokens'] or 0} found in the prefix cache,"
        f" computed in chunks of {', '.join(map(str, report['chunks'])) or 'none'}",
        f"  {report['steps']} steps, shared by {report['mean_sequences_per_step'] or 0} sequences on average",
    ]
    if session := report["session"]:
        name = f" {session['id']}" if session.get("id") else ""
        lines.append(
            f"  turn {session['turn']} of session{name},"
            f" {session['found']} of {session['tokens_before']} tokens of the turn before found"
        )
    for entry in report["shared_steps_with"]:
        lines.append(f"    request {entry['request']} in {entry['steps']} of them")
    lines += [f"  preempted for request {by}" for by in report["preempted_by"]]
    if report["drafts"]:
        lines.append(f"  {report['drafts']['accepted']} of {report['drafts']['verified']} drafts accepted")
    if report["faults"]:
        lines.append(f"  {report['faults']} forward passes failed")
    if report["submissions"] > 1:
        lines.append(f"  submitted {report['submissions']} times: an engine process ended before it did")
    for event in report["events"]:
        details = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("at", "event"))
        lines.append(f"  {event['at']:10.6f} s  {event['event']:<10} {details}")
    return "\n".join(lines)

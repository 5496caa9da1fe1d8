"""Events of any output: the same when they are rendered from what is stored, and from any event on."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo.text.message_parser import Call, Piece, Text
from octavo_server.dialects.openai.constraints import arguments_of
from octavo_server.dialects.responses.events import ResponseEvents, add_output, pieces_of

TEXTS = st.builds(Text, st.sampled_from(("content", "reasoning")), st.text(min_size=1, max_size=4))
CALLS = st.builds(Call, st.sampled_from(("add", "math__add")), st.text(max_size=4), st.booleans())
CUSTOM = st.builds(Call, st.just("patch"), st.text(max_size=4).map(arguments_of), st.booleans())
ADD = {"type": "function", "name": "add"}
TOOLS = [ADD, {"type": "custom", "name": "patch"}, {"type": "namespace", "name": "math", "tools": [ADD]}]


def begun() -> dict[str, Any]:
    return {"id": "resp_1", "status": "queued", "output": [], "tools": TOOLS}


def render(pieces: list[Piece], after: int, is_cut: bool) -> list[bytes]:
    response = begun()
    events = ResponseEvents(response, after)
    parts = [events.begin(), *(events.frames([piece]) for piece in pieces)]
    parts.append(events.close("incomplete" if is_cut else "completed"))
    parts.append(events.last({**response, "status": "completed"}))
    return [event for event in b"".join(parts).split(b"\n\n") if event]


@given(st.lists(st.one_of(TEXTS, CALLS, CUSTOM), max_size=12), st.integers(0, 30), st.booleans())
def test_events_are_a_function_of_what_is_stored(pieces: list[Piece], after: int, is_cut: bool) -> None:
    whole = render(pieces, -1, is_cut)
    assert [b'"sequence_number":%d,' % number in event for number, event in enumerate(whole)] == [True] * len(whole)
    assert render(pieces, after, is_cut) == whole[after + 1 :]
    response = begun()
    deltas = add_output(response, pieces, "incomplete" if is_cut else "completed")
    assert render(list(pieces_of(response["output"], deltas)), -1, is_cut) == whole

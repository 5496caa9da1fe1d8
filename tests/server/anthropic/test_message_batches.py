"""Batches of messages: the unmodified anthropic client, what is refused, cancelling, and pages."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from octavo.errors import InvalidParameter, RequestTooLarge
from octavo_server.dialects.anthropic.message_batches import decoder
from octavo_server.dialects.batches.runner import MAX_LINES
from octavo_server.http.request_body import MAX_CONTAINERS
from tests.server.anthropic.test_messages import MESSAGES, client
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer

PATH = "/v1/messages/batches"


def requests(count: int, **params: Any) -> Any:
    body = {"model": "test", "max_tokens": 3, "messages": MESSAGES, **params}
    return [{"custom_id": f"row {i}", "params": body} for i in range(count)]


def until_ended(served: Served, id: str) -> Any:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        batch = client(served).messages.batches.retrieve(id)
        if batch.processing_status == "ended":
            return batch
        time.sleep(0.01)
    raise AssertionError("it does not end")


def results(served: Served, id: str) -> dict[str, Any]:
    api = client(served)  # which must live while the results are read
    return {each.custom_id: each.result for each in api.messages.batches.results(id)}


def test_a_batch_of_messages(server: Served) -> None:
    import anthropic

    api = client(server).messages.batches
    bad: Any = {"custom_id": "bad", "params": {"max_tokens": 0, "messages": MESSAGES}}
    begun = api.create(requests=[*requests(5), bad])
    assert (begun.type, begun.results_url is None) == ("message_batch", begun.processing_status != "ended")
    assert begun.request_counts.processing + begun.request_counts.succeeded + begun.request_counts.errored == 6
    done = until_ended(server, begun.id)
    counts = done.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 5, 1, 0, 0)
    assert done.ended_at is not None
    assert (done.expires_at - done.created_at).days == 1
    found = results(server, begun.id)
    assert {found[f"row {i}"].message.content[0].text for i in range(5)} == {ANSWER[:3]}
    error = found["bad"].error
    assert (error.error.type, "max_tokens" in error.error.message) == ("invalid_request_error", True)
    assert error.request_id
    # The same batch is one of /v1/batches, with its requests and its outcomes in files.
    assert server.client.get(f"/v1/batches/{begun.id}").json()["request_counts"]["completed"] == 5
    files = len(server.client.get("/v1/files").json()["data"])
    assert api.delete(begun.id).type == "message_batch_deleted"
    assert len(server.client.get("/v1/files").json()["data"]) == files - 3
    with pytest.raises(anthropic.NotFoundError):
        api.retrieve(begun.id)


def test_bodies_are_answered_as_they_were_written(server: Served) -> None:
    """With line ends between their members, which are none of the file's."""
    body = json.dumps({"requests": requests(1, system="a\nb", stop_sequences=[])}, indent=1).replace("\n", "\r\n")
    answer = server.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert until_ended(server, answer.json()["id"]).request_counts.succeeded == 1
    assert "a\nb" in byte_tokenizer().decode(server.engine.requests[-1].prompt_tokens, False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "'requests'"),
        ({"requests": []}, "1 to 50000 entries, not 0"),
        ({"requests": requests(1) + requests(1)}, "'requests[1].custom_id' must differ from 'requests[0].custom_id'"),
        ({"requests": requests(1, stream=True)}, "'requests[0].params.stream'"),
        ({"requests": [{"custom_id": "a"}]}, "'requests[0]'"),
        ({"requests": [{"custom_id": 5, "params": {}}]}, "'requests[0].custom_id'"),
    ],
)
def test_what_is_refused(server: Served, body: Any, words: str) -> None:
    answer = server.client.post(PATH, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], words in error["message"]) == ("invalid_request_error", True), error["message"]


def test_each_request_is_bounded_as_one_of_its_own() -> None:
    """By its objects, arrays and fields, of which fifty thousand small ones have more together."""
    params = json.dumps(requests(1)[0]["params"])
    many = ",".join(f'{{"custom_id": "{i}", "params": {params}}}' for i in range(MAX_LINES))
    assert len(decoder.read(f'{{"requests": [{many}]}}'.encode())[0].requests) == MAX_LINES
    body = {"requests": requests(9)}
    body["requests"][7]["params"] = {"messages": [[]] * MAX_CONTAINERS}
    with pytest.raises(RequestTooLarge, match=r"'requests\[7\]' has more than 131072 objects"):
        decoder.read(json.dumps(body).encode())
    body["requests"][7] = requests(1)[0]
    twice = json.dumps(body).encode().replace(b'"max_tokens"', b'"model": "other", "max_tokens"', 1)
    with pytest.raises(InvalidParameter, match="the name 'model' twice"):
        decoder.read(twice)


def test_what_is_unfinished_is_cancelled(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    begun = client(served).messages.batches.create(requests=requests(2))
    for path in (f"{PATH}/{begun.id}/results", f"{PATH}/{begun.id}"):
        answer = served.client.request("GET" if path.endswith("results") else "DELETE", path)
        assert (answer.status_code, "has not ended" in answer.json()["error"]["message"]) == (400, True)
    done = client(served).messages.batches.cancel(begun.id)
    assert done.processing_status == "ended"
    assert done.cancel_initiated_at is not None
    assert done.request_counts.canceled == 2
    assert {name: each.type for name, each in results(served, begun.id).items()} == {
        "row 0": "canceled",
        "row 1": "canceled",
    }
    batch = served.client.get(f"/v1/batches/{begun.id}").json()
    served.client.delete(f"/v1/files/{batch['input_file_id']}")
    assert results(served, begun.id) == {}


def test_pages_in_both_directions(serve_app: Any) -> None:
    served = serve_app()
    api = client(served).messages.batches
    ids = [until_ended(served, api.create(requests=requests(1)).id).id for _ in range(5)]
    assert sorted(each.id for each in api.list(limit=2)) == sorted(ids)
    newest = [each.id for each in api.list()]
    page = api.list(before_id=newest[3], limit=2)
    assert ([each.id for each in page.data], page.has_more) == (newest[1:3], True)
    assert (page.first_id, page.last_id) == (newest[1], newest[2])
    assert [each.id for each in page] == [newest[1], newest[2], newest[0]]
    last = api.list(after_id=newest[3])
    assert ([each.id for each in last.data], last.has_more) == (newest[4:], False)

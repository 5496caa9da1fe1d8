"""`octavo explain ID`: show the timeline of a request, from a running server."""

from __future__ import annotations

import argparse
import json
import os
import urllib.parse

from octavo.errors import OctavoError, RequestError

NAME = "explain"
HELP = "show where a request spent its time: queue, prefill, decode, preemptions, cache, neighbours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The request and the server."""
    parser.add_argument("request_id", metavar="ID", help="response id, such as cmpl-..., or request number")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL of the server (default: %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get("OCTAVO_API_KEY"), help="API key of the server (default: OCTAVO_API_KEY)"
    )
    parser.add_argument("--json", action="store_true", help="print the server's JSON")


def run(args: argparse.Namespace) -> int:
    """Fetch the timeline and print it."""
    import httpx

    from octavo.client.client import read
    from octavo.client.protocol import MAX_BODY_BYTES, client_options, json_of, message_of
    from octavo.telemetry.explain import as_text

    path = f"/v1/requests/{urllib.parse.quote(args.request_id, safe='')}/timeline"
    try:
        with (
            httpx.Client(**client_options(args.url, args.api_key, timeout=30)) as client,
            client.stream("GET", args.url.rstrip("/") + path) as response,
        ):
            body = json_of(read(response, MAX_BODY_BYTES))
    except (httpx.HTTPError, httpx.InvalidURL, RequestError) as error:
        raise OctavoError(f"--url: {args.url} does not answer as an octavo server: {error}") from None
    if response.status_code != 200:
        raise OctavoError(message_of(body))
    if args.json:
        print(json.dumps(body, indent=2))
    else:
        try:
            print("\n\n".join(as_text(choice) for choice in body["choices"]))
        except (LookupError, TypeError, AttributeError):
            raise OctavoError(f"--url: the answer of {args.url} is no timeline of an octavo server") from None
    return 0

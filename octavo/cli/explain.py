"""`octavo explain ID`: show the timeline of a request, from a running server."""

from __future__ import annotations

import argparse
import json
import os
import urllib.parse

from octavo.errors import OctavoError

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

    from octavo.telemetry.explain import as_text

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    path = f"/v1/requests/{urllib.parse.quote(args.request_id, safe='')}/timeline"
    try:
        response = httpx.get(args.url.rstrip("/") + path, headers=headers, timeout=30)
        body = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise OctavoError(f"--url: {args.url} does not answer as an octavo server: {error}") from None
    if response.status_code != 200:
        raise OctavoError(str(body.get("error", {}).get("message", f"the server answered {response.status_code}")))
    if args.json:
        print(json.dumps(body, indent=2))
    else:
        print("\n\n".join(as_text(choice) for choice in body["choices"]))
    return 0

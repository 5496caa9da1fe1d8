"""Lists that are given page by page, as the query says."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from octavo.errors import InvalidParameter


def page(
    request: Request, items: list[dict[str, Any]], default: int = 100, most: int = 10_000, key: str = "after"
) -> dict[str, Any]:
    """One page of ``items``, by the query's ``limit`` and ``key``, the id of the item before it. Raises
    ``InvalidParameter``."""
    after, limit = request.query_params.get(key), request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= most):
        raise InvalidParameter("limit", f"'limit' must be a whole number from 1 to {most}.")
    start = 0
    if after:
        start = 1 + next((i for i, item in enumerate(items) if item["id"] == after), len(items))
    found = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": start + len(found) < len(items),
    }


def page_of_items(request: Request, items: list[dict[str, Any]]) -> dict[str, Any]:
    """One page of a conversation's ``items``, newest first unless the query's ``order`` is ``asc``.

    Raises ``InvalidParameter``.
    """
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter("order", "'order' must be asc or desc.")
    return page(request, items if order == "asc" else items[::-1], default=20, most=100)

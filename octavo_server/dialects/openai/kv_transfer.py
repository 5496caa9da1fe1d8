"""``kv_transfer_params``: the prompt of a request is computed by one server, its answer by another.

The names are vLLM's, so that what passes them on from one server to the other works here too. A prefill server answers
a request with ``do_remote_decode`` with the parameters that the same request has at a decode server. Blocks are found
by their content, so ``remote_block_ids`` are their places in the prompt, and only informative.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidParameter
from octavo.system.addresses import split_address
from octavo.types import KVTransfer
from octavo_server.dialects.openai.common_fields import GenerationFields
from octavo_server.generation import GeneratedChoice
from octavo_server.services import ModelServices

FIELD = "kv_transfer_params"
MAX_TEXT = 256


def kv_transfer(body: GenerationFields, services: ModelServices, num_prompts: int = 1) -> KVTransfer | None:
    """What a body asks for, as far as this server's role goes. Raises ``InvalidParameter``."""
    given, role = body.kv_transfer_params, services.config.cache.role
    if role == "both":
        return None
    if not isinstance(given, dict):
        raise InvalidParameter(FIELD, f"'{FIELD}' must be an object.")
    keeps, fetches = _flag(given, "do_remote_decode"), _flag(given, "do_remote_prefill")
    if keeps and fetches:
        raise InvalidParameter(FIELD, f"'{FIELD}' has 'do_remote_decode' and 'do_remote_prefill'; one of them goes.")
    if keeps and role == "prefill":
        if body.stream or body.n * num_prompts > 1:
            message = f"'{FIELD}.do_remote_decode' is for one prompt and one answer, and not for streams."
            raise InvalidParameter(FIELD, message)
        return KVTransfer()
    if not fetches or role != "decode":
        return None
    host, ticket, port = _text(given, "remote_host"), _text(given, "remote_request_id"), given.get("remote_port")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise InvalidParameter(FIELD, f"'{FIELD}.remote_port' must be a whole number from 1 to {(1 << 16) - 1}.")
    return KVTransfer(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", ticket)


def answered(choices: list[GeneratedChoice]) -> dict[str, Any]:
    """The member of an answer whose prompt is held for a decode server; empty for others."""
    transfer = choices[0].transfer
    if transfer is None:
        return {}
    host, port = split_address(transfer.address)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": transfer.address,
        "remote_block_ids": list(range(transfer.num_blocks)),
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": transfer.ticket,
    }
    return {FIELD: params}


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidParameter(FIELD, f"'{FIELD}.{name}' must be true or false.")
    return bool(value)


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not (value.isascii() and value.isprintable() and 0 < len(value) <= MAX_TEXT):
        raise InvalidParameter(FIELD, f"'{FIELD}.{name}' must be 1 to {MAX_TEXT} printable characters.")
    return value

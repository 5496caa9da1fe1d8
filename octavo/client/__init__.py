"""Clients of a server: ``Client`` and, for asyncio, ``AsyncClient``."""

from octavo.client.async_client import AsyncClient
from octavo.client.client import Client
from octavo.client.results import Choice, Completion, Piece

__all__ = ["AsyncClient", "Choice", "Client", "Completion", "Piece"]

"""Octavo on Ray Serve. It needs ``pip install 'octavo[ray]'``; ``docs/deployment.md`` shows how it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for Ray Serve that ``args`` describe: the ``import_path`` is ``octavo.ray:build_app``.

    ``octavo_fleet.ray.settings`` has the arguments. Raises ``ConfigError``.
    """
    from octavo_fleet.ray.app import application

    return application(args)

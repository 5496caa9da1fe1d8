"""Octavo on Ray Serve. It needs ``pip install 'octavo[ray]'``; ``docs/deployment.md`` shows how it is used."""

from octavo.ray.app import build_app

__all__ = ["build_app"]

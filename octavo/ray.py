"""The application of Octavo for Ray Serve, under the name by which deployments import it: ``octavo.ray:build_app``."""

from octavo_fleet.ray import build_app

__all__ = ["build_app"]

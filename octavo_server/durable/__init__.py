"""Requests that continue after a restart of the whole server: ``--journal``."""

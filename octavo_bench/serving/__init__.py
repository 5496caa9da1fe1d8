"""Measurements of servers over HTTP, and their clients."""

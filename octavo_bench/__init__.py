"""Measurements. Each prints its figures with the command, the machine and the versions, and keeps the raw JSON."""

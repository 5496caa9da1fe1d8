"""Faults at random times against a running server, under requests whose answers are known: ``octavo bench chaos``."""

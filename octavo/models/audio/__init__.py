"""Towers that read audio."""

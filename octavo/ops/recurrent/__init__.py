"""Layers with recurrent state: convolutions, scans and delta rules; a contract a file."""

"""The HTTP server: a front process that must not die, around an engine process that may."""

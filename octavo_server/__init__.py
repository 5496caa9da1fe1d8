"""The HTTP server: a long-lived front process that supervises a disposable engine process."""

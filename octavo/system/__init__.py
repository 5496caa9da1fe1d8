"""Processes, threads, processors and files of the host."""

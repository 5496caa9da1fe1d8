"""Metrics, request events and start-up timing."""

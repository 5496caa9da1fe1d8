"""Building an engine: the one place that names every part."""

"""Files of the format GGUF."""

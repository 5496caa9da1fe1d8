"""Attention: over the paged cache, over latents and entries, and to what an indexer chooses; a contract a file."""

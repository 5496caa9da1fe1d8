"""Vision towers: from pixels to embeddings."""

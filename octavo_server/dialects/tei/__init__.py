"""The API of Text Embeddings Inference."""

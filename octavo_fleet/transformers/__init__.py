"""Models of the library transformers as a backend."""

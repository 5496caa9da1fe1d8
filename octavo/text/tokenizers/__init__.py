"""The forms in which tokenizers come, and what is read from them."""

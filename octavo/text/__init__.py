"""Text in and text out: tokenizer, chat template, incremental decoding, stop strings. No tensors here."""

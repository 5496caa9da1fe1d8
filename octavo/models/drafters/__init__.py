"""Networks that draft tokens for speculative decoding."""

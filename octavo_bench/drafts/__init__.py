"""Speculative decoding: what drafts bring, and the training of a head that makes them."""

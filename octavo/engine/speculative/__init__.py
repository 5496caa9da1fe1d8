"""Speculative decoding: where drafts come from, and how many of them a step verifies."""

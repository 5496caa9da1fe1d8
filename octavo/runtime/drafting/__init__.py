"""Drafters, which propose tokens on the device, and the rule that accepts them."""

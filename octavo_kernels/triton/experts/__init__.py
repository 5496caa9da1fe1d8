"""Mixtures of experts: the router, and products with the selected experts."""

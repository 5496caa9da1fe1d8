"""Carries out plans: tensors out of plans, the forward pass, sampling, and the memory that this takes."""

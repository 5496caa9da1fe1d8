"""Executes plans: builds a step's tensors, runs the forward pass and sampling, and sizes the memory they need."""

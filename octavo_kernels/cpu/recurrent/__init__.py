"""Layers with recurrent state: convolutions and recurrences along sequences."""

"""Attention: single rows and prompts, over keys and values or over latents."""

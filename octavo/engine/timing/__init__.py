"""How long steps take, and how many tokens the next one computes."""

"""From logits to tokens, and the random numbers of it."""

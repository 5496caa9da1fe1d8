"""Images of prompts: checked, decoded and resized, and what stands for them among the tokens."""

"""From the plan of a step to the executor, and back: messages, and what goes with them."""

"""What is done row by row: lookups, norms, gates, and the ends of a step."""

"""Model families. Each base file is self-contained; other files state only their differences from it."""

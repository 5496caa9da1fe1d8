"""Where keys and values live: which block belongs to whom, and which blocks can be shared."""

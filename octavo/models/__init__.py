"""Model families: each base file stands alone and reads from top to bottom."""

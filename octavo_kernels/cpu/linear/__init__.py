"""Products with dense weights, and with weights of fewer bits."""

"""Products with dense weights and with numbers of 8 bits."""

"""What becomes of a measurement: its record, tables and plots of it, and a threshold for its figures."""

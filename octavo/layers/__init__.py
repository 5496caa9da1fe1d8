"""The layers that models are built from. They hold weights but no state."""

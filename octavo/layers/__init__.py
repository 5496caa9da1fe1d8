"""The parts that models are made of. They hold weights and no state."""

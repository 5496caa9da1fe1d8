"""How the weights of linear maps are stored and applied."""

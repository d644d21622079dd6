"""How a model is cut over the mesh."""

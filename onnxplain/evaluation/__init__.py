"""How far the maps of a model can be trusted, measured on pictures."""

"""Which explanation can be trusted: measures of the maps of a model on a set of pictures."""

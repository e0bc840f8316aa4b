"""What a graph is, found by its structure and not by names: attentions, tokens, readout, scores."""

"""Which map can be trusted: measures of explanations over a set of pictures."""

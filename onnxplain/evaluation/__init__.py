"""Which map can be trusted: measures of explanation methods over a dataset, and their report."""

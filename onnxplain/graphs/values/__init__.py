"""What is known of the values of a graph before it runs: shapes, constants, where an axis and the
pixels of the picture are in them."""

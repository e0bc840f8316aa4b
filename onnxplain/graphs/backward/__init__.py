"""The reverse walk through a graph, and the rules of what it carries: gradient and relevance."""

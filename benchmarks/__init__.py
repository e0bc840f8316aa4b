"""How fast explained files are, and which models of timm can be explained."""

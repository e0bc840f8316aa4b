"""The bundled demo: garment scenes and a small vision transformer trained on them."""

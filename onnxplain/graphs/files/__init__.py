"""Model files: any ONNX file is read with care, an explained one written whole or not at all."""

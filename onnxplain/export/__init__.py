"""timm or torch model to explained ONNX. The module itself is the public function `export`."""

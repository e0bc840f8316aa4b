"""Proves explained graphs without the framework that the model is from, run by onnxruntime."""

"""`python -m onnxplain` is the `onnxplain` command."""

from onnxplain.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()

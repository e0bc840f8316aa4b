"""`python -m onnxplain`, and where the `onnxplain` command starts."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line; Ctrl-C is quiet even while it loads."""
    try:
        from onnxplain.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

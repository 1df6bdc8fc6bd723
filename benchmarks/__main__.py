"""Runs the command line of `benchmarks.tool.cli` for `python -m benchmarks`."""

from benchmarks.tool.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m moecompile``: the command line."""

from moecompile.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

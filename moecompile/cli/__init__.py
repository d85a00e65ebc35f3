"""The command line ``moecompile``."""

from .main import main as main

__all__ = ["main"]

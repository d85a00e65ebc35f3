"""The local launcher under its public name: ``moecompile.launch(fn, world_size, *args)``."""

from moecompile.runtime.launcher import RankError as RankError
from moecompile.runtime.launcher import launch as launch

__all__ = ["RankError", "launch"]

"""The demo: a plain MoE language model on local ranks, held against one process at every step."""

from .run import Settings as Settings
from .run import run_demo as run_demo

__all__ = ["Settings", "run_demo"]

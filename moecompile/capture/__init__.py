"""Capture: a user's model and one call become one flat functional graph."""

from moecompile.capture.batch import batch_inputs, globalize
from moecompile.capture.capture import Captured, capture_model

__all__ = ["Captured", "batch_inputs", "capture_model", "globalize"]

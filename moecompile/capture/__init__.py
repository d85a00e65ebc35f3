"""Capture: a user's model and one call become one flat functional graph."""

from moecompile.capture.batch import batch_inputs, globalize
from moecompile.capture.capture import capture_model
from moecompile.capture.captured import Captured

__all__ = ["Captured", "batch_inputs", "capture_model", "globalize"]

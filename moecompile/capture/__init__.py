"""Capture: a user's model and one call become one flat functional graph."""

from moecompile.capture.batch import batch_inputs, globalize, leaf_names
from moecompile.capture.capture import capture_model
from moecompile.capture.captured import Captured
from moecompile.capture.compare import compare_capture, log_left_out
from moecompile.capture.local_sizes import note_local_numbers
from moecompile.capture.marks import mark_moe

__all__ = [
    "Captured",
    "batch_inputs",
    "capture_model",
    "compare_capture",
    "globalize",
    "leaf_names",
    "log_left_out",
    "mark_moe",
    "note_local_numbers",
]

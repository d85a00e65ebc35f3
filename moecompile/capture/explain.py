"""What torch raises while tracing, as one sentence that names the user's line."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from moecompile.capture.where import raising_line
from moecompile.compat import DynamicOutputShapeException, GuardOnDataDependentSymNode, UnsupportedOperatorException
from moecompile.errors import CaptureError

# These log their own account of an error that is raised as well.
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextlib.contextmanager
def torch_quiet() -> Iterator[None]:
    """Within, torch does not log or warn about what capture reports itself."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def errors_explained(model: str) -> Iterator[None]:
    """Any error raised within becomes a `CaptureError`; ``model`` is the name of the model's class."""
    try:
        yield
    except CaptureError:
        raise
    except GuardOnDataDependentSymNode as error:
        raise CaptureError(
            f"{raising_line(error) or model}: a branch, a size or a number depends on tensor values, which are not known "
            f"when the model is captured; use torch.where or masks, or decide it outside the model."
        ) from error
    except DynamicOutputShapeException as error:
        raise CaptureError(
            f"{raising_line(error) or model}: {error.func} gives results whose sizes depend on tensor values, which are not known when the "
            f"model is captured; use masks, or let the model return its operands and compute it from them outside."
        ) from error
    except UnsupportedOperatorException as error:
        raise CaptureError(
            f"{raising_line(error) or model}: {error.func} says nothing of the shape of its result, so that it cannot be captured; "
            f"register it with torch.library.register_fake, or mark the layer with mc.mark_moe."
        ) from error
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"{raising_line(error) or model}: capture of {model} stopped with {type(error).__name__}: {first}; check that the "
            f"plain model runs on these inputs, and report what it uses here if it does."
        ) from error

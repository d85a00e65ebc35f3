"""The errors users see: one base class, one subclass for each stage that can refuse.

Every message is one sentence: where it happened, what was found, what was needed, and what to try.
"""


class MoeCompileError(Exception):
    """Base of every error this package raises on purpose."""


class PlanError(MoeCompileError, ValueError):
    """A plan is illegal by itself, or does not fit the world size or the model."""


class CaptureError(MoeCompileError):
    """The user's model or its inputs cannot be turned into one exact program."""


class PassError(MoeCompileError):
    """A pass met a program it must not rewrite, or a pipeline is in an illegal order."""


class VerifyError(MoeCompileError):
    """A program, or the result of a run, breaks an invariant that always has to hold."""

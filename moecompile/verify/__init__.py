"""Graph verifier: what must hold after every pass, whatever the pass was.

`verify_program` is cheap and runs after each pass; `verify_values` computes every shape again and runs once, at the
end. Where every value lives is proved (`spread`) whenever the graph was cut, dispatched or differentiated, and at the end;
``MOECOMPILE_PROVE=0`` in the environment leaves that out, and so does ``balance_scope="local"``.
"""

import os

from ..errors import VerifyError
from ..program import Program
from . import values
from .collectives import check_collectives, check_exchanges, check_transposes
from .expand import expanded
from .facts import check_facts
from .placements import check_partial_values
from .spread import check_spread, is_due, remember
from .structure import check_structure

__all__ = ["check_spread", "verify_program", "verify_values"]


def _proves(program: Program) -> bool:
    """Balance losses of each rank's own batch are no value of the global program, which is what is proved."""
    return os.environ.get("MOECOMPILE_PROVE") != "0" and program.plan.balance_scope == "global"


def verify_program(program: Program) -> Program:
    """Raise a VerifyError with the surrounding lines at the first broken invariant.

    Returns the program with its joined ops written out, which `verify_values` may be given.
    """
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"the graph is malformed: {error}") from error
    whole, program = program, expanded(program)
    check_structure(program)
    check_collectives(program)
    check_partial_values(program)
    check_exchanges(program)
    check_transposes(program)
    check_facts(program)
    if _proves(program):
        remember(whole)
        if is_due(whole):
            check_spread(program)
        program.graph_module.meta.update(whole.graph_module.meta)  # what was just written down
    return program


def verify_values(program: Program, written_out: Program | None = None) -> None:
    """Raise a VerifyError for a value that is not what its op gives, or that lives elsewhere than it has to."""
    values.verify_values(program)
    if _proves(program):
        check_spread(written_out or program)

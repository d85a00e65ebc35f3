"""Static proof that a program means the same on all ranks as on one, apart from the rules that placed it.

`check_spread` reads the raw graph: where the inputs live, what each op does to that, which axes the collectives run over. It
knows nothing of the passes and of the placements that they recorded on inner nodes.
"""

from .coverage import Coverage
from .scales import remember
from .walk import check_spread, is_due

__all__ = ["Coverage", "check_spread", "is_due", "remember"]

"""What a graph captured at the batch of one rank says otherwise than the graph of the global batch: numbers made from its sizes.

``counts / x.shape[0]`` is a division by a number in a graph, and nothing in it tells that the number counts tokens.  The same call
captured at both sizes does.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from moecompile import meta
from moecompile.compat import tree_flatten
from moecompile.errors import CaptureError


def note_local_numbers(whole: Graph, local: Graph) -> None:
    """Give every node of ``whole`` the numbers that its twin in ``local`` has in other places.

    `CaptureError` where the two are not the same but for numbers.
    """
    twins: dict[Node, Node] = {}
    pairs = list(zip(whole.nodes, local.nodes, strict=False))
    for node, twin in pairs:
        twins[node] = twin
        given, other = tree_flatten((node.args, node.kwargs)), tree_flatten((twin.args, twin.kwargs))
        same = (node.op, node.target if node.op == "call_function" else "") == (
            twin.op,
            twin.target if twin.op == "call_function" else "",
        )
        same = same and given[1] == other[1] and all(map(lambda a, b: _alike(a, b, twins), given[0], other[0]))
        if not same or len(whole.nodes) != len(local.nodes):
            raise CaptureError(
                f"{meta.source(node) or 'the model'}: the graph of one rank's batch is another one than that of the global batch "
                f"({node.name} and {twin.name}), and balance_scope='local' needs both; use a larger batch a rank, or leave "
                "balance_scope out."
            )
        changed = {
            at: there for at, (here, there) in enumerate(zip(given[0], other[0], strict=True)) if _differ(here, there)
        }
        if changed:
            meta.set_local_numbers(node, changed)


def _alike(one: object, other: object, twins: dict[Node, Node]) -> bool:
    if isinstance(one, Node):
        return twins.get(one) is other
    return type(one) is type(other) and (isinstance(one, (int, float)) or str(one) == str(other))


def _differ(one: object, other: object) -> bool:
    return isinstance(one, (int, float)) and one != other

"""A product that applies every expert's last weight and adds the weighted experts up at once, as two products.

Before:  einsum("bsef,efh->bsh", hidden * scores[..., None], wo)
After:   einsum("bseh,bse->bsh", einsum("bsef,efh->bseh", hidden, wo), scores)

Only where the rows have been multiplied by one number of a routing decision for each token and expert: a product over heads and
their features stays whole.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile import meta
from moecompile.compat import FakeTensorMode
from moecompile.recognition.choices import Choice, dependents, find_choices
from moecompile.recognition.products import Labelled, labelled

aten = torch.ops.aten


def weigh_behind(graph: Graph, mode: FakeTensorMode) -> int:
    """Rewrite them; returns how many there were."""
    products = [(node, form) for node in ir.find(graph, aten.einsum.default) if (form := labelled(node)) is not None]
    products = [(node, form) for node, form in products if len(form.operands) == 2]
    done = 0
    for choice in find_choices(graph) if products else []:
        routed = dependents(choice.starts)
        for node, form in products:
            for (rows, letters), (weight, names) in (form.operands, form.operands[::-1]):
                parts = _weighted(rows, choice, routed) if node.users else None
                feature = None if parts is None else _feature(letters, names, form, choice, parts)
                if parts is None or feature is None:
                    continue
                (hidden, scores), kept = parts, letters.replace(feature, "")
                made = next(one for one in form.out if one in names)
                with graph.inserting_before(node):
                    text = f"{letters},{names}->{kept}{made}"
                    each = ir.call(graph, aten.einsum.default, text, [hidden, weight], like=node, mode=mode)
                    flat = ir.call(graph, aten.squeeze.dim, scores, letters.index(feature), like=node, mode=mode)
                    text = f"{kept}{made},{kept}->{form.out}"
                    ir.replace(node, ir.call(graph, aten.einsum.default, text, [each, flat], like=node, mode=mode))
                done += 1
    if done:
        ir.eliminate_dead(graph)
    return done


def _weighted(rows: Node, choice: Choice, routed: set[Node]) -> tuple[Node, Node] | None:
    """Values and the numbers, one for each token and option, that they are multiplied by."""
    if rows.target is not aten.mul.Tensor:
        return None
    for hidden, scores in (rows.args[:2], rows.args[1::-1]):
        if not (isinstance(hidden, Node) and isinstance(scores, Node) and scores in routed and meta.is_tensor(hidden)):
            continue
        fits = meta.tensor(scores).numel() == choice.num_tokens * choice.num_options
        if fits and meta.tensor(hidden).shape == meta.tensor(rows).shape:
            return hidden, scores
    return None


def _feature(letters: str, names: str, form: Labelled, choice: Choice, parts: tuple[Node, Node]) -> str | None:
    """The letter of the experts' features, where these and the experts are summed; None where the product is another one."""
    sizes = dict(zip(letters, meta.tensor(parts[0]).shape, strict=True))
    given = dict(zip(letters, meta.tensor(parts[1]).shape, strict=False))
    both = [one for one in letters if one in names and one not in form.out]
    made = [one for one in names if one in form.out]
    if len(both) != 2 or len(made) != 1 or made[0] in letters or len(given) != len(letters):
        return None
    for expert, feature in (both, both[::-1]):
        alone = [one for one in letters if given[one] != sizes[one]] == [feature] and given[feature] == 1
        if alone and sizes[expert] == choice.num_options:
            return feature
    return None

"""Find, build and replace nodes. Every node made here carries a fake value: no later pass has to guess a shape."""

from __future__ import annotations

import operator
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from . import meta
from .compat import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    OpOverload,
    ShapeEnv,
    empty_fake,
    rename_node,
    tree_map,
    without_new_symbols,
)

_KNOWN = "moecompile_known"  # attribute of a fake mode: values by their calls
_NUMBERS = (bool, int, float)


def fake_mode() -> FakeTensorMode:
    """A mode in which inputs are static and sizes read from tensors become unbacked symbols."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)


def as_module(graph: Graph, root: nn.Module | None = None, name: str = "GraphModule") -> GraphModule:
    """A graph as a module, whose code is generated when it is first asked for; attributes that calls read are those of ``root``."""
    return LazyGraphModule(nn.Module() if root is None else root, graph, name)


def find(graph: Graph | GraphModule, *targets: Any) -> list[Node]:
    """All nodes that call one of ``targets``, in graph order."""
    inner = graph.graph if isinstance(graph, GraphModule) else graph
    found = [
        node for target in set(targets) for node in inner.find_nodes(op="call_function", target=target, sort=False)
    ]
    return sorted(found)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, defaults filled in."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        given = index < len(node.args) and not argument.kwarg_only
        found[argument.name] = node.args[index] if given else node.kwargs.get(argument.name, argument.default_value)
    return found


def mode_of(graph: Graph) -> FakeTensorMode:
    """The fake mode of the graph's values."""
    for node in graph.nodes:
        found = node.meta.get("val")
        if isinstance(found, FakeTensor):
            return found.fake_mode
    raise ValueError("the graph holds no fake tensor: it was not made by capture")


def compute(target: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """The fake value of a call whose arguments are nodes or constants.

    A call of an op is computed once for all calls with the same constants and with operands of the same type, shape, strides and
    device, as identical layers have many; each gets tensors of its own, which remember sizes that were read from them.
    """
    fake_args = map_arg(args, meta.value)
    fake_kwargs = map_arg(kwargs, meta.value)
    sizes: dict[Any, torch.SymInt] = {}  # those of the operands that are known at run time; each call has its own
    called = (target, fake_args, fake_kwargs, torch.get_default_dtype())
    key = _signature(called, sizes) if _is_settled(target) else None
    known: dict[Any, Any] = vars(mode).setdefault(_KNOWN, {})  # lives as long as the mode
    if key is not None and key in known:
        return _again(known[key], list(sizes.values()), mode)
    with mode, torch.no_grad(), without_new_symbols(mode):
        found = target(*fake_args, **fake_kwargs)
    if key is not None:
        form = _form(found, {symbol: at for at, symbol in enumerate(sizes)})
        if form is not None:
            known[key] = form
    return found


@dataclass(frozen=True)
class _Form:
    """A tensor that is nothing but its type, sizes and strides. A run-time size is the place of the operands' that it equals, as text."""

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device


def _form(found: Any, places: dict[Any, int]) -> Any:
    """What is known of a result, a tensor or a tuple of them; None where that is not all of it."""
    if isinstance(found, (tuple, list)):
        forms = [_form(item, places) for item in found]
        return None if None in forms else type(found)(forms)
    if not isinstance(found, FakeTensor) or found.storage_offset() or found.is_conj() or found.is_neg():
        return None
    sizes: list[int | str] = []
    for size in (*found.shape, *found.stride()):
        if isinstance(size, torch.SymInt) and size.node.expr not in places:
            return None
        sizes.append(str(places[size.node.expr]) if isinstance(size, torch.SymInt) else size)
    return _Form(tuple(sizes[: found.dim()]), tuple(sizes[found.dim() :]), found.dtype, found.device)


def _again(form: Any, sizes: list[torch.SymInt], mode: FakeTensorMode) -> Any:
    """Another value of a known form."""
    if not isinstance(form, _Form):
        return type(form)(_again(item, sizes, mode) for item in form)
    shape, stride = (
        [sizes[int(size)] if isinstance(size, str) else size for size in part] for part in (form.shape, form.stride)
    )
    return empty_fake(mode, shape, stride, form.dtype, form.device)


def _is_settled(target: Any) -> bool:
    """Whether the value of a call depends on nothing but its arguments."""
    return isinstance(target, OpOverload) and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _signature(found: Any, sizes: dict[Any, torch.SymInt]) -> Any:
    """Equal for values that no fake rule can tell apart, whatever their run-time ``sizes`` are called; None for something unknown."""
    if isinstance(found, FakeTensor):
        numbers = tuple(_size(size, sizes) for size in (*found.shape, *found.stride(), found.storage_offset()))
        return (numbers, found.dtype, found.device, found.is_conj(), found.is_neg())
    if isinstance(found, torch.SymInt):
        return (torch.SymInt, _size(found, sizes))
    if isinstance(found, (tuple, list, dict)):
        items = [_signature(item, sizes) for item in (found.items() if isinstance(found, dict) else found)]
        return None if None in items else (type(found), *items)
    plain = isinstance(
        found, (*_NUMBERS, str, OpOverload, torch.dtype, torch.device, torch.layout, torch.memory_format)
    )
    if not plain and found is not None:
        return None
    return (type(found), repr(found) if isinstance(found, float) else found)  # -0.0 is not 0.0, and nan is itself


def _size(size: Any, sizes: dict[Any, torch.SymInt]) -> Any:
    """A size; one that is known at run time by its place among the call's, and what is computed of some by its formula."""
    if not isinstance(size, torch.SymInt):
        return size
    if not size.node.expr.is_Symbol:
        return size.node.expr
    sizes.setdefault(size.node.expr, size)
    return str(list(sizes).index(size.node.expr))


def op_name(target: Any) -> str:
    """What a value is called after the op that makes it: ``linear`` for ``aten.linear.default``."""
    if isinstance(target, OpOverload):
        return str(target).split(".")[1]
    return str(getattr(target, "__name__", target)).split(".")[0]


def element_name(source: Node, index: int) -> str:
    """What an element of a tuple is called: the name in the op's schema, such as ``row_map``, else after its source."""
    if isinstance(source.target, OpOverload):
        returns = source.target._schema.returns
        if index < len(returns) and returns[index].name:
            return str(returns[index].name)
    return f"{source.name}_at{index}"


def tidy_names(graph: Graph) -> None:
    """Name elements of tuples after what they are; every other node is named after its op when it is made.

    A name that fits stays, so that one inserted node changes one line of the text.
    """
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        source, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (None, None)
        if node.name.startswith("getitem") and isinstance(source, Node) and isinstance(index, int):
            before = node.name
            rename_node(node, element_name(source, index))
            renamed[before] = node.name
    for node in graph.nodes if renamed else ():
        twin = meta.twin(node)
        if twin in renamed:
            meta.set_twin(node, renamed[twin])


def call(
    graph: Graph,
    target: Callable[..., Any],
    *args: Any,
    like: Node | None = None,
    mode: FakeTensorMode | None = None,
    **kwargs: Any,
) -> Node:
    """Insert a call at the insertion point; its value is computed, its module and source are those of ``like``."""
    node = graph.create_node("call_function", target, args, kwargs, name=op_name(target))
    if like is not None:
        node.meta = meta.copy_meta(like)
        node.meta.pop("val", None)
        meta.clear_placements(node)
        meta.clear_marks(node)
    node.meta["val"] = compute(target, args, kwargs, mode or mode_of(graph))
    return node


def unpack(graph: Graph, node: Node) -> list[Node]:
    """``getitem`` nodes for each element of a node that returns a tuple."""
    made, placed = [], meta.item_placements(node)
    for index, item in enumerate(meta.value(node)):
        got = graph.create_node("call_function", operator.getitem, (node, index), name=element_name(node, index))
        got.meta = meta.copy_meta(node)
        meta.clear_placements(got)
        meta.clear_marks(got)
        if placed:
            meta.set_placements(got, placed[index])
        got.meta["val"] = item
        made.append(got)
    return made


def items(node: Node) -> dict[int, Node]:
    """The existing ``getitem`` users of a node, by index."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def replace(old: Node, new: Node) -> None:
    """Give every user of ``old`` the value ``new`` and erase ``old``."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    old.graph.erase_node(old)


def refresh(node: Node, mode: FakeTensorMode) -> None:
    """Recompute the value of one node after its arguments changed shape."""
    if node.op == "call_function":
        node.meta["val"] = compute(node.target, node.args, node.kwargs, mode)  # type: ignore[arg-type]


def between(starts: Iterable[Node], end: Node) -> list[Node]:
    """Nodes on a path from ``starts`` to ``end``, both left out, in graph order. Looks at no node behind ``end``."""
    first = set(starts)
    reached, todo = set(first), list(first)
    while todo:
        for user in todo.pop().users:
            if user not in reached and user < end:
                reached.add(user)
                todo.append(user)
    found, todo = set[Node](), [end]
    while todo:  # whatever lies on a path has been reached, so that nothing else has to be looked at
        for source in todo.pop().all_input_nodes:
            if source in reached and source not in found:
                found.add(source)
                todo.append(source)
    return sorted(found - first)


def descendants(start: Node, stop: Iterable[Any] = ()) -> list[Node]:
    """Everything that depends on ``start``, without itself, in no order; the search does not go past calls of ``stop``."""
    barrier, seen, todo = set(stop), dict[Node, None](), [start]
    while todo:
        for user in todo.pop().users:
            if user not in seen:
                seen[user] = None
                if user.target not in barrier:
                    todo.append(user)
    return list(seen)


def behind(node: Node) -> Iterator[Node]:
    """The nodes that stand after a node, in graph order."""
    while (node := node.next).op != "root":
        yield node


def ancestors(*nodes: Node, stop: Iterable[Node] = ()) -> set[Node]:
    """Everything the nodes depend on, without themselves; the search does not go past ``stop``."""
    barrier, seen, todo = set(stop), set(), list(nodes)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                if source not in barrier:
                    todo.append(source)
    return seen


def ancestors_beyond(end: Node, start: Node) -> set[Node]:
    """``end`` and everything it depends on, without ``start`` and what that depends on. Looks at little more than what it finds."""
    beyond, common = {end} - {start}, {start}
    todo = sorted({end, start})  # the last node of a graph first: whatever reads a node has been seen before it
    waiting = len(beyond)  # of those in ``todo`` that are not known to lie before ``start``
    while waiting:
        node = todo.pop()
        mine = node in beyond
        waiting -= mine
        for source in node.all_input_nodes:
            known = source in beyond or source in common
            if not mine:
                waiting -= source in beyond
                beyond.discard(source)
                common.add(source)
            elif not known:
                beyond.add(source)
                waiting += 1
            if not known:
                insort(todo, source)
    return beyond


def eliminate_dead(graph: Graph, keep: Callable[[Node], bool] = lambda node: False) -> int:
    """Erase unused nodes, never a placeholder nor one that ``keep`` asks for. Returns how many went."""
    gone = 0
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or keep(node):
            continue
        graph.erase_node(node)
        gone += 1
    return gone


def copy_into(source: Graph, target: Graph, env: dict[Node, Any]) -> None:
    """Copy all but placeholders and output; ``env`` maps source nodes to target nodes and is filled."""
    for node in source.nodes:
        if node.op in ("placeholder", "output"):
            continue
        env[node] = target.node_copy(node, lambda arg: env[arg])
        env[node].meta = meta.copy_meta(node)


def symbolic_sizes(found: Any) -> Iterator[torch.SymInt]:
    """Every symbolic size within a fake value."""
    pending = [found]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.SymInt):
            yield item
        elif isinstance(item, torch.Tensor):
            pending.extend(size for size in item.shape if isinstance(size, torch.SymInt))
        elif isinstance(item, (tuple, list)):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())


def map_nodes(tree: Any, fn: Callable[[Node], Any]) -> Any:
    """``map_arg`` that also descends into plain containers."""
    return tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Node) else leaf, tree)


def extract(graph: Graph, wanted: Iterable[Node]) -> Graph:
    """A graph with the same placeholders that computes only ``wanted``, in that order."""
    wanted = list(wanted)
    needed = ancestors(*wanted) | set(wanted)
    made, env = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "placeholder" or (node in needed and node.op != "output"):
            env[node] = made.node_copy(node, env.__getitem__)
            env[node].meta = meta.copy_meta(node)
    made.output(tuple(env[node] for node in wanted))
    return made

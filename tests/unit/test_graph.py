"""Finding, building and replacing nodes; every node carries a value of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.placement.types import Shard

aten = torch.ops.aten


@pytest.fixture
def graph() -> Graph:
    """x [3, 2] -> topk -> (values, indices); relu of the values."""
    made = Graph()
    x = made.placeholder("x")
    with graphs.fake_mode():
        x.meta["val"] = torch.empty(3, 2)
    meta.set_module_path(x, "layers.1.mlp")
    top = graphs.call(made, aten.topk.default, x, 1, like=x)
    values, _ = graphs.unpack(made, top)
    made.output((graphs.call(made, aten.relu.default, values, like=x),))
    return made


def by_name(graph: Graph) -> dict[str, Node]:
    return {node.name: node for node in graph.nodes}


def test_a_call_has_a_value_a_name_and_the_place_of_its_model(graph: Graph) -> None:
    relu = by_name(graph)["relu"]
    assert list(meta.tensor(relu).shape) == [3, 1]
    assert meta.module_path(relu) == "layers.1.mlp" and meta.layer(relu) == "layers.1"


def test_placements_are_not_inherited(graph: Graph) -> None:
    x = by_name(graph)["x"]
    meta.set_placements(x, {"dp": Shard(0)})
    with graph.inserting_after(x):
        made = graphs.call(graph, aten.neg.default, x, like=x)
    assert meta.has_placements(x) and not meta.has_placements(made)


def test_elements_are_named_by_the_schema(graph: Graph) -> None:
    assert {"values", "indices"} <= set(by_name(graph))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.linear.default, "linear"), (aten.add.Tensor, "add"), (aten._softmax.default, "_softmax"), (ops.permute, "permute"),
        (ops.cpu.unpermute, "unpermute"), (torch.relu, "relu"), (graphs.operator.getitem, "getitem"),
    ],
)  # fmt: skip
def test_names_of_ops(target: object, name: str) -> None:
    assert graphs.op_name(target) == name


def test_tidy_names_renames_elements_once_and_keeps_the_rest() -> None:
    made = Graph()
    x = made.placeholder("x")
    halves = made.call_function(aten.split.Tensor, (x, 1))
    parts = [made.call_function(graphs.operator.getitem, (halves, index)) for index in range(2)]
    reader = made.call_function(aten.neg.default, (parts[1],))
    meta.set_twin(reader, parts[1].name)
    made.output((reader,))
    graphs.tidy_names(made)
    assert [part.name for part in parts] == [f"{halves.name}_at0", f"{halves.name}_at1"]
    assert meta.twin(reader) == parts[1].name
    before = list(by_name(made))
    graphs.tidy_names(made)
    assert list(by_name(made)) == before


def test_replace_and_refresh(graph: Graph) -> None:
    nodes = by_name(graph)
    with graph.inserting_before(nodes["relu"]):
        wide = graphs.call(graph, aten.expand.default, nodes["values"], [3, 5], like=nodes["relu"])
    nodes["relu"].replace_input_with(nodes["values"], wide)
    graphs.refresh(nodes["relu"], graphs.mode_of(graph))
    assert list(meta.tensor(nodes["relu"]).shape) == [3, 5]
    with graph.inserting_after(wide):
        other = graphs.call(graph, aten.neg.default, wide)
    graphs.replace(nodes["relu"], other)
    assert graph.output_node().args == ((other,),)
    assert "relu" not in by_name(graph)


def test_walks(graph: Graph) -> None:
    nodes = by_name(graph)
    assert graphs.ancestors(nodes["relu"]) == {nodes["values"], nodes["topk"], nodes["x"]}
    assert graphs.ancestors(nodes["relu"], stop=[nodes["topk"]]) == {nodes["values"], nodes["topk"]}
    assert graphs.between([nodes["x"]], nodes["relu"]) == [nodes["topk"], nodes["values"]]
    assert graphs.items(nodes["topk"]) == {0: nodes["values"], 1: nodes["indices"]}
    assert graphs.find(graph, aten.relu.default, aten.topk.default) == [nodes["topk"], nodes["relu"]]


def test_dead_nodes_go_placeholders_stay(graph: Graph) -> None:
    graph.output_node().args = ((),)
    assert graphs.eliminate_dead(graph, keep=lambda node: node.name == "topk") == 3
    assert list(by_name(graph)) == ["x", "topk", "output"]


def test_extract_keeps_the_interface(graph: Graph) -> None:
    part = graphs.extract(graph, [by_name(graph)["values"]])
    assert [node.name for node in part.nodes] == ["x", "topk", "values", "output"]
    assert all("val" in node.meta for node in part.nodes if node.op != "output")


def test_copies_do_not_share_dictionaries(graph: Graph) -> None:
    relu = by_name(graph)["relu"]
    relu.meta["custom"] = {"key": 1}
    copied = meta.copy_meta(relu)
    copied["custom"]["key"] = 2
    assert relu.meta["custom"] == {"key": 1}


def test_symbolic_sizes_and_missing_values() -> None:
    mode = graphs.fake_mode()
    made = Graph()
    x = made.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty((), dtype=torch.int64)
    size = graphs.call(made, aten._local_scalar_dense.default, x)
    with mode:
        rows = meta.value(size) * 2
        sized = torch.empty(rows, 3)
    assert list(graphs.symbolic_sizes((sized, [meta.value(size)]))) == [meta.value(size), sized.shape[0]]
    bare = made.call_function(aten.neg.default, (x,))
    with pytest.raises(KeyError, match=r"carries no value: it was created without graph\.call\(\)"):
        meta.value(bare)
    with pytest.raises(TypeError, match="holds a SymInt, a tensor was expected"):
        meta.tensor(size)


def test_a_graph_of_nobody_has_no_mode() -> None:
    with pytest.raises(ValueError, match="it was not made by capture"):
        graphs.mode_of(Graph())


def test_a_moved_layer_is_another_layer(graph: Graph) -> None:
    relu = by_name(graph)["relu"]
    meta.move_modules(relu, "layers.1", "layers.12")
    assert meta.module_paths(relu) == ["layers", "layers.12", "layers.12.mlp"]
    meta.move_modules(relu, "layers.1", "layers.3")  # not a prefix of layers.12
    assert meta.module_path(relu) == "layers.12.mlp"


def test_equal_calls_are_computed_once_and_share_no_tensor() -> None:
    """Sizes that are read from one of them are no sizes of the other."""
    made, mode = Graph(), graphs.fake_mode()
    x = made.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(3, 2)
    first, second = (graphs.call(made, aten.gt.Scalar, x, 0.0) for _ in range(2))
    assert meta.tensor(first) is not meta.tensor(second) and meta.tensor(second).dtype is torch.bool
    picked = [graphs.call(made, aten.nonzero.default, mask) for mask in (first, second)]
    sizes = [str(size) for node in picked for size in graphs.symbolic_sizes(meta.value(node))]
    assert len(set(sizes)) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((aten.sum.dim_IntList, [1], True), (aten.sum.dim_IntList, [1], False)),
        ((aten.add.Scalar, 1), (aten.add.Scalar, 1.0)),
    ],
)
def test_calls_that_differ_in_a_constant_are_two(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    made, mode = Graph(), graphs.fake_mode()
    x = made.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(3, 2, dtype=torch.int64)
    found = [meta.tensor(graphs.call(made, target, x, *args)) for target, *args in (one, other)]
    assert (found[0].shape, found[0].dtype) != (found[1].shape, found[1].dtype)


class Widened(TorchFunctionMode):
    """Asks for float64 wherever float32 is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **given)


def test_a_mode_of_the_caller_does_not_change_what_is_known() -> None:
    """A call that is computed once more from memory has the type it had."""
    made, mode = Graph(), graphs.fake_mode()
    x = made.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(2, 2, dtype=torch.bool)
    with Widened():
        first, again = (graphs.call(made, aten.add.Tensor, 0.5, x) for _ in range(2))
    assert meta.tensor(first).dtype == meta.tensor(again).dtype == torch.float32


def test_the_types_of_the_surroundings_count() -> None:
    made, mode = Graph(), graphs.fake_mode()
    x = made.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(2, 2)
    kinds = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            kinds.append(meta.tensor(graphs.call(made, aten.mm.default, x, x)).dtype)
    assert kinds == [torch.float32, torch.bfloat16]


def test_equal_calls_on_run_time_sizes_have_their_own() -> None:
    """Rows of two layers: one call is computed, and the other one's result has the size of its own rows."""
    made, mode = Graph(), graphs.fake_mode()
    x = made.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(5, 3)
    rows = []
    for level in (0.0, 1.0):
        where = graphs.call(made, aten.nonzero.default, graphs.call(made, aten.gt.Scalar, x, level))
        rows.append(graphs.call(made, aten.select.int, where, 1, 0))
    found = [
        meta.tensor(graphs.call(made, aten.neg.default, graphs.call(made, aten.clone.default, row))) for row in rows
    ]
    assert [str(item.shape[0]) for item in found] == [str(meta.tensor(row).shape[0]) for row in rows]
    assert found[0].shape[0] is not found[1].shape[0] and str(found[0].shape[0]) != str(found[1].shape[0])
    assert len(vars(mode)["moecompile_known"]) == 5  # two comparisons with other constants, and each of the rest once


@pytest.mark.parametrize("seed", range(20))
def test_ancestors_beyond_is_the_difference_of_what_two_nodes_depend_on(seed: int) -> None:
    draw, made = random.Random(seed), Graph()
    nodes = [made.placeholder(f"x{at}") for at in range(3)]
    for _ in range(30):
        nodes.append(made.call_function(torch.add, tuple(draw.sample(nodes[-8:], 2))))
    made.output(tuple(nodes))
    for _ in range(30):
        end, start = draw.choice(nodes), draw.choice(nodes)
        wanted = {end, *graphs.ancestors(end)} - {start, *graphs.ancestors(start)}
        assert graphs.ancestors_beyond(end, start) == wanted


def test_nodes_behind_a_node(graph: Graph) -> None:
    names = by_name(graph)
    assert [node.name for node in graphs.behind(names["values"])] == ["indices", "relu", "output"]
    assert not list(graphs.behind(names["output"]))

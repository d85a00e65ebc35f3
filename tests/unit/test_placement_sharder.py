"""The sharder itself: conversions, what it refuses whatever a rule says, and parts that are made without the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.placement import table
from moecompile.placement.call import Call, Decision, Needs, NoRuleError, arguments, changed
from moecompile.placement.constants import constant_value, counts_up_along
from moecompile.placement.gather import differentiated
from moecompile.placement.types import PARTIAL, REPLICATE, Shard, parse, text
from tests.support.placement_check import check, fn_case, op_case, shard

aten = torch.ops.aten
drawn = torch.Generator().manual_seed(4)


def real(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=drawn)


def called(fn: Any, placed: list[str], *values: torch.Tensor, ranks: int = 2) -> list[Any]:
    """Targets of the local graph, dead code left out, after its meaning was checked."""
    case = fn_case(fn, *values)
    check(case, placed, ranks)
    graph = shard(case, [parse(item) for item in placed], ranks).graph
    graphs.eliminate_dead(graph)
    return [node for node in graph.nodes if node.op == "call_function"]


# ---- conversions -------------------------------------------------------------------------------------------------


def test_a_partial_value_is_summed_once_for_all_its_readers():
    """And where the value is made, not where it is first read."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x.sum(0)
        return y.exp() + total.exp() + total.sin()

    targets = [node.target for node in called(fn, ["S(0)", "R"], real(4), real(1))]
    assert targets[:2] == [aten.sum.dim_IntList, ops.all_reduce] and targets.count(ops.all_reduce) == 1


def test_a_whole_integer_is_shared_out_without_a_fraction():
    """Counting into a tensor that starts at 3: only one rank may add the 3."""
    count = lambda ids: torch.full((4,), 3).scatter_add(0, ids, torch.ones_like(ids))  # noqa: E731
    assert check(fn_case(count, torch.tensor([0, 1, 1, 3])), ["S(0)"]) == "P"
    assert (
        check(fn_case(lambda x, ids: x.index_add(0, ids, ids), torch.arange(4), torch.tensor([1, 1])), ["R", "S(0)"])
        == "P"
    )


def test_narrow_parts_are_added_in_float32():
    nodes = called(lambda x: x.sum(0).exp(), ["S(0)"], real(4, 3).bfloat16())
    (reduce,) = [node for node in nodes if node.target is ops.all_reduce]
    assert meta.tensor(reduce).dtype == torch.float32


def test_a_cut_that_would_have_to_move_is_refused():
    case = op_case(aten.addmm.default, (real(4, 4), real(4, 4), real(4, 4)))
    with pytest.raises(PassError, match=r"shard-dense: .*cut along different dims"):
        check(case, ["S(1)", "S(0)", "R"])


# ---- suspicions --------------------------------------------------------------------------------------------------


def with_rule(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    monkeypatch.setitem(table.RULES, aten.add.Tensor, rule)


def add(placed: list[str]) -> str:
    return check(op_case(aten.add.Tensor, (real(4), real(4))), placed)


def test_an_operand_that_a_rule_overlooks(monkeypatch):
    with_rule(monkeypatch, lambda call: Decision(call.placed(call.args[0])))
    with pytest.raises(PassError, match=r"its rule does not look at x2, which is S\(0\)"):
        add(["S(0)", "S(0)"])


def test_a_partial_sum_that_vanishes(monkeypatch):
    def rule(call: Call) -> Decision:
        assert call.partial()
        return Decision(REPLICATE)

    with_rule(monkeypatch, rule)
    with pytest.raises(PassError, match="its rule lets the partial sum x1 into a result that is not one"):
        add(["P", "R"])


def test_a_cut_that_leaves_no_trace(monkeypatch):
    def rule(call: Call) -> Decision:
        assert [call.placed(item) for item in call.args]
        return Decision(REPLICATE)

    with_rule(monkeypatch, rule)
    with pytest.raises(PassError, match="its rule gives a whole result although x1 is cut"):
        add(["S(0)", "R"])


def test_a_wrong_number_of_results(monkeypatch):
    with_rule(monkeypatch, lambda call: Decision([call.placed(item) for item in call.args]))
    with pytest.raises(PassError, match="its rule gives 2 placements for 1 results"):
        add(["S(0)", "S(0)"])


def test_a_local_call_of_another_shape(monkeypatch):
    """A claim that the emitted call does not live up to."""
    with_rule(monkeypatch, lambda call: Decision(Shard(0), call.reduced()))
    with pytest.raises(
        PassError, match=r"gives a local torch.float64\[4\] where the placement asks for torch.float64\[2\]"
    ):
        add(["P", "R"])


# ---- refused whatever the placements -----------------------------------------------------------------------------


def test_an_op_without_a_rule_is_refused_only_if_it_meets_a_cut_or_a_sum():
    case = op_case(aten.erfinv.default, (real(4).tanh(),))
    assert check(case, ["S(0)"]) == "S(0)"  # torch's own tag says that it is elementwise
    unknown = op_case(aten.trace.default, (real(4, 4),))
    assert check(unknown, ["R"]) == "R"
    for placed in ("S(0)", "P"):
        with pytest.raises(
            PassError,
            match=r"aten.trace.default on operands x1: .*: there is no placement rule for it on dp; add one to",
        ):
            check(unknown, [placed])
        assert check(unknown, [placed], strict=False) == "R"


# ---- gathered ----------------------------------------------------------------------------------------------------


def gathered(fn: Any, placed: list[str], *values: torch.Tensor, ranks: int = 2) -> tuple[list[Any], list[Any]]:
    """Targets of the local graph without dead code, and the records, after the meaning was checked."""
    case = fn_case(fn, *values)
    check(case, placed, ranks, strict=False)
    walk = shard(case, [parse(item) for item in placed], ranks, strict=False)
    walk.drop_dead()
    return [node.target for node in walk.graph.nodes if node.op == "call_function"], walk.ledger.gathers(walk.graph)


def test_what_no_rule_places_is_gathered_and_recorded():
    targets, (record,) = gathered(lambda x: x.sort(0).values, ["S(0)"], real(8, 3), ranks=4)
    assert targets[:2] == [ops.all_gather, aten.sort.default]
    assert (record.op, record.axis, record.bytes) == ("aten.sort.default", "dp", 2 * 3 * 8)
    assert record.reason.startswith("it runs along the batch")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("placed", ["S(0)", "S(0,outer=2)", "S(1)", "S(2)"])
def test_gathered_parts_stand_where_they_belong(placed, ranks):
    numbers = real(8, 4, 8)
    for value in (numbers, numbers > 0, (10 * numbers).int(), torch.complex(numbers, 2 * numbers)):
        case = op_case(aten.flip.default, (value, [0, 1, 2]))
        assert check(case, [placed], ranks, strict=False) == placed


def test_a_partial_sum_is_completed_for_an_op_without_a_rule():
    targets, (record,) = gathered(lambda x: torch.trace(x.sum(0)), ["S(0)"], real(4, 3, 3))
    assert targets == [aten.sum.dim_IntList, ops.all_reduce, aten.trace.default] and record.bytes == 9 * 8


def test_one_gather_serves_all_readers():
    """The second line moves nothing, and says so."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + x.flip(0) + x.roll(1, 0)

    targets, records = gathered(fn, ["S(0)"], real(8, 3), ranks=4)
    assert targets.count(ops.all_gather) == 1 and targets.count(ops.local_slice) == 2
    assert [record.bytes for record in records] == [48, 0]


def test_a_result_is_cut_again_and_still_known_whole():
    """Nothing moves twice although the first result is cut for its other reader."""
    chain = lambda x: (lambda y: (y.roll(1, 0), y + x))(x.flip(0))  # noqa: E731
    targets, records = gathered(chain, ["S(0)"], real(8, 3), ranks=4)
    assert targets.count(ops.all_gather) == 1 and [record.bytes for record in records] == [48, 0]


def test_constants_are_made_whole_and_not_gathered():
    targets, _ = gathered(lambda x: torch.full_like(x, 3.0).flip(0) + torch.zeros_like(x).roll(1, 0), ["S(0)"], real(4))
    assert ops.all_gather not in targets and aten.new_full.default in targets


def test_work_is_shared_again_after_a_gather():
    """What follows a gathered op is done in parts where only parts are wanted, and not twice where the whole is wanted, too."""
    shift = lambda x, w: (x.repeat(2, 1)[1:9] @ w).exp()  # noqa: E731
    targets, _ = gathered(lambda x, w: x + shift(x, w), ["S(0)", "R"], real(8, 3), real(3, 3), ranks=4)
    assert targets.index(ops.local_slice) < targets.index(aten.matmul.default)
    both = lambda x, w: (lambda y: (x + y, y.sum()))(shift(x, w))  # noqa: E731
    targets, _ = gathered(both, ["S(0)", "R"], real(8, 3), real(3, 3), ranks=4)
    assert targets.count(aten.matmul.default) == 1 and targets.count(ops.local_slice) == 1


def test_a_gather_that_nobody_reads_is_not_recorded():
    case = fn_case(lambda x: (x.flip(0), x.exp()), real(4))
    walk = shard(case, [Shard(0)], 2, strict=False)
    assert len(walk.ledger.gathers(walk.graph)) == 1
    (_, read), output = walk.graph.output_node().args[0], walk.graph.output_node()
    output.args = ((read,),)
    walk.drop_dead()
    assert walk.ledger.gathers(walk.graph) == []


def test_rows_of_experts_are_never_gathered():
    """Their order is each rank's own."""
    rows = lambda x, ids: ops.permute(x, ids, 4)[0].flip(0)  # noqa: E731
    case = fn_case(rows, real(4, 3), torch.tensor([[0], [1], [1], [3]]))
    with pytest.raises(PassError, match="it runs along the batch, which is spread over ranks") as found:
        check(case, ["S(0)", "S(0)"], strict=False)
    assert "strict" not in str(found.value)


def test_a_call_that_cannot_be_emitted_is_gathered(monkeypatch):
    """An emitter may see what its rule did not."""

    def emitter(walk: Any, node: Any, decisions: Any) -> None:
        if any(isinstance(walk.given(node.args[0], axis, decisions), Shard) for axis in walk.axes):
            raise NoRuleError("this cannot be written down.")

    monkeypatch.setitem(table.EMITTERS, aten.exp.default, emitter)
    case = op_case(aten.exp.default, (real(4),))
    assert check(case, ["S(0)"], strict=False) == "S(0)"
    with pytest.raises(PassError, match="this cannot be written down; or leave strict=True out"):
        check(case, ["S(0)"])


@pytest.mark.parametrize(
    ("fn", "flows"),
    [(lambda x: x.sort(0)[0], True), (lambda x: x.sort(0)[1] * 1.0, False), (lambda x: x.detach().sort(0)[0], False)],
)
def test_what_the_gradient_moves_is_counted(fn, flows):
    """Only where one flows: not to a choice of indices, nor into what is detached."""
    case = fn_case(fn, real(4, 3))
    walk = table.sharder(case.graph, {"dp": 2}, case.mode)
    leaf, *_, output = case.graph.nodes
    walk.ledger.differentiated = differentiated(case.graph, [leaf], output.args[0])
    walk.add_placeholder(leaf, {"dp": Shard(0)})
    for node in graphs.find(case.graph, *{node.target for node in case.graph.nodes}):
        walk.visit(node)
    (record,) = walk.ledger.gathers(walk.graph)
    assert (record.bytes, record.grad_bytes) == (48, 96 if flows else 0)
    assert str(record).endswith(f": {48 + 96 * flows} B per step over dp")
    assert record.times(3).step_bytes == 3 * record.step_bytes and record.forward_only().step_bytes == 48


# ---- refused though not strict -----------------------------------------------------------------------------------


def test_writes_in_place_are_refused():
    case = op_case(aten.add.Tensor, (real(4), real(4)))
    (node,) = [node for node in case.graph.nodes if node.op == "call_function"]
    node.target = aten.add_.Tensor
    for strict in (False, True):
        with pytest.raises(PassError, match=r"writes into its operand; .* use the functional form"):
            check(case, ["S(0)", "S(0)"], strict=strict)


def test_a_list_is_read_piece_by_piece():
    case = fn_case(lambda x: torch.cat(x.chunk(2, 1)), real(4, 4))
    check(case, ["S(0)"])
    (cat,) = graphs.find(case.graph, aten.cat.default)
    cat.args = (cat.args[0][0].args[0],)
    with pytest.raises(PassError, match=r"reads all results of .* at once"):
        shard(case, [Shard(0)], 2)


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.rand_like.default, (real(4),)), (aten.dropout.default, (real(4), 0.5, True)), (aten.bernoulli.p, (real(4), 0.5)),
     (aten.scaled_dot_product_attention.default, (real(2, 3, 4), real(2, 3, 4), real(2, 3, 4), None, 0.1))],
)  # fmt: skip
def test_random_draws_are_refused_even_where_nothing_is_cut(op, args):
    case = op_case(op, args)
    for strict in (False, True):
        with pytest.raises(PassError, match="random numbers would differ from those of one process"):
            check(case, ["R"] * len(case.values), strict=strict)


def test_a_batch_that_the_ranks_do_not_divide():
    case = op_case(aten.exp.default, (real(6),))
    with pytest.raises(
        PassError, match="dim 0 of size 6 cannot be cut into 4 equal parts; choose a batch that the ranks divide"
    ):
        shard(case, [Shard(0)], 4)


def test_one_value_in_two_cuts():
    """The same whole matrix with the cut label once in its rows and once in its columns."""
    whole = real(4, 4)
    case = fn_case(lambda x, w: torch.einsum("a,ab,ba->b", x, w, w), real(4), whole)
    with pytest.raises(PassError, match="is read twice in ways that need different cuts"):
        check(case, ["S(0)", "R"])
    needs = Needs()
    node = next(iter(case.graph.nodes))
    needs.want(node, PARTIAL)
    with pytest.raises(NoRuleError):
        needs.want(node, REPLICATE)


# ---- parts without the whole -------------------------------------------------------------------------------------


def largest(nodes: list[Any]) -> int:
    return max(meta.tensor(node).numel() for node in nodes if meta.is_tensor(node))


def test_a_fresh_tensor_is_made_for_this_rank_only():
    nodes = called(lambda x: torch.zeros(8, 3, dtype=x.dtype) + x, ["S(0)"], real(8, 3), ranks=4)
    assert largest(nodes) == 6 and ops.local_slice not in [node.target for node in nodes]


def test_a_broadcast_mask_is_made_for_this_rank_only():
    def masked(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(3)
        mask = (at[None, :] <= at[:, None])[None, None].expand(8, 1, 3, 3)
        return x.masked_fill(~mask, 0.0)

    nodes = called(masked, ["S(0)"], real(8, 2, 3, 3), ranks=4)
    assert largest(nodes) == 2 * 2 * 9 and ops.local_slice not in [node.target for node in nodes]


def test_positions_are_cut_where_they_begin():
    """Through views, products and trigonometry back to the vector of numbers."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        angles = (torch.arange(8)[:, None].to(x.dtype) * torch.arange(3)).unflatten(0, (2, 4)).flatten(0, 1)
        return x * torch.cat([angles.cos(), angles.sin()], -1)

    nodes = called(turn, ["S(0)"], real(8, 6), ranks=2)
    (cut,) = [node for node in nodes if node.target is ops.local_slice]
    assert cut.args[0].target is aten.arange.default
    assert largest(nodes) == 4 * 6


def test_in_blocks():
    """Two layers end to end meet one whole vector as long as both."""
    both = lambda x: torch.cat([x, x * 2]) * torch.arange(8)  # noqa: E731
    assert check(fn_case(both, real(4)), ["S(0)"]) == "S(0,outer=2)"


# ---- small parts -------------------------------------------------------------------------------------------------


def test_arguments_by_name():
    case = op_case(aten.sum.dim_IntList, (real(4, 3), [0]), {"dtype": torch.float32})
    node = next(node for node in case.graph.nodes if node.op == "call_function")
    found = arguments(node)
    assert (found["dim"], found["keepdim"], found["dtype"]) == ([0], False, torch.float32)
    args, kwargs = changed(node, dim=[1], dtype=None)
    assert (args[1], kwargs) == ([1], {"dtype": None})


def test_constants_are_worked_out():
    case = fn_case(lambda x: x + (torch.arange(4)[:, None] + 0).expand(4, 3), real(4, 3))
    nodes = {node.target: node for node in case.graph.nodes if node.op == "call_function"}
    assert torch.equal(constant_value(nodes[aten.expand.default]), torch.arange(4)[:, None].expand(4, 3))
    assert counts_up_along(nodes[aten.expand.default], 4) == 0
    assert counts_up_along(nodes[aten.expand.default], 3) is None
    assert constant_value(next(node for node in case.graph.nodes if node.op == "placeholder")) is None


def test_texts():
    assert text({"dp": Shard(1, 2), "ep": PARTIAL, "tp": REPLICATE}) == "S(1,outer=2)@dp P@ep"
    assert text({}) == "R"
    assert parse("V") == Shard(0, rows=True)

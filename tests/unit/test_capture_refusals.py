"""What a graph cannot express is refused in one sentence with the user's line, and leaves the model as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from moecompile.capture import capture_model
from moecompile.errors import CaptureError
from tests.support.captured_call import targets


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(4))
        self.table = torch.ones(4)
        self.register_buffer("more", torch.zeros(4))
        self.register_buffer("shared", self.linear.bias.data[:2])
        self.register_buffer("listed", torch.ones(4))
        self.average = nn.BatchNorm1d(4, momentum=None)
        self.cache: list[Tensor] = [torch.zeros(4), self.listed]

    def forward(self, x: Tensor, body: Callable[[Any, Tensor], Any]) -> Any:
        return body(self, x)


class Model(nn.Module):
    """The faulty code sits in a submodule, where export would not notice."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner = Inner()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, self.body)


def buffer_of_another_shape(self: Any, x: Tensor) -> Tensor:
    self.steps = self.linear(x)
    return self.linear(x)


def buffer_of_another_type(self: Any, x: Tensor) -> Tensor:
    self.steps = self.steps.double()
    return self.linear(x)


def buffer_gone(self: Any, x: Tensor) -> Tensor:
    self.steps = None
    return self.linear(x)


def buffer_follows_a_parameter(self: Any, x: Tensor) -> Tensor:
    self.steps = self.linear.bias.detach()
    return self.linear(x)


def buffers_become_one(self: Any, x: Tensor) -> Tensor:
    self.steps = self.more = self.steps + x.sum(0)
    return self.linear(x)


def buffer_data(self: Any, x: Tensor) -> Tensor:
    self.steps.data = self.steps.data * 2
    return self.linear(x)


def buffer_resized(self: Any, x: Tensor) -> Tensor:
    self.steps.resize_(2)
    return self.linear(x)


def buffer_with_a_gradient(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.linear(x) - self.steps
    self.steps.mul_(0.9).add_(out.mean(0))
    return out


def buffer_of_a_parameter(self: Any, x: Tensor) -> Tensor:
    self.shared.mul_(2)
    return self.linear(x)


def buffer_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.listed.mul_(2)
    return self.linear(x) * self.cache[-1]


def buffers_at_once(self: Any, x: Tensor) -> Tensor:
    torch._foreach_add_([self.steps, self.more], 1)
    return self.linear(x)


def buffer_of_the_mean_so_far(self: Any, x: Tensor) -> Tensor:
    """Its momentum is one over the number of calls."""
    found: Tensor = self.average(self.linear(x))
    return found


def buffer_registered(self: Any, x: Tensor) -> Tensor:
    self.register_buffer("late", x.sum(0))
    return self.linear(x)


def buffer_as_out(self: Any, x: Tensor) -> Tensor:
    torch.add(self.linear(x)[0], 1, out=self.steps)
    return x


def attribute_carried(self: Any, x: Tensor) -> Tensor:
    before = getattr(self, "last", 0)
    self.last = self.linear(x)
    return self.last + before


def attribute_added_to(self: Any, x: Tensor) -> Tensor:
    self.table = self.table + self.linear(x)
    return self.table


def attribute_moved(self: Any, x: Tensor) -> Tensor:
    self.linear.to(torch.float64)
    return self.linear(x)


def transformed(self: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: self.linear(y).sum())(x)


def map_over_many(self: Any, x: Tensor) -> Tensor:
    return torch.vmap(self.linear)(x.repeat(1000, 1))


def attribute_in_list(self: Any, x: Tensor) -> Tensor:
    self.cache[0] = self.linear(x)
    return self.cache[0]


def attribute_in_place(self: Any, x: Tensor) -> Tensor:
    self.table.mul_(2)
    return self.linear(x) + self.table


def parameter_in_place(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.mul_(0.9)
    return self.linear(x)


def parameter_data(self: Any, x: Tensor) -> Tensor:
    self.linear.weight.data = self.linear.weight.data * 2
    return self.linear(x)


def input_in_place(self: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return self.linear(x)


def branch_on_value(self: Any, x: Tensor) -> Tensor:
    return x if self.linear(x).sum() > 0 else x * 2


def loop_over_rows(self: Any, x: Tensor) -> Tensor:
    for _ in (x.sum(-1) > 0).nonzero():
        pass
    return self.linear(x)


def item(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * x.sum().item()


def as_float(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * float(x.mean())


def list_of_values(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * sum(x[0].tolist())


def prints_values(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    print(y.sum())
    return y


def formats(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.note = f"mean {y.mean()}"
    return y


_LIBRARY = torch.library.Library("moecompile_test", "DEF")
_LIBRARY.define("elsewhere(Tensor x) -> Tensor")
_LIBRARY.impl("elsewhere", lambda x: x * 2, "CUDA")
torch.library.register_fake("moecompile_test::elsewhere", torch.empty_like, lib=_LIBRARY)
_LIBRARY.define("shapeless(Tensor x) -> Tensor")
_LIBRARY.impl("shapeless", lambda x: x * 2, "CUDA")


def kernel_of_another_device(self: Any, x: Tensor) -> Tensor:
    found: Tensor = torch.ops.moecompile_test.elsewhere(self.linear(x))
    return found


def kernel_without_a_shape(self: Any, x: Tensor) -> Tensor:
    found: Tensor = torch.ops.moecompile_test.shapeless(self.linear(x))
    return found


def memory_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    """What a call into a C or Triton kernel begins with."""
    return self.linear(x) * (1 if self.linear(x).data_ptr() else 2)


def hooked(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.linear(x)
    if out.requires_grad:
        out.register_hook(lambda grad: grad * 2)
    return out


def broken(self: Any, x: Tensor) -> Tensor:
    return self.linear(x[:, :3])


REFUSED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (buffer_of_another_shape, r"assigns to buffer 'steps' of inner .*of shape \(3, 4\), where it held.*keep its shape"),
    (buffer_of_another_type, "assigns to buffer 'steps' of inner a torch.float64 tensor.*keep its shape and type"),
    (buffer_gone, "to buffer 'steps' of inner.*update it outside forward"),
    (buffer_follows_a_parameter, r"the memory of parameter 'inner.linear.bias'.*assign a clone\(\) of it"),
    (buffers_become_one, r"the same memory as buffer 'inner.steps'.*assign a clone\(\) of it"),
    (buffer_data, r"writes into buffer 'inner.steps' \(__set__\).*outside forward"),
    (buffer_resized, r"writes into buffer 'inner.steps' \(resize_\).*outside forward"),
    (
        buffer_with_a_gradient,
        r"buffer 'inner.steps' a value that carries a gradient, and reads.*detach\(\) what is written",
    ),
    (
        buffer_of_a_parameter,
        "writes into buffer 'inner.shared', which shares memory with parameter 'inner.linear.bias'",
    ),
    (buffer_in_a_list, "writes into buffer 'inner.listed', which shares memory with attribute 'inner.cache'.*outside"),
    (buffers_at_once, "_foreach_add_.* writes into several tensors at once; write into each of them"),
    (buffer_of_the_mean_so_far, "depends on tensor values.*torch.where"),
    (buffer_registered, "assigns a tensor to attribute 'late' of inner.*outside forward"),
    (buffer_as_out, "writes into buffer 'inner.steps'.*outside forward"),
    (attribute_carried, "assigns a tensor to attribute 'last' of inner that was there before.*return the tensor"),
    (attribute_added_to, "assigns a tensor to attribute 'table' of inner that was there before.*return the tensor"),
    (attribute_moved, "moves or casts inner.linear.*before the model is parallelized"),
    (transformed, "derivative with torch.func.*write the derivative out"),
    (map_over_many, "vmap maps over 3000 entries.*write the batched operation out"),
    (attribute_in_list, "assigns a tensor to attribute 'cache' of inner.*return the tensor"),
    (attribute_in_place, "writes into attribute 'inner.table'.*outside forward"),
    (parameter_in_place, "writes into parameter 'inner.linear.weight'.*outside forward"),
    (parameter_data, "writes into parameter 'inner.linear.weight'.*outside forward"),
    (input_in_place, "writes into one of its inputs.*compute a new tensor"),
    (branch_on_value, "depends on tensor values.*torch.where"),
    (loop_over_rows, "depends on tensor values.*torch.where"),
    (item, "reads a number out of a tensor.*keep it a tensor"),
    (as_float, "depends on tensor values.*torch.where"),
    (list_of_values, "reads a number out of a tensor.*keep it a tensor"),
    (prints_values, "prints a tensor or makes text of it.*return the tensor"),
    (formats, "prints a tensor or makes text of it.*return the tensor"),
    (kernel_of_another_device, "moecompile_test.elsewhere.default has no kernel for cpu.*move model and batch"),
    (kernel_without_a_shape, "moecompile_test.shapeless.default says nothing of the shape.*register_fake.*mark_moe"),
    (hooked, "hooks the gradient of a tensor \\(register_hook\\).*autograd.Function"),
    (memory_of_a_tensor, "stopped with RuntimeError.*report what it uses"),
    (broken, "stopped with RuntimeError.*check that the plain model runs"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[body.__name__ for body, _ in REFUSED])
def test_refused_with_line_and_advice(body: Callable[[Any, Tensor], Any], message: str) -> None:
    model = Model(body)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError, match=message) as caught:
        capture_model(model, (torch.ones(3, 4),), {})
    text = str(caught.value)
    assert "test_capture_refusals.py:" in text and "\n" not in text
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[name], state[name]) for name in state)
    assert type(model.inner.linear.weight) is nn.Parameter and torch.equal(model.inner.table, torch.ones(4))


def test_line_of_the_fault_is_named() -> None:
    line = item.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=f"test_capture_refusals.py:{line}: "):
        capture_model(Model(item), (torch.ones(3, 4),), {})


@pytest.mark.parametrize("line", ["x.sum().item()", "x if x.sum() > 0 else -x", "x + len(str(x))", "x + next(numbers)"])
def test_code_without_a_file_is_looked_at_alike(line: str) -> None:
    """As typed at a prompt, piped in or executed as text."""
    names: dict[str, Any] = {"numbers": itertools.count(), "__name__": "__main__"}
    exec(f"def body(self, x):\n    return {line}", names)
    with pytest.raises(CaptureError, match=r"<string>:\d"):
        capture_model(Model(names["body"]), (torch.ones(3, 4),), {})


def test_nothing_is_printed_by_torch(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture_model(Model(branch_on_value), (torch.ones(3, 4),), {})
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_patches_are_taken_back_after_a_refusal() -> None:
    setattr_before, apply_before = nn.Module.__setattr__, torch.autograd.Function.__dict__["apply"]
    apply_to_all = nn.Module._apply
    with pytest.raises(CaptureError):
        capture_model(Model(attribute_carried), (torch.ones(3, 4),), {})
    assert nn.Module.__setattr__ is setattr_before and nn.Module._apply is apply_to_all
    assert nn.Module.__getattribute__ is object.__getattribute__
    assert float(torch.vmap(torch.sum)(torch.ones(3, 2))[1]) == 2.0
    assert torch.autograd.Function.__dict__["apply"] is apply_before
    assert float(Doubled.apply(torch.ones(()))) == 2.0


def prints(self: Any, x: Tensor) -> Tensor:
    print("shape", x.shape, x.dtype)
    return self.linear(x)


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


def counts_calls(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.linear(x)


def counts_in_two_lines(self: Any, x: Tensor) -> Tensor:
    before = getattr(self, "calls", 0)
    self.calls = 1 + before
    self.seconds = getattr(self, "seconds", 0.0) + 0.5
    return self.linear(x)


HARMLESS = [prints, checkpointed, counts_calls, counts_in_two_lines]


@pytest.mark.parametrize("body", HARMLESS, ids=lambda body: body.__name__)
def test_harmless_code_is_captured(body: Callable[[Any, Tensor], Any]) -> None:
    assert targets(capture_model(Model(body), (torch.ones(3, 4),), {})) == ["aten.linear.default"]


def _called(self: Any) -> int:
    before: int = getattr(self, "calls", 0)
    self.calls = before + 1
    return before


def late_branch(self: Any, x: Tensor) -> Tensor:
    """Nothing changes before the sixth call; the attribute is read as often as it is written."""
    return self.linear(x) * 2 if _called(self) > 5 else self.linear(x)


def late_difference(self: Any, x: Tensor) -> Tensor:
    left = 5 - _called(self)
    return self.linear(x) * 2 if left < 0 else self.linear(x)


def every_tenth(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if (_called(self) + 3) % 10 else x


def by_table(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * {100: 2.0, 200: 3.0}.get(_called(self), 1.0)


def by_membership(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if _called(self) not in (100, 200) else x


def cut_off(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * max(1, _called(self) - 50)


def warm_up(self: Any, x: Tensor) -> Tensor:
    self.passed = getattr(self, "passed", 0.0) + 0.25
    return self.linear(x) if self.passed < 3 else x


def behind_the_watch(self: Any, x: Tensor) -> Tensor:
    """Not through an assignment that can be seen."""
    vars(self)["calls"] = vars(self).get("calls", 0) + 1
    return self.linear(x) if vars(self)["calls"] < 7 else x


LATE = [late_branch, late_difference, every_tenth, by_table, by_membership, cut_off, warm_up, behind_the_watch]


@pytest.mark.parametrize("body", LATE, ids=lambda body: body.__name__)
def test_a_number_that_changes_and_is_used_is_refused(body: Callable[[Any, Tensor], Any]) -> None:
    """Although the first calls all have the same graph."""
    model = Model(body)
    with pytest.raises(
        CaptureError, match=r"test_capture_refusals.py:\d+: the forward changes attribute .*as an argument"
    ):
        capture_model(model, (torch.ones(3, 4),), {})
    assert not hasattr(model.inner, "calls") and not hasattr(model.inner, "passed")


def test_a_counter_that_only_counts_keeps_its_type() -> None:
    model = Model(counts_in_two_lines)
    capture_model(model, (torch.ones(3, 4),), {})
    assert type(vars(model.inner).get("calls", 0)) is int and type(vars(model.inner).get("seconds", 0.0)) is float


def test_a_refusal_leaves_attributes_as_they_were() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        self.late, self.cache = self.linear(x), [self.linear(x)]
        return x if x.sum() > 0 else self.late

    model = Model(body)
    before = model.inner.cache
    with pytest.raises(CaptureError):
        capture_model(model, (torch.ones(3, 4),), {})
    assert not hasattr(model.inner, "late") and model.inner.cache is before


def test_a_forward_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns no tensor"):
        capture_model(Model(lambda self, x: 3), (torch.ones(3, 4),), {})


def test_a_returned_object_that_hides_tensors_is_refused() -> None:
    class Holder:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    with pytest.raises(CaptureError, match=r"Holder that holds tensors.*use_cache=False"):
        capture_model(Model(lambda self, x: (self.linear(x), Holder(x))), (torch.ones(3, 4),), {})

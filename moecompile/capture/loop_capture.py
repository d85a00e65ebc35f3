"""Make the classical per-expert Python loops traceable.

A plain MoE layer asks questions that no tracer can answer: which experts were hit, does this expert have a token, how
many.  While `LoopCapture` is active, the answer is the one that makes the loop visit every expert: a hit list is
`0..E-1`, an expert is not empty, a count is a symbol.  The unrolled loop is right for an expert without tokens, too, as
long as its body works row by row; the pass that recognises the layer proves that.

Only tensors that come from a routing decision are answered for: outputs of `topk`, `argmax`, `sort` of floating scores
and what is computed from them.  Every other data-dependent question is left to torch, which refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moecompile.capture.asserts import outcome_of_assert
from moecompile.capture.counts import Counts, HostNumbers, rows_between
from moecompile.capture.stock import REPLACED, columns_of_rows, written
from moecompile.capture.where import current_line
from moecompile.compat import pretend_at_least
from moecompile.errors import CaptureError

# Results of these keep the meaning of their first argument, whatever its dtype.
_KEEPING = frozenset(
    [
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "long",
        "int",
        "bool",
        "clone",
        "contiguous",
        "detach",
        "cpu",
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "permute",
        "transpose",
        "t",
        "select",
        "narrow",
        "__getitem__",
        "sum",
        "sum_to_size",
        "cumsum",
    ]
)
_SCATTERS = frozenset(["scatter", "scatter_", "scatter_add", "scatter_add_"])
_PRODUCTS = frozenset(["mul", "multiply", "__mul__", "__rmul__", "where"])
_GATHERS = frozenset(["__getitem__", "index_select", "gather", "take", "take_along_dim"])
# Results of these have the sum of their first argument.
_SUM_KEEPING = frozenset(
    ["to", "float", "long", "int", "clone", "contiguous", "detach", "cpu", "view", "reshape", "flatten", "squeeze",
     "unsqueeze", "permute", "transpose", "t", "sum"]
)  # fmt: skip
_COUNTERS = frozenset(["sum", "count_nonzero", "bincount", "histc", "cumsum"])
_RESHAPES = frozenset(
    ["view", "reshape", "flatten", "squeeze", "to", "long", "int", "cpu", "clone", "contiguous", "detach"]
)
_ACCUMULATORS = frozenset(["index_add", "index_add_", "index_put", "index_put_", "index_copy", "index_copy_"])
# Comparison of a count with a constant -> the outcome for a count that is positive, where that decides it.
_OUTCOMES: dict[tuple[str, int], bool] = {
    ("eq", 0): False,
    ("ne", 0): True,
    ("gt", 0): True,
    ("le", 0): False,
    ("ge", 1): True,
    ("lt", 1): False,
}
_COMPARISONS = {"greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le", "not_equal": "ne"}


@dataclass(frozen=True)
class Routing:
    """What a tensor inherited from its routing decision.

    ``counted`` marks numbers of tokens, as against expert ids; together they are ``total``, where that is known.
    """

    num_experts: int
    top_k: int
    counted: bool = False
    total: int | None = None


class _TensorTable:
    """A dictionary keyed by tensor identity that keeps its keys alive."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[torch.Tensor, Any]] = {}

    def get(self, key: Any) -> Any:
        found = self._items.get(id(key))
        return None if found is None else found[1]

    def set(self, key: torch.Tensor, value: Any) -> None:
        self._items[id(key)] = (key, value)


class LoopCapture(TorchFunctionMode):
    """Answer the questions of per-expert loops so that they unroll over every expert; see the module text.

    `CaptureError` where the model reads a number out of a tensor (`item`, `int()`, `tolist`) that is no routing count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._routing = _TensorTable()  # tensor -> Routing it was computed from
        self._flags = _TensorTable()  # 0-d tensor -> "count", or the answer to bool()
        self._counts = Counts()
        self._zeros = _TensorTable()  # tensors that are zero everywhere
        self._distinct = _TensorTable()  # ids that topk gave
        self._hits = _TensorTable()  # list of the experts hit -> how many experts are visited
        self._handlers: dict[str, Callable[..., Any]] = {
            "any": self._reduction,
            "sum": self._reduction,
            "count_nonzero": self._reduction,
            "logical_not": self._negation,
            "__bool__": self._truth,
            "bincount": self._bincount,
            "nonzero": self._nonzero,
            "argwhere": self._nonzero,
            "where": self._where,
            "unique": self._unique,
            "split": self._split,
            "split_with_sizes": self._split,
            "unbind": self._visit,
            "__iter__": self._visit,
            "__getitem__": self._part,
            "cumsum": self._running_sum,
            "tolist": self._tolist,
            "numpy": self._tolist,
            "item": self._number,
            "__int__": self._number,
            "__index__": self._number,
            "__float__": self._number,
            "topk": self._choice,
            "argmax": self._choice,
            "argsort": self._choice,
            "sort": self._choice,
            "max": self._choice,
            **REPLACED,
        }

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("out"), torch.Tensor):
            return written(func, lambda **rest: self.__torch_function__(func, types, args, rest), args, kwargs)
        name = getattr(func, "__name__", "")
        key = name.strip("_") if name.startswith("__") else name
        if (_COMPARISONS.get(key, key), 0) in _OUTCOMES or (_COMPARISONS.get(key, key), 1) in _OUTCOMES:
            out = self._comparison(_COMPARISONS.get(key, key), func, args, kwargs)
        else:
            handler = self._handlers.get(name)
            out = handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)
        if name in ("zeros", "new_zeros", "zeros_like"):
            self._zeros.set(out, True)
        self._inherit(name, args, kwargs, out)
        return out

    # Provenance --------------------------------------------------------------------------------------------------

    def _choice(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A choice among floating scores is where routing starts."""
        out = func(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or scores.dim() == 0:
            return out
        second = args[1] if len(args) > 1 and isinstance(args[1], int) else None
        name = getattr(func, "__name__", "")
        dim = kwargs.get("dim", -1 if name in ("topk", "argsort", "sort") else second)
        if not isinstance(dim, int) or not isinstance(scores.shape[dim], int):
            return out
        top_k = kwargs.get("k", second) if name == "topk" else 1
        for item in out if isinstance(out, tuple) else (out,):
            if isinstance(item, torch.Tensor) and not item.is_floating_point():
                self._routing.set(item, Routing(int(scores.shape[dim]), int(top_k or 1)))
                self._distinct.set(item, name == "topk")
        return out

    def _inherit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Results computed from routing tensors are routing tensors: masks, counts, positions, dispatch matrices."""
        if name in _ACCUMULATORS:
            return
        outs = [item for item in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(item, torch.Tensor)]
        if not outs:
            return
        operands = args[:1] if name in _GATHERS or name in _KEEPING else [*args, *kwargs.values()]
        flat = [part for item in operands for part in (item if isinstance(item, (tuple, list)) else (item,))]
        found = [routing for part in flat if (routing := self._routing.get(part)) is not None]
        if not found:
            return
        total = self._total(name, args, found[0])
        routing = replace(found[0], counted=found[0].counted or name in _COUNTERS, total=total)
        discrete = any(
            self._routing.get(part) is not None and not part.is_floating_point()
            for part in flat
            if isinstance(part, torch.Tensor)
        )
        for item in outs:
            known = self._routing.get(item) is not None and not name.endswith("_")  # in place: it has changed
            if not known and self._passes_on(name, args, item, routing, discrete):
                self._routing.set(item, routing)
            if name in _RESHAPES and item.dim() in (1, 2) and (visited := self._hits.get(args[0])) is not None:
                self._hits.set(item, visited)

    def _total(self, name: str, args: tuple[Any, ...], routing: Routing) -> int | None:
        """The sum over all elements of a result: each choice counts once in a one-hot, a histogram, a scattered one."""
        if name in ("one_hot", "bincount", "histc") and not routing.counted:
            return int(args[0].numel()) if isinstance(args[0].numel(), int) else None
        if name in ("scatter", "scatter_") and len(args) > 3:
            one = isinstance(args[3], (int, float)) and args[3] == 1 and args[2].dim() == 2 and args[1] in (1, -1)
            return int(args[2].numel()) if one and self._zeros.get(args[0]) and self._is_distinct(args[2]) else None
        return routing.total if name in _SUM_KEEPING else None

    def _is_distinct(self, ids: torch.Tensor) -> bool:
        """Whether no row names an expert twice: the ids as topk gave them."""
        return self._distinct.get(ids) is True

    @staticmethod
    def _passes_on(name: str, args: tuple[Any, ...], out: torch.Tensor, routing: Routing, discrete: bool) -> bool:
        """Discrete results always inherit; floating ones only where they still are a mask, never an activation."""
        if not out.is_floating_point():
            return discrete or out.dtype == torch.bool or name in _KEEPING
        if name in _SCATTERS:
            return out.dim() > 0 and out.shape[-1] == routing.num_experts
        if name in _PRODUCTS:
            last = [item.shape[-1] for item in args if isinstance(item, torch.Tensor) and item.dim() > 0]
            return all(size in (1, routing.top_k, routing.num_experts) for size in last)
        return name in _KEEPING

    # "Does this expert have a token?": yes -----------------------------------------------------------------------

    def _reduction(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.dim() == 0 and self._routing.get(args[0]) is not None:
            self._flags.set(out, True if func.__name__ == "any" else "count")
        return out

    def _comparison(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if len(args) == 2 and isinstance(args[1], (int, float)) and isinstance(out, torch.Tensor) and out.dim() == 0:
            counted = self._flags.get(args[0]) == "count" or self._is_count(args[0])
            outcome = _OUTCOMES.get((name, int(args[1]))) if counted else None
            if outcome is not None:
                self._flags.set(out, outcome)
        return out

    def _is_count(self, tensor: Any) -> bool:
        """A 0-d integer that is no constant: an element of the counts per expert."""
        routing = self._routing.get(tensor)
        return routing is not None and routing.counted and tensor.dim() == 0 and tensor.dtype != torch.bool

    def _negation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        answer = self._flags.get(args[0])
        if isinstance(answer, bool):
            self._flags.set(out, not answer)
        return out

    def _truth(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asserted = outcome_of_assert()
        answer = self._flags.get(args[0]) if asserted is None else asserted
        if answer is None:
            return func(*args, **kwargs)
        return True if answer == "count" else answer

    # "Which rows?": a symbol, taken to be neither 0 nor 1 --------------------------------------------------------

    def _nonzero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        routing = self._routing.get(args[0])
        if routing is None:
            return columns_of_rows(func, args, kwargs)
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        for item in out if isinstance(out, tuple) else (out,):
            pretend_at_least(item.shape, 2)
        # A mask over the experts lists the experts hit; some models keep one bin more for "no expert".
        if args[0].dim() == 1 and args[0].shape[0] in (routing.num_experts, routing.num_experts + 1):
            self._hits.set(first, routing.num_experts)
        return out

    def _where(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and not kwargs:
            return self._nonzero(func, args, kwargs)
        return func(*args, **kwargs)

    def _unique(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        routing = self._routing.get(args[0])
        if routing is not None and not args[0].is_floating_point():
            self._hits.set(out[0] if isinstance(out, tuple) else out, routing.num_experts)
        return out

    def _visit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Iterating over the hit list visits every expert."""
        num_experts = self._hits.get(args[0])
        if num_experts is None:
            out = func(*args, **kwargs)
            if func.__name__ == "unbind" and self._holds_counts(args[0]):
                self._counts.add_elements(args[0], out)
            return out
        matrix, device = args[0].dim() == 2, args[0].device
        rows = tuple(torch.tensor([e] if matrix else e, device=device) for e in range(num_experts))
        return iter(rows) if func.__name__ == "__iter__" else rows

    # "How many?": a symbol per expert ----------------------------------------------------------------------------

    def _bincount(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        routing = self._routing.get(args[0])
        minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        if routing is None or minlength != routing.num_experts or kwargs.get("weights") is not None:
            return func(*args, **kwargs)
        return torch.nn.functional.one_hot(args[0], minlength).sum(0)

    def _tolist(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        num_experts = self._hits.get(tensor)
        if num_experts is not None:
            return list(range(num_experts)) if tensor.dim() == 1 else [[e] for e in range(num_experts)]
        if not self._holds_counts(tensor):
            return self._number(func, args, kwargs)
        numbers = self._counts.numbers(tensor)
        return HostNumbers(numbers) if func.__name__ == "numpy" and numbers is not None else numbers

    def _running_sum(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if self._holds_counts(args[0]):
            self._counts.add_sums(out, args[0])
        return out

    def _holds_counts(self, tensor: Any) -> bool:
        """Whether a tensor holds a number of tokens for each expert; it is remembered."""
        routing = self._routing.get(tensor)
        if routing is None or not routing.counted or tensor.dim() != 1 or not isinstance(tensor.shape[0], int):
            return False
        self._counts.add(tensor, routing.total)
        return True

    def _part(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = rows_between(*args)
        out = func(*args, **kwargs) if rows is None else rows
        if isinstance(args[1], int) and args[1] >= 0 and self._holds_counts(args[0]):
            self._counts.add_elements(args[0], (out,), args[1])
        return out

    def _number(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A number read out of a tensor: fine for constants and routing counts, refused otherwise."""
        count = self._counts.number(args[0]) if func.__name__ == "item" else None
        if count is not None:
            return count
        out = func(*args, **kwargs)
        parts = out if isinstance(out, list) else [out]
        if not any(isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)) for part in parts):
            return out
        routing = self._routing.get(args[0])
        if routing is None or not routing.counted:
            instead = "keep it a tensor, or compute it outside the model"
            if routing is not None:
                instead = (
                    "for an expert's number, loop over the experts and pick each one's tokens (torch.where(ids == e))"
                )
            raise CaptureError(
                f"{current_line()}: the forward reads a number out of a tensor ({func.__name__.strip('_')}), which is "
                f"not known when the model is captured; {instead}."
            )
        pretend_at_least(parts, 2)
        return out

    def _split(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
        if not isinstance(sizes, (list, tuple)) or not any(isinstance(size, torch.SymInt) for size in sizes):
            return func(*args, **kwargs)
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        return tuple(self._pieces(args[0], sizes, dim))

    @staticmethod
    def _pieces(tensor: torch.Tensor, sizes: Any, dim: int) -> Iterator[torch.Tensor]:
        """The last piece takes what is left: the same values without an equality that cannot be decided."""
        start: Any = 0
        for index, size in enumerate(sizes):
            last = index == len(sizes) - 1
            length = tensor.shape[dim] - start if last else size
            if not last:
                torch._check(start + length <= tensor.shape[dim])  # type: ignore[no-untyped-call]
            yield tensor.narrow(dim, start, length)
            start = start + length

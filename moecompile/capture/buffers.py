"""Registered buffers that a forward writes: what each of them holds afterwards is a result of the captured call.

Writes in place are followed node by node (`functional`).  Here are the assignments: the new tensor is a result, and the
module has its own tensor back after the trace, into which the runtime copies.  What a copy could not stand for is
refused: another shape or type, and memory that something else reads as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from moecompile.capture.where import forward_line, module_name
from moecompile.errors import CaptureError


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind ``tensor``: equal for views of one another."""
    return int(tensor.untyped_storage()._cdata)


def held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in plain attributes of ``module``, and one level down in its lists and dictionaries."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        found = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for item in found:
            if isinstance(item, torch.Tensor):
                yield name, item


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def shared_memory(model: nn.Module) -> dict[str, str]:
    """Buffers whose memory another tensor of the model has as well, under every name, each with what that is.

    One buffer under several names is one tensor, not two.
    """
    own: dict[int, list[tuple[torch.Tensor | None, str]]] = {}
    for kind, found in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in found:
            own.setdefault(storage_key(tensor), []).append((tensor, f"{kind} {name!r}"))
    for prefix, module in model.named_modules():
        for name, tensor in held_tensors(module):
            own.setdefault(storage_key(tensor), []).append((None, f"attribute {join(prefix, name)!r}"))
    shared = {}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        others = [said for other, said in own[storage_key(tensor)] if other is not tensor]
        if others:
            shared[name] = others[0]
    return shared


@dataclass
class _Slot:
    """Where a module keeps a buffer: its name in the model, its tensor, and the line that assigned another one."""

    module: nn.Module
    key: str
    name: str
    tensor: torch.Tensor | None
    line: str = ""


class Buffers:
    """The buffers of a model during one traced forward; ``shared`` comes from `shared_memory` of the real tensors."""

    def __init__(self, shared: Mapping[str, str]) -> None:
        self.shared = shared
        self._root = nn.Module()
        self._slots: dict[tuple[int, str], _Slot] = {}
        self._memory: dict[int, str] = {}

    def begin(self, root: nn.Module) -> None:
        """Remember the tensors that the forward finds."""
        self._root = root
        self._slots = {
            (id(module), key): _Slot(module, key, join(prefix, key), tensor)
            for prefix, module in root.named_modules()
            for key, tensor in module._buffers.items()
        }
        self._memory = {storage_key(item): f"parameter {name!r}" for name, item in root.named_parameters()}
        self._memory |= {storage_key(item): f"buffer {name!r}" for name, item in root.named_buffers()}

    def takes(self, module: nn.Module, key: str, value: torch.Tensor, line: Callable[[], str]) -> bool:
        """Whether the forward assigns to a buffer that had a tensor before; ``line`` says where, if asked.

        `CaptureError` where copying the value into the old tensor would not be the same.
        """
        slot = self._slots.get((id(module), key))
        if slot is None or slot.tensor is None:
            return False
        if value is module._buffers.get(key):  # after a write in place
            return True
        slot.line, before = line(), slot.tensor
        if (value.shape, value.dtype, value.device) != (before.shape, before.dtype, before.device):
            raise self._refusal(
                slot,
                f"a {value.dtype} tensor of shape {tuple(value.shape)}, where it held {before.dtype} of shape {tuple(before.shape)}",
                "keep its shape and type",
            )
        alias = self._memory.get(storage_key(value))
        if alias is not None and storage_key(value) != storage_key(before):
            raise self._refusal(
                slot, f"the memory of {alias}, so that both would change together", "assign a clone() of it"
            )
        if sum(other.tensor is before for other in self._slots.values()) > 1:
            raise self._refusal(
                slot, "a tensor of its own, though other modules hold the same one", "write into it in place"
            )
        return True

    def finish(self) -> dict[str, torch.Tensor]:
        """What was assigned, by the buffer's name; the modules have their own tensors again."""
        found: dict[str, torch.Tensor] = {}
        memory: dict[int, str] = {}
        for slot in self._slots.values():
            now = slot.module._buffers.get(slot.key)
            if now is slot.tensor:
                continue
            if now is None or slot.tensor is None:
                what = "nothing" if now is None else "a tensor, where there was none"
                raise self._refusal(slot, what, "keep a tensor in it")
            other = memory.setdefault(storage_key(now), slot.name)
            if other != slot.name:
                raise self._refusal(slot, f"the same memory as buffer {other!r}", "assign a clone() of it")
            found[slot.name] = now
            slot.module._buffers[slot.key] = slot.tensor
        return found

    def _refusal(self, slot: _Slot, what: str, advice: str) -> CaptureError:
        line = slot.line or forward_line(slot.module)
        return CaptureError(
            f"{line}: the forward assigns to buffer {slot.key!r} of {module_name(self._root, slot.module)} {what}, which a "
            f"captured step cannot carry to the next call; {advice}, or update it outside forward, after the step."
        )

"""Composite ops of networks: norms, convolutions, attention, losses, random numbers."""

from __future__ import annotations

from typing import Any

from .call import Call, Rule, only, plain, together
from .elementwise import words
from .readings import MEAN, SAME, SUM, UNKNOWN, ConflictError, Kind, Options, Reading, cut, is_even

_PARTS = (Kind.CUT, Kind.ROWS, Kind.AWAY)
_TERMS = (Kind.SUM, Kind.MEAN)
_NONE, _MEAN, _SUM = 0, 1, 2  # reductions, as torch numbers them


def gradient(call: Call, grad: Any, value: Reading) -> Reading:
    """Reading of the gradient of a value, given that of the result that lies as the value does."""
    found = plain(call.of(grad))
    if Kind.UNKNOWN in (found.kind, value.kind):
        return UNKNOWN
    if value.kind in _PARTS:
        at = value.dim if value.kind is Kind.CUT else 0
        if found != value and not is_even(found, at):
            raise ConflictError(f"has a gradient that is {found} for a value that is {value}")
        return value
    if value.kind not in (Kind.SAME, Kind.ZERO) or found.kind in _PARTS:
        raise ConflictError(f"has a gradient that is {found} for a value that is {value}")
    return SAME if found.kind is Kind.SAME else found


def summed(found: Reading) -> Reading:
    """The gradient of what all rows share: parts of rows give parts of a sum."""
    return SUM if found.kind in _PARTS else found


def _values(call: Call, source: Any, first_mixed: int) -> Reading:
    """A value of which dims from ``first_mixed`` on are mixed by the op."""
    reading = plain(call.of(source))
    if reading.kind is Kind.CUT and reading.dim >= first_mixed:
        raise ConflictError(f"mixes elements along dim {reading.dim} of {source.name}, which is {reading}")
    if reading.kind in (*_TERMS, Kind.EXTREME, Kind.FRONT):
        raise ConflictError(f"is not linear in {source.name}, which is {reading}")
    return SAME if reading.kind in (Kind.SAME, Kind.ZERO) else reading


# ---- norms -------------------------------------------------------------------------------------------------------------


def _norm(call: Call) -> Options | list[Options]:
    source = call.args.get("input", call.args.get("x"))
    width = len(call["normalized_shape"]) if "normalized_shape" in call.args else 1
    reading = _values(call, source, len(call.shape(source)) - width)
    call.whole(call.get("weight"), call.get("bias"))
    return call.each(only(reading))


def _norm_backward(call: Call) -> list[Options]:
    source = call.args.get("input", call.args.get("x"))
    width = len(call["normalized_shape"]) if "normalized_shape" in call.args else 1
    value = _values(call, source, len(call.shape(source)) - width)
    call.whole(call.get("weight"), call.get("bias"))
    found = gradient(call, call.args.get("grad_out", call.args.get("grad")), value)
    return [only(found)] + [only(summed(found))] * (call.outs - 1)


def _channels(call: Call) -> Options | list[Options]:
    """Group norms, convolutions, pooling: dim 0 is the batch, nothing mixes along it."""
    source = call.args.get("input", call.args.get("self"))
    reading = _values(call, source, 1)
    call.whole(call.get("weight"), call.get("bias"))
    return call.each(only(reading))


def _channels_backward(call: Call) -> list[Options]:
    value = _values(call, call["input"], 1)
    call.whole(call.get("weight"))
    found = gradient(call, call.args.get("grad_output", call.args.get("grad_out")), value)
    return [only(found)] + [only(summed(found))] * (call.outs - 1)


# ---- attention ---------------------------------------------------------------------------------------------------------


def _attention(call: Call) -> Options | list[Options]:
    reading = _queries(call)
    return call.each(only(reading))


def _queries(call: Call) -> Reading:
    """How the queries lie, once keys, values and mask are known to fit."""
    operands = [call["query"], call["key"], call["value"]]
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    readings = [plain(call.of(item)) for item in operands]
    if Kind.UNKNOWN in (*(reading.kind for reading in readings), call.of(mask).kind):
        return UNKNOWN
    first, ndim = readings[0], len(call.shape(operands[0]))
    if first.kind is Kind.CUT and first.dim == ndim - 2:
        call.whole(*operands[1:])
        if call.get("is_causal", False):
            raise ConflictError("masks what comes later as if this rank's queries were the first ones")
        check_mask(call, mask, first, ndim)
        return first
    if any(reading.kind in _TERMS for reading in readings):
        raise ConflictError("attends to " + ", ".join(map(str, readings)))
    kinds = {reading if reading.kind is Kind.CUT else SAME for reading in readings}
    if len(kinds) > 1 or (first.kind is Kind.CUT and first.dim >= ndim - 2):
        raise ConflictError(
            "attends with queries, keys and values that do not lie alike (" + ", ".join(map(str, readings)) + ")"
        )
    check_mask(call, mask, first, ndim)
    return first if first.kind is Kind.CUT else SAME


def check_mask(call: Call, mask: Any, first: Reading, ndim: int) -> None:
    """A mask has the rows of the queries, which are ``first``."""
    if mask is None:
        return
    reading, shape = plain(call.of(mask)), call.shape(mask)
    lead = ndim - len(shape)
    if reading.kind is Kind.CUT:
        if reading._replace(dim=reading.dim + lead) != first:
            raise ConflictError(f"has a mask that is {reading} for queries that are {first}")
    elif reading.kind in _TERMS:
        raise ConflictError(f"has a mask that is {reading}")
    elif first.kind is Kind.CUT:
        at = first.dim - lead
        if at >= 0 and shape[at] != 1 and not is_even(reading, at):
            raise ConflictError(f"has the mask of all queries for queries that are {first}")


def _attention_backward(call: Call) -> list[Options]:
    """Keys and values that all queries read have a gradient that each rank's queries add to."""
    value = _queries(call)
    found = gradient(call, call.args.get("grad_out", call.args.get("grad_out_")), value)
    if value.kind is Kind.CUT and value.dim == len(call.shape(call["query"])) - 2:
        return [only(found), only(SUM), only(SUM)] + [only(UNKNOWN)] * (call.outs - 3)
    return [only(found)] * 3 + [only(UNKNOWN)] * (call.outs - 3)


# ---- losses ------------------------------------------------------------------------------------------------------------


def _predictions(call: Call) -> Reading:
    """How the predictions lie, once the targets are known to fit."""
    source, target = call["self"], call["target"]
    ndim, class_dim = len(call.shape(source)), 0 if len(call.shape(source)) == 1 else 1
    reading, wanted = plain(call.of(source)), plain(call.of(target))
    if Kind.UNKNOWN in (reading.kind, wanted.kind):
        return UNKNOWN
    if reading.kind in _TERMS or wanted.kind in _TERMS:
        raise ConflictError(f"compares predictions that are {reading} with targets that are {wanted}")
    call.whole(call.get("weight"))
    if reading.kind is not Kind.CUT:
        if wanted.kind is Kind.CUT:
            raise ConflictError(f"compares predictions that are {reading} with targets that are {wanted}")
        return SAME
    if reading.dim == class_dim:
        raise ConflictError(f"compares predictions that are {reading}, along their classes")
    probabilities = len(call.shape(target)) == ndim
    at = reading.dim - (reading.dim > class_dim and not probabilities)
    if wanted != reading._replace(dim=at) and not is_even(wanted, at):
        raise ConflictError(f"compares predictions that are {reading} with targets that are {wanted}")
    return reading


def _reduced(call: Call, reading: Reading, rows: Reading) -> Reading:
    reduction = int(call.get("reduction", _MEAN))
    if reading.kind is not Kind.CUT:
        return reading
    if reduction == _MEAN:
        raise ConflictError("divides by the number of this rank's targets, which is not that of all")
    return SUM if reduction == _SUM else rows


def _loss(call: Call) -> Options | list[Options]:
    reading = _predictions(call)
    rows = reading._replace(dim=max(reading.dim - 1, 0)) if reading.kind is Kind.CUT and reading.dim else reading
    found = _reduced(call, reading, rows)
    return call.each(only(found))


def _loss_backward(call: Call) -> Options:
    reading = _predictions(call)
    grad = plain(call.of(call["grad_output"]))
    if reading.kind is not Kind.CUT:
        return only(reading if reading.kind is Kind.UNKNOWN else SAME if grad.kind is Kind.SAME else grad)
    if int(call.get("reduction", _MEAN)) == _NONE:
        rows = reading._replace(dim=max(reading.dim - 1, 0)) if reading.dim else reading
        if grad != rows and not is_even(grad, rows.dim):
            raise ConflictError(f"has a gradient that is {grad} for losses that are {rows}")
        return only(reading)
    if grad.kind not in (Kind.SAME, Kind.ZERO):
        raise ConflictError(f"has a gradient that is {grad} for a loss that is a sum over the ranks")
    return only(reading)


def _elements(call: Call) -> Options:
    """mse_loss and the like: elementwise, then reduced."""
    reading = together(call, [call["self"], call["target"]])
    if reading.kind is not Kind.CUT:
        return only(SAME if reading.kind is Kind.SAME else reading)
    reduction = int(call.get("reduction", _MEAN))
    return only({_NONE: reading, _SUM: SUM}.get(reduction, MEAN))


def _elements_backward(call: Call) -> Options:
    reading, grad = together(call, [call["self"], call["target"]]), plain(call.of(call["grad_output"]))
    if reading.kind is not Kind.CUT:
        return only(SAME if (reading.kind, grad.kind) == (Kind.SAME, Kind.SAME) else grad)
    if grad.kind not in (Kind.SAME, Kind.ZERO) and grad != reading:
        raise ConflictError(f"has a gradient that is {grad} for a loss of elements that are {reading}")
    return only(reading)


# ---- random numbers ----------------------------------------------------------------------------------------------------


def _dropout(call: Call) -> Options:
    """Only where it drops nothing; what torch draws by itself differs between ranks."""
    off = not call["train"] or float(call["p"]) == 0.0
    return only(plain(call.of(call["input"])) if off else UNKNOWN)


def _uniform(call: Call) -> Options:
    """Numbers by global index: a cut value needs the index of its rank on every digit that cuts it."""
    like, at = plain(call.of(call["like"])), _own_index(call)
    if at is None:
        if like.kind in _PARTS:
            raise ConflictError(f"draws the same numbers on all ranks for a value that is {like}")
        return only(SAME if like.kind in (Kind.SAME, Kind.ZERO, *_TERMS) else UNKNOWN)
    dim, outer = call["dim"][at], call["outer"][at]
    if like.kind is Kind.ZERO:  # made for its shape, and nobody knows yet how it lies
        return only(cut(dim, outer, _is_mirrored(call, at)))
    if like.kind is not Kind.CUT:
        raise ConflictError(f"draws other numbers on each rank for a value that is {like}")
    if like.dim != dim or outer not in _stripes(call, like.outer, at) or like.zigzag is not _is_mirrored(call, at):
        raise ConflictError(f"draws numbers for dim {dim} in {outer} stripes, but {call['like'].name} is {like}")
    return only(like)


def _is_mirrored(call: Call, at: int) -> bool:
    """Whether numbers are drawn for a cut in zigzag."""
    order = call.get("zigzag", ())
    return bool(order and order[at])


def _own_index(call: Call) -> int | None:
    """Which of the indices of a call is that of a rank on this digit."""
    found = [at for at, item in enumerate(call["index"]) if call.of(item).kind is Kind.OFFSET]
    if len(found) > 1:
        raise ConflictError("uses two indices of a rank on one axis")
    for at in found:
        check_index(call, call.of(call["index"][at]), int(call["ranks"][at]))
    return found[0] if found else None


def _stripes(call: Call, here: int, at: int) -> set[int]:
    """Stripes that a cut may have made, if there are so many in a part of which later cuts of the dim may have left out some."""
    dims, found = call.get("dim"), {here}
    for later in range(at + 1, len(call["ranks"])):
        if dims is None or dims[later] == dims[at]:
            found |= {stripes * int(call["ranks"][later]) for stripes in found}
    return found


def check_index(call: Call, index: Reading, ranks: int) -> None:
    """The index of a rank that picks its part of ``ranks``."""
    if index.dim != 1 or call.size(index.tag) != ranks:
        raise ConflictError(
            f"picks one of {ranks} parts by an index that counts {call.size(index.tag)} ranks in steps of {index.dim}"
        )


def _uniform_rows(call: Call) -> Options:
    like, places = call.of(call["like"]), call.of(call["places"])
    if like.kind not in (Kind.SAME, Kind.ZERO, Kind.UNKNOWN) and places.kind is not Kind.UNKNOWN and like != places:
        raise ConflictError(f"draws numbers for rows that are {like} by places that are {places}")
    return only(places)


def _global_rows(call: Call) -> Options:
    rows, at = call.of(call["row_map"]), _own_index(call)
    if at is None:
        if rows.kind in (Kind.ROWS, Kind.AWAY):
            raise ConflictError(f"numbers rows that are {rows} without the index of the rank")
        return only(rows)
    fits = call["outer"][at] in _stripes(call, rows.outer, at) and rows.zigzag is _is_mirrored(call, at)
    if rows.kind is not Kind.ROWS or not fits:
        raise ConflictError(f"numbers rows that are {rows} in {call['outer'][at]} stripes")
    return only(rows)


def _drawn(call: Call) -> Options | list[Options]:
    return call.each(only(UNKNOWN))


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        words("aten.layer_norm aten.rms_norm aten.native_layer_norm aten._fused_rms_norm moe.rms_norm"), _norm
    ),
    **dict.fromkeys(
        words("aten.native_layer_norm_backward aten._fused_rms_norm_backward moe.rms_norm_backward"), _norm_backward
    ),
    **dict.fromkeys(
        words(
            "aten.group_norm aten.native_group_norm aten.conv1d aten.conv2d aten.convolution aten._convolution aten.avg_pool2d"
        ),
        _channels,
    ),
    **dict.fromkeys(words("aten.convolution_backward aten.native_group_norm_backward"), _channels_backward),
    **dict.fromkeys(
        words(
            """
            aten.scaled_dot_product_attention aten._scaled_dot_product_flash_attention_for_cpu aten._scaled_dot_product_attention_math
            """
        ),
        _attention,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **dict.fromkeys(
        words(
            "aten.cross_entropy_loss aten.nll_loss aten.nll_loss_nd aten.nll_loss2d aten.nll_loss_forward aten.nll_loss2d_forward"
        ),
        _loss,
    ),
    **dict.fromkeys(words("aten.nll_loss_backward aten.nll_loss2d_backward"), _loss_backward),
    **dict.fromkeys(
        words(
            """
            aten.mse_loss aten.l1_loss aten.smooth_l1_loss aten.huber_loss aten.kl_div aten.binary_cross_entropy
            aten.binary_cross_entropy_with_logits aten.soft_margin_loss
            """
        ),
        _elements,
    ),
    **dict.fromkeys(
        words("aten.mse_loss_backward aten.smooth_l1_loss_backward aten.huber_loss_backward"), _elements_backward
    ),
    "aten.dropout": _dropout,
    "moe.uniform": _uniform,
    "moe.uniform_rows": _uniform_rows,
    "moe.global_rows": _global_rows,
    **dict.fromkeys(
        words("aten.rand aten.randn aten.rand_like aten.randn_like aten.randint aten.bernoulli aten.native_dropout"),
        _drawn,
    ),
}

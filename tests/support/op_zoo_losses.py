"""Kinds of losses, and of results beside them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.op_zoo import LENGTH, VOCAB, WIDTH, Kind, loss

D, S, V = WIDTH, LENGTH, VOCAB


def _each(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Cross entropy of every token, ``[batch, sequence]``."""
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none", **options).reshape(y.shape)


def _mean(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), **options)


def _hot(z: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y, V).to(z.dtype)


def _chosen(z: Tensor, y: Tensor) -> Tensor:
    """Log-probability of every label."""
    return z.log_softmax(-1).gather(-1, y[..., None])[..., 0]


def _tokens(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _sentences(x: Tensor) -> Tensor:
    return F.normalize(x.mean(1), dim=-1)


def _off_diagonal(c: Tensor) -> Tensor:
    return c.masked_fill(torch.eye(c.shape[0], dtype=torch.bool), 0.0)


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def _barlow(x: Tensor) -> Tensor:
    e = _standard(_tokens(x))
    return (e.t() @ e / e.shape[0] - torch.eye(D, dtype=x.dtype)).square().sum()


def _vicreg(x: Tensor) -> Tensor:
    e = _tokens(x) - _tokens(x).mean(0)
    spread = F.relu(1 - (e.var(0) + 1e-4).sqrt()).mean()
    return spread + _off_diagonal(e.t() @ e / (e.shape[0] - 1)).square().sum() / D


def _contrast(x: Tensor, temperature: float = 0.5) -> Tensor:
    a, b = F.normalize(x[:, 0], dim=-1), F.normalize(x[:, 1], dim=-1)
    scores, at = a @ b.t() / temperature, torch.arange(x.shape[0])
    return (F.cross_entropy(scores, at) + F.cross_entropy(scores.t(), at)) / 2


def _supervised_contrast(y: Tensor, x: Tensor) -> Tensor:
    e, kind = F.normalize(_tokens(x), dim=-1), y.flatten() % 3
    same = (kind[:, None] == kind) & ~torch.eye(len(e), dtype=torch.bool)
    scores = (e @ e.t()).masked_fill(torch.eye(len(e), dtype=torch.bool), -torch.inf)
    return -((scores.log_softmax(-1).masked_fill(~same, 0.0)).sum(-1) / same.sum(-1).clamp(min=1)).mean()


def _hard_triplets(y: Tensor, x: Tensor) -> Tensor:
    e, kind = _tokens(x), y.flatten() % 3
    away, same = torch.cdist(e, e), kind[:, None] == kind
    return F.relu(away.masked_fill(~same, -1.0).amax(1) - away.masked_fill(same, 1e3).amin(1) + 0.5).mean()


def _prototypes(y: Tensor, x: Tensor) -> Tensor:
    kind = F.one_hot(y.flatten() % 3, 3).to(x.dtype)
    centres = kind.t() @ _tokens(x) / kind.sum(0)[:, None].clamp(min=1)
    return F.cross_entropy(-torch.cdist(_tokens(x), centres), y.flatten() % 3)


def _centres_by_index(y: Tensor, x: Tensor) -> Tensor:
    kind = y.flatten() % 3
    total = torch.zeros(3, D, dtype=x.dtype).index_add(0, kind, _tokens(x))
    count = torch.zeros(3, dtype=x.dtype).index_add(0, kind, torch.ones_like(kind, dtype=x.dtype))
    return (_tokens(x) - (total / count.clamp(min=1)[:, None])[kind]).square().mean()


def _mmd(x: Tensor) -> Tensor:
    a, b = _tokens(x[:, :3]), _tokens(x[:, 3:])

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(p, q).square() / D).mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


def _transport(x: Tensor) -> Tensor:
    cost = torch.cdist(x[:, 0], x[:, 1])
    plan = -cost / 0.5
    for _ in range(3):
        plan = plan - plan.logsumexp(1, keepdim=True)
        plan = plan - plan.logsumexp(0, keepdim=True)
    return (plan.exp() * cost).sum()


def _groups(z: Tensor, y: Tensor) -> Tensor:
    """GRPO: rewards are standardised in groups of two sequences."""
    reward = (y % 5).to(z.dtype).mean(1).unflatten(0, (-1, 2))
    gain = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
    ratio = (_chosen(z, y) - _chosen(z, y).detach()).exp()
    return -torch.minimum(ratio * gain[:, None], ratio.clamp(0.8, 1.2) * gain[:, None]).mean()


def _reinforce(z: Tensor, y: Tensor) -> Tensor:
    reward = (y % 5).to(z.dtype).mean(1)
    return -((reward - reward.mean()) / (reward.std() + 1e-3) * _chosen(z, y).sum(1)).mean()


def _preference(z: Tensor, y: Tensor) -> Tensor:
    score = _chosen(z, y).sum(1)
    half = score.shape[0] // 2
    return -F.logsigmoid(0.1 * (score[:half] - score[half:])).mean()


def _ppo(z: Tensor, y: Tensor) -> Tensor:
    ratio = (_chosen(z, y) + 2.0).exp()
    return (
        -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
        - 0.01 * torch.distributions.Categorical(logits=z).entropy().mean()
    )


def _crf(z: Tensor, y: Tensor) -> Tensor:
    moves = torch.linspace(-1, 1, V * V, dtype=z.dtype).reshape(V, V)
    alpha, gold = z[:, 0], z[:, 0].gather(1, y[:, :1])[:, 0]
    for at in range(1, S):
        alpha = (alpha[:, :, None] + moves).logsumexp(1) + z[:, at]
        gold = gold + moves[y[:, at - 1], y[:, at]] + z[:, at].gather(1, y[:, at : at + 1])[:, 0]
    return (alpha.logsumexp(1) - gold).mean()


def _chunked(z: Tensor, y: Tensor) -> Tensor:
    total = z.new_zeros(())
    for logits, labels in zip(_tokens(z).chunk(3), y.flatten().chunk(3), strict=True):
        total = total + F.cross_entropy(logits, labels, reduction="sum")
    return total / y.numel()


def _dice(z: Tensor, y: Tensor) -> Tensor:
    p, t = z.softmax(-1).flatten(0, 1), _hot(z, y).flatten(0, 1)
    return 1 - ((2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)).mean()


def _auc(z: Tensor, y: Tensor) -> Tensor:
    score, positive = z[..., 0].flatten(), (y.flatten() > 7).to(z.dtype)
    pairs = positive[:, None] * (1 - positive)
    return (pairs * F.softplus(score - score[:, None])).sum() / pairs.sum().clamp(min=1)


def _lovasz(z: Tensor, y: Tensor) -> Tensor:
    wrong = (_hot(z, y) - z.softmax(-1)).abs()[..., 0].flatten()
    order = wrong.detach().argsort(descending=True)
    truth = (y.flatten() == 0).to(z.dtype)[order]
    union = truth.sum() + (1 - truth).cumsum(0)
    jaccard = 1 - (truth.sum() - truth.cumsum(0)) / union
    return (wrong[order] * torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])).sum()


def _class_weights(z: Tensor, y: Tensor) -> Tensor:
    weight = 1 / torch.bincount(y.flatten(), minlength=V).clamp(min=1).to(z.dtype)
    return _mean(z, y, weight=weight)


def _information(z: Tensor) -> Tensor:
    p = _tokens(z).softmax(-1)
    mean = p.mean(0)
    return (p * p.log()).sum(-1).mean() - (mean * mean.log()).sum()


def _arcface(z: Tensor, y: Tensor) -> Tensor:
    cosine = F.normalize(z, dim=-1)
    turned = torch.cos(torch.acos(cosine.clamp(-0.99, 0.99)) + 0.2)
    return _mean(8 * torch.where(_hot(z, y).bool(), turned, cosine), y)


def _first_only(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[0], y[0])


_PLAIN: dict[str, Any] = {
    # what torch has
    "cross_entropy sum": lambda z, y, x: _mean(z, y, reduction="sum"),
    "cross_entropy of channels": lambda z, y, x: F.cross_entropy(z.transpose(1, 2), y),
    "cross_entropy label_smoothing": lambda z, y, x: _mean(z, y, label_smoothing=0.1),
    "cross_entropy weight": lambda z, y, x: _mean(z, y, weight=torch.linspace(0.1, 1, V, dtype=z.dtype)),
    "cross_entropy ignore_index": lambda z, y, x: _mean(z, y, ignore_index=3),
    "cross_entropy of one ignored sequence": lambda z, y, x: _mean(
        z, torch.where(torch.arange(y.shape[0])[:, None] == 1, -100, y)
    ),
    "cross_entropy soft": lambda z, y, x: F.cross_entropy(_tokens(z), _tokens(_hot(z, y)) * 0.9 + 0.1 / V),
    "nll_loss": lambda z, y, x: F.nll_loss(
        _tokens(z).log_softmax(-1), y.flatten(), weight=torch.linspace(0.1, 1, V, dtype=z.dtype)
    ),
    "kl_div": lambda z, y, x: F.kl_div(z.log_softmax(-1), torch.full_like(z, 1 / V), reduction="batchmean"),
    "kl_div log target": lambda z, y, x: (
        F.kl_div(z.log_softmax(-1), (z.detach() * 0.5).log_softmax(-1), log_target=True, reduction="sum") / y.numel()
    ),
    "binary_cross_entropy": lambda z, y, x: F.binary_cross_entropy(z.sigmoid(), _hot(z, y)),
    "binary_cross_entropy_with_logits": lambda z, y, x: F.binary_cross_entropy_with_logits(
        z, _hot(z, y), pos_weight=torch.full((V,), 2.0, dtype=z.dtype)
    ),
    "mse_loss": lambda z, y, x: F.mse_loss(z, _hot(z, y)),
    "l1_loss": lambda z, y, x: F.l1_loss(z, _hot(z, y)),
    "smooth_l1_loss": lambda z, y, x: F.smooth_l1_loss(z, _hot(z, y)),
    "huber_loss": lambda z, y, x: F.huber_loss(z, _hot(z, y), delta=0.3),
    "gaussian_nll_loss": lambda z, y, x: F.gaussian_nll_loss(z, torch.zeros_like(z), z.exp()),
    "poisson_nll_loss": lambda z, y, x: F.poisson_nll_loss(z, _hot(z, y)),
    "soft_margin_loss": lambda z, y, x: F.soft_margin_loss(z, _hot(z, y) * 2 - 1),
    "multi_margin_loss": lambda z, y, x: F.multi_margin_loss(_tokens(z), y.flatten()),
    "multilabel_margin_loss": lambda z, y, x: F.multilabel_margin_loss(z[:, 0], F.pad(y, (0, V - S), value=-1)),
    "multilabel_soft_margin_loss": lambda z, y, x: F.multilabel_soft_margin_loss(_tokens(z), _tokens(_hot(z, y))),
    "margin_ranking_loss": lambda z, y, x: F.margin_ranking_loss(
        z[:, 0], z[:, 1], (y[:, :1] > 7).to(z.dtype) * 2 - 1, margin=0.3
    ),
    "hinge_embedding_loss": lambda z, y, x: F.hinge_embedding_loss(z, _hot(z, y) * 2 - 1),
    "cosine_embedding_loss": lambda z, y, x: F.cosine_embedding_loss(
        _tokens(z), _tokens(z).roll(1, -1), torch.ones(y.numel(), dtype=z.dtype)
    ),
    "triplet_margin_loss": lambda z, y, x: F.triplet_margin_loss(
        _tokens(x), _tokens(x).roll(1, 0), _tokens(x).roll(2, 0)
    ),
    "triplet_margin_with_distance_loss": lambda z, y, x: F.triplet_margin_with_distance_loss(
        x[:, 0], x[:, 1], x[:, 2], distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
    ),
    "ctc_loss": lambda z, y, x: F.ctc_loss(
        z.log_softmax(-1).transpose(0, 1), y[:, :3].clamp(min=1), torch.full((z.shape[0],), S), (y[:, 3] % 3) + 1
    ),
    # means of many sorts
    "sum by numel": lambda z, y, x: _each(z, y).sum() / y.numel(),
    "sum by sequences": lambda z, y, x: _each(z, y).sum() / y.shape[0],
    "sum by a constant": lambda z, y, x: _each(z, y).sum() / 100,
    "masked by tokens": lambda z, y, x: (_each(z, y) * (y > 3)).sum() / (y > 3).sum(),
    "masked clamped": lambda z, y, x: (_each(z, y) * (y == 3)).sum() / (y == 3).sum().clamp(min=1),
    "masked by float mask": lambda z, y, x: (lambda mask: (_each(z, y) * mask).sum() / (mask.sum() + 1e-8))(
        (y > 3).to(z.dtype)
    ),
    "boolean index": lambda z, y, x: F.cross_entropy(_tokens(z)[y.flatten() > 3], y.flatten()[y.flatten() > 3]),
    "boolean index of two dims": lambda z, y, x: F.cross_entropy(z[y > 3], y[y > 3]),
    "nonzero index": lambda z, y, x: _each(z, y).flatten()[(y.flatten() > 3).nonzero()[:, 0]].mean(),
    "where index": lambda z, y, x: (lambda at: F.cross_entropy(z[at], y[at]))(torch.where(y > 3)),
    "masked_select": lambda z, y, x: _each(z, y).masked_select(y > 3).mean(),
    "nanmean": lambda z, y, x: _each(z, y).masked_fill(y < 4, torch.nan).nanmean(),
    "mean of sequences": lambda z, y, x: ((_each(z, y) * (y > 3)).sum(1) / (y > 3).sum(1).clamp(min=1)).mean(),
    "sum of sequences by length": lambda z, y, x: (_each(z, y).sum(1) / (y > 3).sum(1).clamp(min=1)).sum() / y.shape[0],
    "largest sequence": lambda z, y, x: _each(z, y).mean(1).max(),
    "logsumexp of sequences": lambda z, y, x: _each(z, y).mean(1).logsumexp(0),
    "softmax weighted sequences": lambda z, y, x: (lambda e: (e.softmax(0) * e).sum())(_each(z, y).mean(1)),
    "weights of sequences": lambda z, y, x: (lambda w: (w * _each(z, y).mean(1)).sum() / w.sum())(
        (y[:, 0] + 1).to(z.dtype)
    ),
    "weights by position": lambda z, y, x: (_each(z, y) / torch.arange(1, S + 1)).mean(),
    "weights by sequence number": lambda z, y, x: (_each(z, y).mean(1) * torch.arange(y.shape[0])).mean(),
    "weights of classes counted": lambda z, y, x: _class_weights(z, y),
    "geometric mean": lambda z, y, x: _each(z, y).log().mean().exp(),
    "harmonic mean": lambda z, y, x: 1 / (1 / _each(z, y)).mean(),
    "root of squares": lambda z, y, x: _each(z, y).square().mean().sqrt(),
    "product of means": lambda z, y, x: _mean(z, y) * x.square().mean(),
    "quotient of means": lambda z, y, x: _mean(z, y) / (1 + x.abs().mean()),
    "perplexity": lambda z, y, x: _mean(z, y).exp().log1p(),
    "shifted": lambda z, y, x: F.cross_entropy(_tokens(z[:, :-1]), y[:, 1:].flatten()),
    "shifted twice": lambda z, y, x: (
        F.cross_entropy(_tokens(z[:, :-1]), y[:, 1:].flatten())
        + 0.3 * F.cross_entropy(_tokens(z[:, :-2]), y[:, 2:].flatten())
    ),
    "shifted by padding": lambda z, y, x: _mean(z, F.pad(y[:, 1:], (0, 1), value=-100)),
    "last token": lambda z, y, x: F.cross_entropy(z[:, -1], y[:, -1]),
    "first sequence": lambda z, y, x: _first_only(z, y),
    "last sequence": lambda z, y, x: F.cross_entropy(z[-1], y[-1]),
    "every second token": lambda z, y, x: F.cross_entropy(_tokens(z)[::2], y.flatten()[::2]),
    "every second sequence": lambda z, y, x: (
        F.cross_entropy(_tokens(z[::2]), y[::2].flatten()) - 0.1 * F.cross_entropy(_tokens(z[1::2]), y[1::2].flatten())
    ),
    "in chunks": lambda z, y, x: _chunked(z, y),
    "variance of sequences": lambda z, y, x: _mean(z, y) + _each(z, y).mean(1).var(),
    "variance of tokens": lambda z, y, x: _mean(z, y) + _each(z, y).var(correction=0),
    # robust ones
    "focal": lambda z, y, x: ((1 - _chosen(z, y).exp()) ** 2 * -_chosen(z, y)).mean(),
    "hardest tokens": lambda z, y, x: _each(z, y).flatten().topk(5).values.mean(),
    "hardest tokens of a sequence": lambda z, y, x: _each(z, y).topk(2, dim=1).values.mean(),
    "easiest tokens": lambda z, y, x: _each(z, y).flatten().sort().values[:10].mean(),
    "median": lambda z, y, x: _each(z, y).median(),
    "quantile": lambda z, y, x: _each(z, y).quantile(0.8),
    "tail": lambda z, y, x: (lambda e: e.masked_fill(e < e.detach().quantile(0.5), 0.0).mean())(_each(z, y)),
    "clipped": lambda z, y, x: _each(z, y).clamp(max=3.0).mean(),
    "bootstrapped": lambda z, y, x: (
        -(z.softmax(-1).detach() * z.log_softmax(-1)).sum(-1).mean() * 0.2 + 0.8 * _mean(z, y)
    ),
    "symmetric": lambda z, y, x: _mean(z, y) - 0.1 * (z.softmax(-1) * _hot(z, y).clamp(min=1e-3).log()).sum(-1).mean(),
    "poly": lambda z, y, x: (_each(z, y) + 1 - _chosen(z, y).exp()).mean(),
    "dice": lambda z, y, x: _dice(z, y),
    "lovasz": lambda z, y, x: _lovasz(z, y),
    "auc": lambda z, y, x: _auc(z, y),
    "list of all": lambda z, y, x: -(_each(z, y).flatten().softmax(0) * x.sum(-1).flatten().log_softmax(0)).sum(),
    "arcface": lambda z, y, x: _arcface(z, y),
    "crf": lambda z, y, x: _crf(z, y),
    # terms beside
    "z-loss": lambda z, y, x: _mean(z, y) + 1e-2 * z.logsumexp(-1).square().mean(),
    "z-loss of all": lambda z, y, x: _mean(z, y) + 1e-2 * z.logsumexp((0, 1, 2)),
    "size of states": lambda z, y, x: _mean(z, y) + x.square().mean().sqrt(),
    "norm of states": lambda z, y, x: _mean(z, y) + 0.1 * x.norm() + 0.1 * x.flatten(1).norm(dim=1).mean(),
    "spread of logits": lambda z, y, x: _mean(z, y) + z.std(0).mean(),
    "entropy": lambda z, y, x: _mean(z, y) + 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "entropy of the mean": lambda z, y, x: (lambda p: _mean(z, y) + (p * p.log()).sum())(
        _tokens(z).softmax(-1).mean(0)
    ),
    "information": lambda z, y, x: _information(z),
    "balance of classes": lambda z, y, x: (
        _mean(z, y) + V * (_tokens(_hot(z, z.argmax(-1))).mean(0) * _tokens(z).softmax(-1).mean(0)).sum()
    ),
    "unlikelihood": lambda z, y, x: (
        _mean(z, y) - torch.log1p(-z.softmax(-1).gather(-1, y.roll(1, 1)[..., None]).clamp(max=0.99)).mean()
    ),
    "smooth in time": lambda z, y, x: _mean(z, y) + (x[:, 1:] - x[:, :-1]).square().mean(),
    # pairs of the batch
    "contrast": lambda z, y, x: _contrast(x),
    "contrast of sentences": lambda z, y, x: F.cross_entropy(
        _sentences(x) @ _sentences(x).t(), torch.arange(x.shape[0])
    ),
    "contrast sigmoid": lambda z, y, x: (
        -F.logsigmoid(
            (2 * torch.eye(x.shape[0], dtype=x.dtype) - 1) * (_sentences(x) @ _sentences(z[..., :D]).t())
        ).sum()
        / x.shape[0]
    ),
    "contrast supervised": lambda z, y, x: _supervised_contrast(y, x),
    "hard triplets": lambda z, y, x: _hard_triplets(y, x),
    "prototypes": lambda z, y, x: _prototypes(y, x),
    "centres by index": lambda z, y, x: _centres_by_index(y, x),
    "uniformity": lambda z, y, x: torch.pdist(_sentences(x)).square().mul(-2).exp().mean().log(),
    "barlow": lambda z, y, x: _barlow(x),
    "vicreg": lambda z, y, x: _vicreg(x),
    "covariance": lambda z, y, x: torch.cov(_tokens(x).t()).square().mean() + torch.corrcoef(_tokens(x).t())[0, 1],
    "volume": lambda z, y, x: -torch.logdet(_tokens(x).t() @ _tokens(x) / 24 + torch.eye(D, dtype=x.dtype)),
    "nuclear norm": lambda z, y, x: torch.linalg.svdvals(_tokens(x)).mean(),
    "whitened": lambda z, y, x: (
        torch.linalg.cholesky(torch.cov(_tokens(x).t()) + torch.eye(D, dtype=x.dtype)).diagonal().log().sum()
    ),
    "discrepancy": lambda z, y, x: _mmd(x),
    "transport": lambda z, y, x: _transport(x),
    "wasserstein": lambda z, y, x: (x[:, 0].sort(0).values - x[:, 1].sort(0).values).abs().mean(),
    "differences of all": lambda z, y, x: (_sentences(x)[:, None] - _sentences(x)).square().sum(-1).triu(1).sum(),
    "next in the batch": lambda z, y, x: (_sentences(x) * _sentences(x).roll(1, 0)).sum(-1).mean(),
    "correlation": lambda z, y, x: (
        1 - F.cosine_similarity(z[..., 0].flatten() - z[..., 0].mean(), y.flatten() - y.to(z.dtype).mean(), dim=0)
    ),
    # rewards and teachers
    "dpo": lambda z, y, x: _preference(z, y),
    "ppo": lambda z, y, x: _ppo(z, y),
    "grpo": lambda z, y, x: _groups(z, y),
    "reinforce": lambda z, y, x: _reinforce(z, y),
    "distilled": lambda z, y, x: (
        F.kl_div((z / 2).log_softmax(-1), (z.roll(1, -1).detach() / 2).softmax(-1), reduction="batchmean") * 4
    ),
    "distilled states": lambda z, y, x: (1 - F.cosine_similarity(x, z[..., :D].detach(), dim=-1)).mean(),
    "pinball": lambda z, y, x: (lambda e: torch.maximum(0.8 * e, -0.2 * e).mean())(_hot(z, y) - z),
    "mixture density": lambda z, y, x: (
        -torch.logsumexp(z[..., :4].log_softmax(-1) - 0.5 * (y[..., None] / 8 - z[..., 4:8]).square(), -1).mean()
    ),
    "distribution normal": lambda z, y, x: (
        -torch.distributions.Normal(z[..., 0], z[..., 1].exp()).log_prob(y / 8).mean()
    ),
    "log of a constant": lambda z, y, x: _mean(z, y) / math.log(V),
}


# what cannot be captured, and what the proof of places does not follow
_REFUSED: dict[str, dict[str, str]] = {
    "ctc_loss": {"*": "sizes depend on tensor values"},
    "weights of classes counted": {"*": "depends on tensor values"},
    "lovasz": {"dp4 ep2 etp2": "which is several values in a row"},
    "transport": {"dp4 ep2 etp2": "takes the whole of exp_1 together with an operand that is cut"},
}

KINDS: dict[str, Kind] = {
    f"loss {name}": loss(function, refused=_REFUSED.get(name, {})) for name, function in _PLAIN.items()
}

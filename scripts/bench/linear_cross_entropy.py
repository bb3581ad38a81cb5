"""Output projection and cross-entropy in PyTorch, a few tokens' logits at a time.

Loss and gradients come out of one pass (three matrix products, nothing recomputed), as fused losses
for fine-tuning do it: the logits of all tokens never exist together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

IGNORED = -100
"""Label of a token that is not supervised."""

Softmax = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def loss_and_logit_gradient(
    logits: torch.Tensor, labels: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled sum of token losses, and its gradient by `logits` [C, V] in their dtype."""
    wide = logits.float()
    supervised = (labels != IGNORED).unsqueeze(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = labels.unsqueeze(1) == columns
    normaliser = torch.logsumexp(wide, 1, keepdim=True)
    chosen = torch.where(hit, wide, 0.0).sum(1, keepdim=True)
    loss = torch.where(supervised, normaliser - chosen, 0.0).sum() * scale
    gradient = (torch.exp(wide - normaliser) - hit.float()) * (supervised.float() * scale)
    return loss, gradient.to(logits.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """`apply(hidden [T, D], weight [V, D], labels [T], scale, chunk_tokens, softmax)` -> loss.

    `softmax` is `loss_and_logit_gradient` or a compiled form of it. The weight's gradient adds up
    in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        chunk_tokens: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """The loss; its gradients are kept for `backward`."""
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            part_loss, logit_gradient = softmax(hidden[part] @ weight.t(), labels[part], scale)
            loss += part_loss
            torch.mm(logit_gradient, weight, out=hidden_gradient[part])
            weight_gradient += logit_gradient.t() @ hidden[part]
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients by hidden states and weight."""
        hidden_gradient, weight_gradient = ctx.saved_tensors
        factor = gradients[0]
        return (
            hidden_gradient * factor.to(hidden_gradient.dtype),
            weight_gradient * factor.to(weight_gradient.dtype),
            *(None,) * 4,
        )

"""What a token's loss is, beside minus the logarithm of the target's probability.

With logits l, log-sum-exp Z, target y and a vocabulary of V,

    loss = (1 - s) (Z - l_y) + s (Z - mean(l)) + c Z^2

s is label smoothing (Szegedy et al., arXiv:1512.00567; as `torch.nn.functional.cross_entropy` has
it), c the coefficient of the z-loss, which keeps Z near 0 (Chowdhery et al., arXiv:2204.02311). The
derivative by l is (1 + 2 c Z) softmax(l) - (1 - s) onehot(y) - s / V.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Coefficients; with both 0 no operation is added, so results are the same in every bit.

    Attributes:
      label_smoothing: s, from 0 to 1, 1 excluded.
      z_loss_coef: c, not negative.

    Raises:
      ValueError: a coefficient is outside.
    """

    label_smoothing: float = 0.0
    z_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}; it must be 0 to 1, 1 excluded."
            )
        if not 0 <= self.z_loss_coef < float("inf"):
            raise ValueError(f"z_loss_coef is {self.z_loss_coef}; it must not be negative.")

    def values(
        self, log_sum: jax.Array, of_target: jax.Array, mean_logit: jax.Array | None
    ) -> jax.Array:
        """Losses, float32 [N].

        Args:
          log_sum: Z, float32 [N].
          of_target: the target's logit, float32 [N].
          mean_logit: over the vocabulary, float32 [N]; read with smoothing only.
        """
        if self.label_smoothing:
            assert mean_logit is not None
            of_target = of_target + self.label_smoothing * (mean_logit - of_target)
        losses = log_sum - of_target
        return losses + self.z_loss_coef * jnp.square(log_sum) if self.z_loss_coef else losses

    def derivative_parts(
        self,
        shares: jax.Array,
        is_target: jax.Array,
        log_sum: jax.Array,
        *,
        vocab_size: int,
        in_vocabulary: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """What is to be subtracted from what for the derivative by the logits, float32 [N, R].

        Args:
          shares: softmax of all logits, of R of them, float32 [N, R].
          is_target: 1 for the target, else 0, float32 [N, R].
          log_sum: Z, float32 [N].
          vocab_size: V.
          in_vocabulary: False for logits that stand for none, bool [N, R]; None: all do.

        Returns:
          (1 + 2 c Z) softmax(l) and (1 - s) onehot(y) + s / V.
        """
        if self.z_loss_coef:
            shares = shares * (1 + 2 * self.z_loss_coef * log_sum)[:, None]
        if self.label_smoothing:
            even = self.label_smoothing / vocab_size
            is_target = (1 - self.label_smoothing) * is_target
            is_target += even if in_vocabulary is None else jnp.where(in_vocabulary, even, 0.0)
        return shares, is_target


PLAIN = TokenLoss()
"""Cross-entropy."""

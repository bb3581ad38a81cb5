"""What one training step of a model costs per token, stage by stage: a model of the model.

A `Workload` mirrors the runtime's view: an embedding stage, layer stages, a head stage. It can be
filled from a `ModelConfig`, or by hand for a foreign model whose shapes (`jax.eval_shape`) and
operation counts are known. Letters: D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache

from slidedp_jax.models.config import LayerKind, ModelConfig
from slidedp_jax.planner.flops import matmul_forward_flops
from slidedp_jax.planner.layer_work import layer_work, with_frozen
from slidedp_jax.planner.stage_work import BatchShape, StageWork, parameter_groups
from slidedp_jax.wording import short_count

__all__ = ["BatchShape", "StageWork", "Workload", "parameter_groups"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decoder as the planner sees it.

    Attributes:
      name: for reports.
      embed: the token embedding.
      layers: layers, bottom first.
      head: final norm and output projection; tied, only the norm's parameters but the projection's
        matrix products.
      tied: the output projection is the embedding.
      hidden_size: width of what passes between stages, D.
      vocab_size: V.
      own_loss_tokens: tokens whose logits the loss holds at once where that is the model's own
        affair, `math.inf` for all of a microbatch; None: as many as the strategy says.
      plain_vocabulary: the embedding is a lookup and the loss cross-entropy after a projection, so
        that a strategy may take both in slices of the vocabulary.
    """

    name: str
    embed: StageWork
    layers: tuple[StageWork, ...]
    head: StageWork
    tied: bool
    hidden_size: int
    vocab_size: int
    own_loss_tokens: float | None = None
    plain_vocabulary: bool = False

    def __post_init__(self) -> None:
        """Rejects a model without layers."""
        if not self.layers:
            raise ValueError(f"workload {self.name!r} has no layers; a decoder has at least one.")

    def __hash__(self) -> int:
        """Computed once: many caches are keyed by workloads, and layers are many."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.embed, self.layers, self.head, self.vocab_size))

    @cached_property
    def num_parameters(self) -> int:
        """All parameters, a tied matrix counted once."""
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that take part in one token."""
        return self.num_parameters - sum(stage.unvisited_parameters for stage in self.stages)

    def loss_tokens(self, strategy_says: int, microbatch_tokens: int) -> int:
        """Tokens whose logits exist at once."""
        own = self.own_loss_tokens
        return int(min(strategy_says if own is None else own, microbatch_tokens))

    @cached_property
    def stages(self) -> tuple[StageWork, ...]:
        """All stages in forward order."""
        return (self.embed, *self.layers, self.head)

    @cached_property
    def num_trained(self) -> int:
        """Parameters that are not frozen."""
        return sum(stage.trained_parameters for stage in self.stages)

    @cached_property
    def forward_only_layers(self) -> int:
        """Lowest layers below which, and in which, nothing is trained: they never run backward."""
        if self.embed.is_trained:
            return 0
        trained = [index for index, stage in enumerate(self.layers) if stage.is_trained]
        return trained[0] if trained else len(self.layers)

    @property
    def projection_is_trained(self) -> bool:
        """Whether the gradient of the output projection is computed."""
        if self.tied:
            return self.embed.is_trained
        return not self.head.frozen_matmul_parameters

    @property
    def head_gradients(self) -> int:
        """Gradients that the head computes by a product: of the projection, and of what it reads.

        The latter only if anything below the projection is trained, the final norm included.
        """
        rows = self.projection_is_trained
        own = 0 if self.tied or not rows else self.head.matmul_parameters
        norm = self.head.trained_parameters > own
        below = self.embed.is_trained or self.forward_only_layers < len(self.layers)
        return rows + (norm or below)

    def model_flops_per_step(self, batch: BatchShape) -> float:
        """Operations of one step over all devices, without recomputation (the MFU numerator).

        Of frozen weights no gradient, and of layers below all that is trained forward alone.
        """
        start = self.forward_only_layers
        products = sum(stage.matmul_parameters for stage in self.layers[:start])
        for stage in self.layers[start:]:
            products += 3 * stage.matmul_parameters - stage.frozen_matmul_parameters
        if start < len(self.layers) and not self.embed.is_trained:
            products -= self.layers[start].before_attention_parameters  # its input has no gradient
        products += (1 + self.head_gradients) * self.head.matmul_parameters
        attention = sum(
            (1 if index < start else 3) * stage.attention_flops(batch)
            for index, stage in enumerate(self.layers)
        )
        return matmul_forward_flops(batch.num_tokens, products) + batch.num_rows * attention

    @staticmethod
    def from_config(
        config: ModelConfig, *, name: str | None = None, frozen: Collection[str] = ()
    ) -> Workload:
        """The workload of a decoder of `models`.

        Args:
          config: the model.
          name: for reports.
          frozen: full names of the parameters that stay as they are.
        """
        return _of_config(config, name, frozenset(frozen))


@lru_cache(maxsize=16)  # the same object for the same: caches are keyed by it
def _of_config(config: ModelConfig, name: str | None, frozen: frozenset[str]) -> Workload:
    hidden = config.hidden_size
    embed_shapes = {
        f"model.embed_tokens.{name}": shape for name, shape in config.embedding_shapes().items()
    }
    head_shapes = config.head_shapes()
    return Workload(
        name=name or f"{config.model_type} of {short_count(config.num_parameters)} parameters",
        embed=with_frozen(
            StageWork(
                name="model.embed_tokens",
                group_parameters=parameter_groups(embed_shapes),
                elementwise_elements=2 * hidden,
            ),
            embed_shapes,
            frozen,
        ),
        layers=_layers(config, frozen),
        head=with_frozen(
            StageWork(
                name="head",
                group_parameters=parameter_groups(head_shapes),
                matmul_parameters=config.vocab_size * hidden,
                elementwise_elements=4 * hidden,
            ),
            head_shapes,
            frozen,
        ),
        tied=config.tie_word_embeddings,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        plain_vocabulary=not config.scale_embeddings,
    )


def _layers(config: ModelConfig, frozen: frozenset[str]) -> tuple[StageWork, ...]:
    """Work of every layer, one object for those that are alike."""
    found: dict[tuple[LayerKind, frozenset[str]], StageWork] = {}
    layers = []
    for layer, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{layer}."
        own = frozenset(n.removeprefix(prefix) for n in frozen if n.startswith(prefix))
        key = kind, own
        if key not in found:
            shapes = config.layer_shapes(layer)
            visits = config.num_experts_per_tok / config.num_experts if kind.sparse else 1.0
            found[key] = with_frozen(layer_work(config, kind), shapes, own, visits=visits)
        layers.append(found[key])
    return tuple(layers)

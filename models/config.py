"""The one description of a decoder that models, planner and runtime share. Imports no JAX.

Field names are Hugging Face's, so that a `config.json` maps onto them by identity; model families
(Qwen2, Qwen3, Llama, Mistral, Gemma 3, mixtures of experts) are flags of `ModelConfig`, no classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slidedp_jax.models.known_shapes import KNOWN_SHAPES
from slidedp_jax.models.rope_parameters import RopeParameters

Shape = tuple[int, ...]


ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Every `hidden_act` that the feed-forward block computes."""


class LayerKind(NamedTuple):
    """What tells one layer of a model from another.

    Attributes:
      window: sliding window in tokens, or None.
      sparse: the feed-forward block is a mixture of experts.
    """

    window: int | None
    sparse: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and flags of a decoder-only transformer with RMSNorm, RoPE and gated units.

    Attributes:
      model_type: Hugging Face family name (`qwen2`, `mixtral`, ...); informative, no code branches
        on it after the configuration has been read.
      vocab_size: rows of the embedding, V.
      hidden_size: width of the residual stream, D.
      intermediate_size: width of the feed-forward block of a dense layer.
      num_hidden_layers: number of layers, L.
      num_attention_heads: query heads, N.
      num_key_value_heads: key and value heads, K; divides N.
      head_dim: size of a head, H; even. Never derived: Qwen3's is not D / N.
      rms_norm_eps: added to the mean square inside every norm.
      tie_word_embeddings: the output projection is the embedding.
      max_position_embeddings: context length that the model was configured for, tokens.
      attention_bias: q, k and v projections have biases.
      attention_output_bias: the o projection has a bias.
      mlp_bias: gate, up and down projections have biases.
      qk_norm: RMSNorm of queries and keys before RoPE.
      qk_norm_per_head: that norm is over each head; otherwise over all heads of a token at once.
      clip_qkv: queries, keys and values are clipped to this magnitude before RoPE, or None.
      rope_parameters: see `RopeParameters`.
      layer_windows: per layer the sliding window in tokens (a query sees itself and the
        window - 1 tokens before it), or None for full attention. Empty means None everywhere.
      local_rope_parameters: those of layers with a window; None: as the others'.
      hidden_act: activation of the gate, one of `ACTIVATIONS`.
      norms_add_one: norms multiply by 1 + weight, in float32, instead of by weight.
      norms_after: the results of attention and of the feed-forward block are normalised too.
      scale_embeddings: embeddings are multiplied by sqrt(D), rounded to the compute dtype.
      query_pre_attn_scalar: attention scores are divided by its root; None: by that of H.
      initializer_range: standard deviation of freshly initialised matrices.
      num_experts: routed experts of a sparse layer, E; 0 for a dense model.
      num_experts_per_tok: experts that a token visits, k.
      moe_intermediate_size: width of one routed expert, F.
      norm_topk_prob: the weights of a token's experts are divided by their sum.
      shared_expert_intermediate_size: width of the expert that every token visits, 0 for none.
      sparse_layers: per layer whether it is sparse. Empty: all are, where there are experts.
      router_aux_loss_coef: coefficient of the load-balance loss (`models.router_losses`) that the
        model's own configuration turns on; 0 for none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_per_head: bool = True
    clip_qkv: float | None = None
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    layer_windows: tuple[int | None, ...] = ()
    local_rope_parameters: RopeParameters | None = None
    hidden_act: str = "silu"
    norms_add_one: bool = False
    norms_after: bool = False
    scale_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    initializer_range: float = 0.02
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    sparse_layers: tuple[bool, ...] = ()
    router_aux_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        """Checks that the numbers fit together; fills an empty `layer_windows`."""
        for name in _POSITIVE_FIELDS:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE needs an even number.")
        if self.hidden_act not in ACTIVATIONS:
            supported = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"hidden_act is {self.hidden_act!r}; supported: {supported}.")
        if self.query_pre_attn_scalar is not None and not self.query_pre_attn_scalar > 0:
            raise ValueError(
                f"query_pre_attn_scalar is {self.query_pre_attn_scalar}; it must be positive."
            )
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_hidden_layers)
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries for "
                f"{self.num_hidden_layers} layers; give one per layer, or none at all."
            )
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise ValueError(f"layer_windows are {self.layer_windows}; a window is at least 1.")
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise ValueError(f"clip_qkv is {self.clip_qkv}; it must be positive, or None.")
        self._check_experts()

    def _check_experts(self) -> None:
        if self.sparse_layers and len(self.sparse_layers) != self.num_hidden_layers:
            raise ValueError(
                f"sparse_layers has {len(self.sparse_layers)} entries for "
                f"{self.num_hidden_layers} layers; give one per layer, or none at all."
            )
        if not self.num_experts:
            given = [name for name in _EXPERT_FIELDS if getattr(self, name)]
            if given or any(self.sparse_layers):
                raise ValueError(
                    f"num_experts is 0, but {', '.join(given or ['sparse_layers'])} says otherwise."
                )
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; a token visits from 1 to "
                f"num_experts ({self.num_experts})."
            )
        if self.moe_intermediate_size < 1:
            raise ValueError("moe_intermediate_size is 0; experts need a width.")
        if self.router_aux_loss_coef < 0:
            raise ValueError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}; it is 0 or more."
            )

    def embedding_shapes(self) -> dict[str, Shape]:
        """Names within `model.embed_tokens` -> shapes."""
        return {"weight": (self.vocab_size, self.hidden_size)}

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Per layer, what it is."""
        sparse = self.sparse_layers or (self.num_experts > 0,) * self.num_hidden_layers
        return tuple(map(LayerKind, self.layer_windows, sparse))

    def of_layer(self, kind: LayerKind) -> ModelConfig:
        """The configuration with the RoPE that layers of a kind have."""
        if kind.window is None or self.local_rope_parameters is None:
            return self
        return replace(self, rope_parameters=self.local_rope_parameters)

    def layer_shapes(self, layer: int = 0) -> dict[str, Shape]:
        """Names within `model.layers.{layer}` -> shapes.

        Matrices are [out, in], as Hugging Face stores them. The experts of a layer are two arrays,
        gate above up in the first.
        """
        hidden = self.hidden_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, hidden, self.attention_bias),
            "self_attn.k_proj": (keys, hidden, self.attention_bias),
            "self_attn.v_proj": (keys, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, queries, self.attention_output_bias),
        }
        shapes: dict[str, Shape] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.norms_after:
            shapes["pre_feedforward_layernorm.weight"] = (hidden,)
            shapes["post_feedforward_layernorm.weight"] = (hidden,)
        if self.layer_kinds[layer].sparse:
            linears |= self._dense("mlp.shared_expert", self.shared_expert_intermediate_size)
            shapes |= self._expert_shapes()
        else:
            linears |= self._dense("mlp", self.intermediate_size)
        for name, (num_out, num_in, has_bias) in linears.items():
            shapes[f"{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{name}.bias"] = (num_out,)
        if self.qk_norm:
            per_head = self.qk_norm_per_head
            shapes["self_attn.q_norm.weight"] = (self.head_dim if per_head else queries,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim if per_head else keys,)
        return shapes

    def _dense(self, prefix: str, ffn: int) -> dict[str, tuple[int, int, bool]]:
        """Projections of a SwiGLU block: rows, columns and whether they have a bias."""
        if not ffn:
            return {}
        return {
            f"{prefix}.gate_proj": (ffn, self.hidden_size, self.mlp_bias),
            f"{prefix}.up_proj": (ffn, self.hidden_size, self.mlp_bias),
            f"{prefix}.down_proj": (self.hidden_size, ffn, self.mlp_bias),
        }

    def _expert_shapes(self) -> dict[str, Shape]:
        hidden, ffn, experts = self.hidden_size, self.moe_intermediate_size, self.num_experts
        shapes = {
            "mlp.gate.weight": (experts, hidden),
            "mlp.experts.gate_up_proj": (experts, 2 * ffn, hidden),
            "mlp.experts.down_proj": (experts, hidden, ffn),
        }
        if self.shared_expert_intermediate_size:
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        return shapes

    def head_shapes(self) -> dict[str, Shape]:
        """Full names of the final norm and, untied, of the output projection -> shapes."""
        shapes: dict[str, Shape] = {"model.norm.weight": (self.hidden_size,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def parameter_shapes(self) -> dict[str, Shape]:
        """Full Hugging Face name -> shape of every parameter, bottom to top."""
        shapes = {
            f"model.embed_tokens.{name}": shape for name, shape in self.embedding_shapes().items()
        }
        for layer in range(self.num_hidden_layers):
            for name, shape in self.layer_shapes(layer).items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes | self.head_shapes()

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the token embedding (and, tied, of the output projection)."""
        return _count(self.embedding_shapes())

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer, of the largest where they differ."""
        return max(self._layer_counts)

    @property
    def _layer_counts(self) -> list[int]:
        kinds = self.layer_kinds
        of_kind = {kind: _count(self.layer_shapes(kinds.index(kind))) for kind in set(kinds)}
        return [of_kind[kind] for kind in kinds]

    @property
    def num_unvisited_expert_parameters(self) -> int:
        """Parameters of a sparse layer's routed experts that a token does not visit."""
        experts = self._expert_shapes() if self.num_experts else {}
        routed = sum(math.prod(s) for name, s in experts.items() if name.startswith("mlp.experts."))
        share = self.num_experts - self.num_experts_per_tok
        return routed * share // max(self.num_experts, 1)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that take part in one token: all but the experts that it does not visit."""
        num_sparse = sum(kind.sparse for kind in self.layer_kinds)
        return self.num_parameters - num_sparse * self.num_unvisited_expert_parameters

    @property
    def num_head_parameters(self) -> int:
        """Parameters of the final norm and, untied, of the output projection."""
        return _count(self.head_shapes())

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied matrix counted once."""
        layers = sum(self._layer_counts)
        return self.num_embedding_parameters + layers + self.num_head_parameters


_POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
)


_EXPERT_FIELDS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "router_aux_loss_coef",
)


def _count(shapes: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def config_names() -> tuple[str, ...]:
    """Names that `named_config` knows."""
    return tuple(KNOWN_SHAPES)


def named_config(name: str) -> ModelConfig:
    """The configuration of a well-known model.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in KNOWN_SHAPES:
        raise ValueError(f"No preset is named {name!r}; known: {', '.join(KNOWN_SHAPES)}.")
    return ModelConfig(**KNOWN_SHAPES[name]())

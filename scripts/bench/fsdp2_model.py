"""A transformers decoder of a named shape under PyTorch's FSDP2, with random weights.

Built on the meta device and filled where the shards live, so that nothing large is ever made
elsewhere. Layers are compiled one by one (`torch.compile` shares the code among equal layers) and
sharded one by one; embedding, final norm and output projection belong to the root.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from linear_cross_entropy import LinearCrossEntropy, loss_and_logit_gradient
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.attention import SDPBackend

from slidedp_jax.models.config import ModelConfig

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def transformers_config(config: ModelConfig) -> Any:
    """The same model as a transformers configuration."""
    from transformers import AutoConfig

    if any(config.layer_windows):
        raise ValueError("sliding windows are not carried over to transformers here")
    rope = {
        name: value
        for name, value in dataclasses.asdict(config.rope_parameters).items()
        if value is not None
    }
    if rope["rope_type"] == "default":
        rope = {name: rope[name] for name in ("rope_type", "rope_theta")}
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "max_position_embeddings",
        "initializer_range",
    )
    # transformers 4 reads rope_theta and rope_scaling, 5 reads rope_parameters.
    return AutoConfig.for_model(
        config.model_type,
        **{name: getattr(config, name) for name in same},
        rope_theta=config.rope_parameters.rope_theta,
        rope_parameters=rope,
        use_cache=False,
    )


class LossModel(torch.nn.Module):
    """A causal language model whose forward pass ends in the loss."""

    def __init__(self, model: torch.nn.Module, *, loss_chunk_tokens: int, compiled: bool):
        super().__init__()
        self.causal_lm = model
        self._chunk_tokens = loss_chunk_tokens
        self._softmax = loss_and_logit_gradient
        if compiled:
            self._softmax = torch.compile(loss_and_logit_gradient, dynamic=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        """`scale` times the sum of token losses; `labels` belong to the position they are at."""
        hidden = self.causal_lm.model(input_ids=ids, use_cache=False).last_hidden_state
        return LinearCrossEntropy.apply(
            hidden.flatten(0, 1),
            self.causal_lm.lm_head.weight,
            labels.flatten(),
            scale,
            self._chunk_tokens,
            self._softmax,
        )


def build(
    config: ModelConfig,
    mesh: DeviceMesh,
    *,
    offload: bool,
    recompute: bool,
    compiled: bool,
    loss_chunk_tokens: int,
) -> LossModel:
    """The sharded model, bf16 compute on fp32 shards, gradients summed in fp32."""
    from transformers import AutoModelForCausalLM

    hf_config = transformers_config(config)
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation="sdpa"
        )
    causal_lm.tie_weights()
    count = sum(parameter.numel() for parameter in causal_lm.parameters())
    if count != config.num_parameters:
        raise AssertionError(f"{count} parameters here, {config.num_parameters} in the shape")
    model = LossModel(causal_lm, loss_chunk_tokens=loss_chunk_tokens, compiled=compiled)
    model.train()
    policies = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if offload
        else OffloadPolicy(),
    }
    layers = causal_lm.model.layers
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(_refuse_mask, with_kwargs=True)
        if compiled:
            # FSDP's hooks and the checkpoint stay outside of what is compiled.
            layer.forward = torch.compile(layer.forward, dynamic=False)
        if recompute:
            layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
        fully_shard(layers[number], **policies)
    fully_shard(model, **policies)
    _materialise(model, torch.device("cpu") if offload else torch.device(mesh.device_type))
    with torch.device(mesh.device_type):  # its buffers are not parameters and were lost
        causal_lm.model.rotary_emb = type(causal_lm.model.rotary_emb)(hf_config)
    return model


def _refuse_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        raise AssertionError("transformers made an attention mask; the causal kernel needs none")


@torch.no_grad()
def _materialise(model: torch.nn.Module, device: torch.device) -> None:
    """Random matrices, norms of one, biases of zero, drawn on the GPU where there is one."""
    model.to_empty(device=device)
    draw_on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(draw_on).manual_seed(0)
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        if parameter.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        values = torch.empty(local.shape, device=draw_on)
        local.copy_(values.normal_(0.0, 0.02, generator=generator))


def choose_attention(
    config: ModelConfig, rows: int, seq: int, names: Sequence[str]
) -> dict[str, Any]:
    """Time the named causal kernels on the GPU, leave only the fastest enabled, and name it.

    With all others disabled, a shape or mask that it cannot take is an error, not a slow path.
    """
    query = torch.randn(
        (rows, config.num_attention_heads, seq, config.head_dim),
        device="cuda",
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    key = torch.randn(
        (rows, config.num_key_value_heads, seq, config.head_dim),
        device="cuda",
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    ms: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            ms[name] = _attention_ms(BACKENDS[name], query, key)
        except RuntimeError as error:
            errors[name] = str(error)[:200]
    if not ms:
        raise RuntimeError(f"no causal attention kernel runs: {errors}")
    best = min(ms, key=ms.__getitem__)
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_flash_sdp(best == "flash")
    torch.backends.cuda.enable_cudnn_sdp(best == "cudnn")
    return {"kernel": best, "forward_backward_ms": ms, "errors": errors}


def _attention_ms(backend: SDPBackend, query: torch.Tensor, key: torch.Tensor) -> float:
    attend = torch.nn.functional.scaled_dot_product_attention
    gradient = torch.randn_like(query)
    with torch.nn.attention.sdpa_kernel(backend):
        for timed in (False, True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                out = attend(query, key, key, is_causal=True, enable_gqa=True)
                out.backward(gradient)
            torch.cuda.synchronize()
            if timed:
                return (time.perf_counter() - start) / 5 * 1e3
    raise AssertionError("unreachable")

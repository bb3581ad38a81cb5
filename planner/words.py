"""What categories of memory, phases and lanes of a step mean, in a few words each."""

from __future__ import annotations

from slidedp_jax.planner.timeline import Lane

CATEGORY_WORDS = {
    # Of a device.
    "layer_weights": "layers on their way and in use",
    "embedding_weights": "as copied and as used",
    "head_weights": "as copied and as used",
    "boundary_activations": "what passes between layers, for all tokens of a step",
    "layer_workspace": "what is live inside a layer",
    "recompute_residuals": "what backward reads of the recomputed forward",
    "layer_gradients": "being computed, summed and sent",
    "head_gradient": "being summed",
    "embedding_gradient": "in fp32, and as sent",
    "embedding_gradient_sum": "of the tied output projection, waiting",
    "packed_attention": "workspace of attention over packed rows",
    "logits": "of a part of the tokens at a time",
    "hidden_gradient": "of the last hidden states, added up over slices of the vocabulary",
    "kept_chunks": "layers whose results stay, so that they are not recomputed",
    "kept_attention": "layers whose attention is not recomputed",
    "decided": "choices that must not be made twice",
    "resident_state": "layers whose weights and optimizer state stay on the GPU",
    "resident_gradients": "their gradients, waiting",
    "batch_arrays": "token ids and labels",
    "allocator_fragmentation": "holes in the allocator's memory",
    # Of the host.
    "master_weights": "fp32 weights",
    "optimizer_state": "what the optimizer keeps of each parameter",
    "waiting_gradients": "of a step, until their norm is known",
    "state_in_passing": "of the layers being saved or read",
    "host_boundaries": "what passes between layers, from forward to backward",
    "resident_copies": "page-locked, for what a save takes of the state on the GPU",
    "pinned_pool_overhead": "XLA's page-locked memory comes in powers of two",
    "several_gpus": "measured with two GPUs beside all else",
    "compute_devices": "what the CPU devices that compute hold",
    # Of both.
    "runtime_reserve": "CUDA, XLA and Python themselves",
}
"""Category of `MemoryUse` -> what it is."""

PHASE_WORDS = {
    "embedding": "while the embedding is computed",
    "forward": "at the end of the forward pass",
    "loss": "while the loss is computed",
    "backward": "at the start of the backward pass",
    "recompute": "when the first layer is recomputed",
    "pack": "while a layer's gradient is summed",
    "first_backward": "at the end of the backward pass",
    "embedding_backward": "while the embedding's gradient is computed",
}
"""Phase in which a device's memory is largest -> when that is."""

LANE_WORDS: dict[Lane, str] = {
    "h2d": "copies to the GPU",
    "compute": "compute on the GPU",
    "d2h": "copies from the GPU",
    "host_update": "the optimizer on the CPU",
}
"""Lane of a step -> what is done on it."""

"""Frozen parameters in plans: sizes as the runtime lays them out, work as its programs do it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from lanes import mostly_thorough
from streamed_training import small_config, strategy, trainer

from slidedp_jax.models import decoder
from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.chunking import backward_chunks
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.memory import chunks_of, memory_use
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.step_time import step_time
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.state.freezing import frozen_names
from slidedp_jax.step.chunk_kinds import lowest_trained
from slidedp_jax.step.layer_functions import ChunkKind
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.transfer.device_map import DeviceMap
from slidedp_jax.transfer.routes import GradientPath, weight_path
from slidedp_jax.transfer.wire_programs import WirePrograms

PATTERNS = {
    "nothing": [],
    "embedding": ["model.embed_tokens.*"],
    "embedding_and_lower": ["model.embed_tokens.*", "model.layers.[01].*"],
    "one_in_the_middle": ["model.layers.2.*"],
    "all_but_norms": ["*_proj.weight", "model.embed_tokens.*", "lm_head.*"],
    "all_but_the_head": ["model.embed_tokens.*", "model.layers.*"],
    "attention": ["*self_attn*"],
}
BATCH = BatchShape(num_rows=4, seq_length=512)
H200 = replace(named_hardware("h200"), visit_dispatch_s=0.0)


def frozen_workload(config, patterns):
    names = frozen_names(config.parameter_shapes(), patterns)
    return Workload.from_config(config, frozen=names)


@pytest.mark.parametrize("tied", mostly_thorough([False, True], {False}))
@pytest.mark.parametrize("name", mostly_thorough(PATTERNS, {"embedding_and_lower"}))
@pytest.mark.parametrize("layers_per_chunk", mostly_thorough([1, 3], {1}))
def test_sizes_are_those_of_the_runtime(name, tied, layers_per_chunk):
    config = small_config(tied=tied)
    patterns = [p for p in PATTERNS[name] if not (tied and p.startswith("lm_head"))]
    run = strategy(layers_per_chunk=layers_per_chunk)
    planned = chunks_of(frozen_workload(config, patterns), run)
    with trainer(config, optax.adamw(1e-3), run, frozen=patterns) as it:
        for chunk, layout in zip(planned.all, it.store.layouts, strict=True):
            trained = sum(part.num_parameters for part in layout.trained_parts)
            padded = sum(part.padded_size for part in layout.trained_parts)
            assert chunk.trained_parameters == trained
            # optax decays all alike here: one treatment group and its padding less.
            assert 0 <= chunk.trained_padded - padded <= run.num_host_devices * run.block_size
            assert chunk.padded_parameters - chunk.trained_padded == (layout.padded_size - padded)
        start = max(1, lowest_trained(it.store.layouts)) - 1
        assert planned.forward_only == start
        assert backward_chunks(frozen_workload(config, patterns), layers_per_chunk) == (
            len(planned.layers) - start
        )


def compiled_flops(config, trained):
    """Of a layer's backward program with recomputation, as XLA counts them."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    on_devices = DeviceMap(mesh, jnp.float32)
    gradients = GradientPath("reduce_scatter", mesh, sharding, jnp.dtype(jnp.float32))
    model = decoder.build(config)
    programs = ComputePrograms(
        model,
        on_devices,
        WirePrograms(on_devices, weight_path("replicate", mesh), gradients),
        loss_chunk_tokens=512,
    )
    names = model.layers[0].parameter_names()
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    tree = jax.tree.map(lambda leaf: shape(leaf.shape, jnp.float32), model.layers[0].shapes)
    flags = tuple(trained(name) for name in names)
    kind = ChunkKind(layer_fns=(model.layer_fns[0],), widen=False, trained=(flags,))
    x = shape((2, 512, config.hidden_size), jnp.float32)
    batch = {name: shape((2, 512), jnp.int32) for name in ("targets", "positions", "segment_ids")}
    lowered = programs.backward(kind).lower((tree,), x, x, batch, None)
    return lowered.compile().cost_analysis()["flops"]


FEW = replace(
    small_config(), vocab_size=4096, hidden_size=128, num_hidden_layers=1, layer_windows=(None,)
)
"""Products are nearly all of its operations."""


@pytest.mark.parametrize(
    "part",
    mostly_thorough(["mlp", "self_attn", "_proj", "q_proj"], {"_proj"}),
)
def test_products_left_out_are_those_that_the_compiled_layer_lacks(part):
    def is_trained(name):
        return part not in name

    patterns = [f"model.layers.0.*{part}*"]
    whole, less = (
        chunk_durations(frozen_workload(FEW, own), BATCH, strategy(), H200)[1].executed_flops
        for own in ([], patterns)
    )
    compiled = compiled_flops(FEW, lambda name: True) - compiled_flops(FEW, is_trained)
    # The plan is for 4 rows, the program of 2; what is not a product is a few hundredths.
    assert 2 * compiled == pytest.approx(whole - less, rel=0.03)


def durations(config, patterns, run, **changes):
    workload = frozen_workload(config, patterns)
    return chunk_durations(workload, BATCH, run, replace(H200, **changes))


def test_below_what_is_trained_nothing_runs_backward():
    config, run = (
        small_config(),
        strategy(rows_per_microbatch=4, host_boundaries=1, host_boundary_bytes=100),
    )
    whole = durations(config, [], run)
    embed, *layers, head = durations(config, PATTERNS["embedding_and_lower"], run)
    assert [chunk.goes_back for chunk in (embed, *layers, head)] == [False] * 3 + [True] * 3
    assert [chunk.trained for chunk in (embed, *layers, head)] == [False] * 3 + [True] * 3
    for chunk in (embed, *layers[:2]):
        assert chunk.backward_s == chunk.download_s == chunk.update_s == 0.0 < chunk.upload_s
    assert layers[0].executed_flops < whole[1].executed_flops / 3
    assert layers[0].forward_s == pytest.approx(whole[1].forward_s)
    # No gradient by the input of the lowest: the projections before attention.
    spared = 2 * BATCH.num_tokens * 32 * (4 * 16 + 2 * 2 * 16)
    assert config.num_attention_heads == 4 and config.num_key_value_heads == 2
    assert layers[2].executed_flops == pytest.approx(whole[3].executed_flops - spared)
    assert layers[3].executed_flops == pytest.approx(whole[4].executed_flops)
    assert [chunk.boundary_bytes > 0 for chunk in layers] == [False, False, True, False]


def test_a_frozen_layer_above_passes_gradients_on():
    config, run = small_config(), strategy(rows_per_microbatch=4)
    whole, frozen = (durations(config, PATTERNS[n], run) for n in ("nothing", "one_in_the_middle"))
    weights = 32 * (2 * 4 * 16 + 2 * 2 * 16 + 3 * 48)
    lacks = whole[3].executed_flops - frozen[3].executed_flops
    assert lacks == pytest.approx(2 * BATCH.num_tokens * weights)
    assert frozen[3].goes_back and not frozen[3].trained
    assert frozen[3].upload_s == pytest.approx(whole[3].upload_s, rel=0.2)
    assert frozen[3].download_bytes == frozen[3].update_bytes == 0.0
    others = [number for number in range(6) if number != 3]
    assert [frozen[n] for n in others] == [whole[n] for n in others]


@pytest.mark.parametrize(
    ("tied", "patterns", "products"),
    [
        (False, [], 3),
        (False, ["lm_head.*"], 2),
        (False, ["model.embed_tokens.*", "model.layers.*"], 3),  # the norm reads what is below
        (False, ["model.embed_tokens.*", "model.layers.*", "model.norm.*"], 2),
        (True, ["model.embed_tokens.*"], 2),
        (True, ["model.layers.*", "model.norm.*"], 3),
    ],
)
def test_products_of_the_head(tied, patterns, products):
    config = small_config(tied=tied)
    head = durations(config, patterns, strategy(rows_per_microbatch=4))[-1]
    assert head.executed_flops == products * 2 * BATCH.num_tokens * 97 * 32


@pytest.mark.parametrize("policy", ["eager", "deferred"])
@pytest.mark.parametrize("name", mostly_thorough(PATTERNS, {"embedding", "one_in_the_middle"}))
def test_no_schedule_beats_its_bound_and_less_work_takes_no_longer(name, policy):
    config = named_config("qwen3-0.6b")
    patterns = [p for p in PATTERNS[name] if not p.startswith("lm_head")]
    for hardware in (H200, replace(H200, host_update_params_per_s=1e8)):
        run = replace(
            strategy(rows_per_microbatch=4, update_policy=policy), compute_dtype="bfloat16"
        )
        whole, part = (
            step_time(frozen_workload(config, own), BATCH, run, hardware) for own in ([], patterns)
        )
        assert part.lower_bound_s <= part.step_s <= part.upper_bound_s * 1.001
        assert part.step_s <= whole.step_s * 1.001 and part.model_flops <= whole.model_flops
        assert part.executed_flops >= part.model_flops * 0.999


def test_state_of_frozen_parts_is_their_weights():
    config, run = named_config("qwen3-0.6b"), strategy(rows_per_microbatch=4)
    workload = frozen_workload(config, ["model.embed_tokens.*", "model.layers.*"])
    host = memory_use(workload, BATCH, run, H200).host
    assert host["master_weights"] == pytest.approx(4 * config.num_parameters, rel=0.01)
    assert host["optimizer_state"] == 8 * 256 * 8  # of 1,024 in the last norm, padded
    assert host["waiting_gradients"] == 4 * 256 * 8
    resident = replace(run, resident_chunks=3)
    device = memory_use(workload, BATCH, resident, H200).device
    layer = chunks_of(workload, run).layers[0]
    in_all = chunks_of(workload, run).embed.padded_parameters + 2 * layer.padded_parameters
    assert device["resident_state"] == 4 * in_all


@pytest.mark.parametrize("name", mostly_thorough(PATTERNS, {"embedding_and_lower"}))
def test_the_search_keeps_no_more_than_runs_backward(name):
    config = named_config("qwen3-0.6b")
    patterns = [p for p in PATTERNS[name] if not p.startswith("lm_head")]
    workload = frozen_workload(config, patterns)
    found = plan(workload, BatchShape(num_rows=8, seq_length=4096), named_hardware("h200"))
    back = backward_chunks(workload, found.strategy.layers_per_chunk)
    assert found.strategy.kept_chunks + found.strategy.attention_chunks <= back
    assert found.strategy.host_boundaries <= back


def test_the_host_takes_no_more_inputs_than_run_backward():
    config = named_config("qwen3-4b")
    layers = ("?", "1?", "2[0-5]")
    frozen = ["model.embed_tokens.*", *(f"model.layers.{which}.*" for which in layers)]
    workload = frozen_workload(config, frozen)
    hardware = named_hardware("rtx4090", num_devices=2)
    batch = BatchShape(num_rows=64, seq_length=4096)
    choices = Choices(gradient_route="host_sum")
    found = plan(workload, batch, hardware, device_budget_bytes=20 * 2**30, choices=choices)
    assert found.strategy.gradient_route == "host_sum"
    assert found.strategy.host_boundaries <= backward_chunks(
        workload, found.strategy.layers_per_chunk
    )

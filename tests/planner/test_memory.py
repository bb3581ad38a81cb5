"""Byte counts worked out by hand for a model small enough to count on paper."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidedp_jax.models.config import ModelConfig, named_config
from slidedp_jax.planner import device_phases as phases_file
from slidedp_jax.planner import device_sizes, host_use
from slidedp_jax.planner.chunking import chunk_stages, padded_size
from slidedp_jax.planner.device_phases import device_phases, packed_attention_bytes
from slidedp_jax.planner.hardware import GIB, MIB
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.pinned_pool import pool_regions, resident_copy_bytes
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.strategy import GRADIENTS_IN_FLIGHT, Strategy
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload

# Groups: 30 decayed + 3 not, in blocks of 4 over 2 host devices: 8 + 1 = 9 -> 10 blocks = 40.
LAYER = StageWork(
    name="layer",
    group_parameters=(30, 3),
    matmul_parameters=30,
    residual_elements=7,
    forward_workspace_elements=2,
    backward_workspace_elements=5,
)


def _workload(num_layers: int, *, tied: bool) -> Workload:
    return Workload(
        name="paper",
        embed=StageWork(name="embed", group_parameters=(40,)),
        layers=(LAYER,) * num_layers,
        head=StageWork(name="head", group_parameters=(4,) if tied else (40, 4)),
        tied=tied,
        hidden_size=4,
        vocab_size=10,
    )


BATCH = BatchShape(num_rows=8, seq_length=16)
STRATEGY = Strategy(
    layers_per_chunk=2,
    rows_per_microbatch=2,
    num_microbatches=2,
    num_host_devices=2,
    block_size=4,
    loss_chunk_tokens=8,
)


def test_padding_is_per_group_to_blocks_and_per_chunk_to_devices():
    assert padded_size((30, 3), 4, 2) == 40
    assert padded_size((60, 6), 4, 2) == (15 + 2 + 1) * 4
    assert padded_size((), 4, 2) == 0
    chunks = chunk_stages(_workload(3, tied=True), 2, 4, 2)
    assert [chunk.name for chunk in chunks.all] == ["embed", "layers.0-1", "layers.2-2", "head"]
    assert [chunk.padded_parameters for chunk in chunks.all] == [40, 72, 40, 8]
    assert [chunk.num_parameters for chunk in chunks.all] == [40, 66, 33, 4]


def test_each_gradient_more_in_flight_is_counted_wherever_gradients_leave(monkeypatch):
    """The runtime reads the same number (tests/training/test_gradients_in_flight.py)."""
    workload = _workload(3, tied=True)
    chunks = chunk_stages(workload, 2, 4, 2)
    now = device_phases(workload, chunks, BATCH, STRATEGY, 1)
    for file in (phases_file, device_sizes):
        monkeypatch.setattr(file, "GRADIENTS_IN_FLIGHT", GRADIENTS_IN_FLIGHT + 1)
    more = device_phases(workload, chunks, BATCH, STRATEGY, 1)
    added = {name: sum(more[name].values()) - sum(now[name].values()) for name in now}
    wire = 2 * 72
    assert added == {name: wire if "backward" in name or name == "pack" else 0 for name in now}


def test_device_phases_by_hand_tied_on_two_devices():
    workload = _workload(3, tied=True)
    chunks = chunk_stages(workload, 2, 4, 2)
    strategy = replace(STRATEGY, weight_route="shard_all_gather")
    phases = device_phases(workload, chunks, BATCH, strategy, 2)
    boundary = 2 * 16 * 4 * 2 * 2  # rows, tokens, hidden, bf16, microbatches
    window = 2 * (2 * 72) + 2 * 72 / 2  # in use, in transition; next one's half
    batch_arrays = 4 * 4 * 2 * 16 * 2
    assert phases["embedding"] == {
        "layer_weights": 72,
        "embedding_weights": 2 * 2 * 40,
        "boundary_activations": boundary,
        "batch_arrays": batch_arrays,
    }
    assert phases["forward"] == {
        "layer_weights": window,
        "embedding_weights": 80,
        "boundary_activations": 3 * boundary,
        "layer_workspace": 32 * 2 * 2,
        "batch_arrays": batch_arrays,
    }
    assert phases["loss"] == {
        "layer_weights": window,
        "embedding_weights": 80,
        "head_weights": 2 * 2 * 8,
        "boundary_activations": 4 * boundary,
        "logits": (4 + 2) * 8 * 10,  # and their gradient
        "head_gradient": 2 * 4 * 40,  # of the tied matrix: of a microbatch, and of all
        "batch_arrays": batch_arrays,
    }
    assert phases["backward"] == {
        "layer_weights": window,
        "boundary_activations": 3 * boundary + boundary / 2,
        "recompute_residuals": 32 * 2 * (7 + 7),
        "layer_workspace": 32 * 2 * 5,
        # fp32 sum, bf16 summand; one leaving; trees of the chunk above and packed, being summed.
        "layer_gradients": 66 * (4 + 2) + 2 * 72 / 2 + 66 * 4 + 72 * 4,
        "embedding_gradient_sum": 4 * 40,
        "batch_arrays": batch_arrays,
    }
    assert phases["pack"] == {
        "layer_weights": window,
        "boundary_activations": 3 * boundary,
        # fp32 trees, packed; rounded halves of this and of the chunk above.
        "layer_gradients": 66 * 4 + 72 * 4 + 2 * (2 * 72 / 2),
        "embedding_gradient_sum": 4 * 40,
        "batch_arrays": batch_arrays,
    }
    assert phases["embedding_backward"] == {
        "layer_weights": 72,
        "boundary_activations": boundary,
        "layer_gradients": 72,
        "embedding_gradient_sum": 160,
        "embedding_gradient": 40 * 4 + 40,
        "batch_arrays": batch_arrays,
    }


def test_one_device_one_microbatch_untied_drops_sums_and_packed_copies():
    workload = _workload(2, tied=False)
    chunks = chunk_stages(workload, 1, 4, 2)
    strategy = replace(STRATEGY, layers_per_chunk=1, rows_per_microbatch=8, num_microbatches=1)
    phases = device_phases(workload, chunks, BATCH, strategy, 1)
    assert phases["backward"]["layer_weights"] == 3 * 2 * 40
    # The head's (40 + 4 -> 48 padded) may still be on its way.
    assert phases["backward"]["layer_gradients"] == 33 * 2 + 2 * 48
    assert phases["pack"]["layer_gradients"] == 33 * 2 + 2 * 40 + 2 * 40 + 2 * 48
    assert "embedding_gradient_sum" not in phases["backward"]
    assert "embedding_weights" not in phases["forward"]
    assert phases["loss"]["head_gradient"] == (4 + 2) * 44  # the sum in fp32, the result in bf16


def test_of_kept_chunks_only_the_rest_is_made_anew():
    """Two of three chunks are kept; below them, everything is made anew, but they are gone."""
    workload = _workload(3, tied=False)
    chunks = chunk_stages(workload, 1, 4, 2)
    strategy = replace(STRATEGY, layers_per_chunk=1)
    recomputing = device_phases(workload, chunks, BATCH, strategy, 1)
    assert "recompute" not in recomputing
    assert recomputing["backward"]["recompute_residuals"] == 32 * 2 * 7
    some = device_phases(workload, chunks, BATCH, replace(strategy, kept_chunks=2), 1)
    kept = 7  # nothing is said of what a kept layer keeps, so all
    assert some["backward"]["recompute_residuals"] == 32 * 2 * (7 - kept)
    assert some["recompute"]["recompute_residuals"] == 32 * 2 * 7
    assert "kept_chunks" not in some["recompute"]
    boundary = 2 * 16 * 4 * 2 * 2
    assert some["recompute"]["boundary_activations"] == 2 * boundary + boundary / 2
    every = device_phases(workload, chunks, BATCH, replace(strategy, kept_chunks=3), 1)
    assert "recompute" not in every
    assert every["first_backward"]["recompute_residuals"] == 0


def test_fp32_compute_doubles_weights_and_gradients():
    workload = _workload(2, tied=False)
    chunks = chunk_stages(workload, 1, 4, 2)
    half = device_phases(workload, chunks, BATCH, STRATEGY, 1)["backward"]
    full_strategy = replace(STRATEGY, compute_dtype="float32")
    full = device_phases(workload, chunks, BATCH, full_strategy, 1)["backward"]
    assert full["layer_weights"] == 2 * half["layer_weights"]
    assert full["recompute_residuals"] == 2 * half["recompute_residuals"]


@pytest.mark.parametrize(
    ("gradient_route", "compute_dtype", "bytes_per_parameter"),
    [
        ("reduce_scatter", "bfloat16", 2),
        ("host_sum", "bfloat16", 8),
        ("reduce_scatter", "float32", 4),
    ],
)
def test_host_bytes_by_hand(gradient_route, compute_dtype, bytes_per_parameter):
    hardware = named_hardware("h200", num_devices=4)
    strategy = replace(
        STRATEGY,
        gradient_route=gradient_route,
        compute_dtype=compute_dtype,
        num_host_devices=4,
    )
    host = memory_use(_workload(4, tied=True), BATCH, strategy, hardware).host
    # Blocks of 4 on 4 devices: embed 40 -> 48, two chunks 60 + 6 -> 80 each, head 4 -> 16.
    padded = 48 + 2 * 80 + 16
    assert host["master_weights"] == 4 * padded
    assert host["optimizer_state"] == 8 * padded
    assert host["waiting_gradients"] == bytes_per_parameter * padded
    assert host["pinned_pool_overhead"] == 2 * MIB - bytes_per_parameter * padded
    assert host["runtime_reserve"] == 4 * hardware.host_reserve_bytes
    assert host["several_gpus"] == pytest.approx(0.87 * GIB * math.sqrt(12 * padded / GIB))
    alone = memory_use(_workload(4, tied=True), BATCH, strategy, named_hardware("h200")).host
    assert alone["runtime_reserve"] == hardware.host_reserve_bytes
    assert "several_gpus" not in alone


def test_resident_state_by_hand():
    """Embedding 48, chunks of 80, head 16 elements over 4 GPUs; 12 bytes of state."""
    hardware = named_hardware("h200", num_devices=4)
    strategy = replace(STRATEGY, num_host_devices=4)
    on_host = memory_use(_workload(4, tied=True), BATCH, strategy, hardware)
    strategy = replace(strategy, resident_chunks=2)
    resident = memory_use(_workload(4, tied=True), BATCH, strategy, hardware)
    assert resident.device["resident_state"] == 12 * (48 + 80) / 4
    assert "resident_state" not in on_host.device
    assert resident.device["allocator_fragmentation"] == pytest.approx(
        0.02
        * sum(
            size
            for name, size in resident.device.items()
            if name not in ("allocator_fragmentation", "runtime_reserve")
        )
    )
    assert resident.host["waiting_gradients"] == 2 * (80 + 16)
    assert resident.host["master_weights"] == 4 * (80 + 16)
    assert resident.host["optimizer_state"] == 8 * (80 + 16)
    # Two neighbouring stages (embedding and a layer) pass through host memory when state is saved;
    # when it is read, one stage and two chunks that are gathered.
    assert resident.host["state_in_passing"] == 12 * (40 + 48 + 80)
    assert on_host.host["state_in_passing"] == 12 * (40 + 33)
    assert on_host.host["optimizer_state"] == 8 * (48 + 80 + 80 + 16)


def test_gradients_of_resident_chunks_wait_for_the_next_step():
    workload = _workload(4, tied=True)
    chunks = chunk_stages(workload, 2, 4, 4)
    embed, layers = 48, 80
    strategy = replace(STRATEGY, num_host_devices=4)
    assert not any(
        "resident_gradients" in phase
        for phase in device_phases(workload, chunks, BATCH, strategy, 4).values()
    )
    strategy = replace(strategy, resident_chunks=2, kept_chunks=2)
    phases = device_phases(workload, chunks, BATCH, strategy, 4)
    waiting = {name: phase.get("resident_gradients") for name, phase in phases.items()}
    assert waiting == {
        "embedding": 2 * (embed + layers) / 4,
        "forward": None,
        "loss": None,
        "backward": None,
        "pack": None,
        "first_backward": 2 * layers / 4,
        "embedding_backward": 2 * layers / 4,
    }
    # The last layer chunk's backward finds all kept chunks, the first one's only its own.
    kept = [phases[name]["kept_chunks"] for name in ("backward", "first_backward")]
    assert kept[1] == kept[0] / 2
    assert phases["first_backward"]["boundary_activations"] == 2.5 * 2 * 16 * 4 * 2 * 2


def test_what_is_decided_stays_until_the_chunk_runs_backward():
    plain = _workload(4, tied=True)
    layers = tuple(replace(LAYER, decided_elements=n) for n in (3, 0, 0, 5))
    workload = replace(plain, layers=layers)
    for kept_chunks in (0, 2):
        strategy = replace(STRATEGY, kept_chunks=kept_chunks)
        phases, others = (
            device_phases(w, chunk_stages(w, 2, 4, 2), BATCH, strategy, 1)
            for w in (workload, plain)
        )
        # 2 microbatches of 2 rows of 16 tokens, 2 bytes; of the first chunk 3 elements.
        assert {name: phase.pop("decided", None) for name, phase in phases.items()} == {
            "embedding": None,
            "forward": 64 * 2 * 8,
            "loss": 64 * 2 * 8,
            "backward": 64 * 2 * 8,
            "pack": 64 * 2 * 8,
            "first_backward": 64 * 2 * 3,
            "embedding_backward": None,
        }
        assert phases == others


def test_other_optimizers_are_bytes_per_parameter():
    hardware = named_hardware("h200")
    adam = memory_use(_workload(2, tied=True), BATCH, STRATEGY, hardware)
    momentum = memory_use(
        _workload(2, tied=True), BATCH, STRATEGY, hardware, optimizer_state_bytes=2
    )
    assert momentum.host["optimizer_state"] == adam.host["optimizer_state"] / 4


def test_cpu_backend_charges_devices_to_the_host_and_has_no_pool():
    hardware = named_hardware("cpu", num_devices=2)
    use = memory_use(_workload(2, tied=True), BATCH, STRATEGY, hardware)
    assert use.host["compute_devices"] == 2 * use.device_bytes
    assert use.host["pinned_pool_overhead"] == 0


def test_pool_regions_by_hand():
    assert pool_regions([]) == ()
    assert pool_regions([1]) == (2 * MIB,)
    # 3 of 192 MiB and 64 MiB for others are 640 = 128 + 512 MiB, where only two find a place; so do
    # they in all sums of powers of two up to 256 + 512.
    assert pool_regions([192 * MIB] * 3) == (256 * MIB, 512 * MIB)


def test_the_pool_has_room_for_what_else_is_copied():
    """Two of 128 MiB fill 256; ids and losses need some more."""
    assert pool_regions([128 * MIB] * 2) == (64 * MIB, 256 * MIB)


def test_the_pool_is_made_for_gradients_in_the_order_of_backward(monkeypatch):
    """The head's first, the embedding's last; of resident chunks, what a save copies of them."""
    asked = []
    monkeypatch.setattr(host_use, "pool_regions", lambda requests: asked.append(requests) or (7,))
    host_use._pool.cache_clear()
    workload = _workload(8, tied=True)
    for resident_chunks in (0, 2):
        strategy = replace(STRATEGY, resident_chunks=resident_chunks)
        use = memory_use(workload, BATCH, strategy, named_hardware("h200"))
        assert use.pinned_pool_bytes == 7
    # Blocks of 4 on 2 devices: embed 40, four chunks of two layers 72, head 8; 2 bytes each of
    # gradients, and 4 of what stays.
    assert asked == [[0, 16, *[144] * 4, 80], [4 * (40 + 72), 16, *[144] * 3]]
    host_use._pool.cache_clear()


def test_a_save_has_room_for_the_largest_array_that_stays():
    assert resident_copy_bytes([]) == 0
    assert resident_copy_bytes([1000, 2000]) == 12000  # all of them
    layers, embedding = [50 * 10**6] * 20, 400 * 10**6
    assert resident_copy_bytes(layers) == 768 * MIB
    assert resident_copy_bytes([embedding, *layers]) == 4 * embedding


def test_room_for_a_save_is_planned_on_gpus_alone():
    workload, strategy = _workload(8, tied=True), replace(STRATEGY, resident_chunks=2)
    host = memory_use(workload, BATCH, strategy, named_hardware("h200")).host
    assert host["resident_copies"] == 4 * (40 + 72)
    unified = replace(named_hardware("h200"), unified_memory=True)
    assert "resident_copies" not in memory_use(workload, BATCH, strategy, unified).host
    assert "resident_copies" not in memory_use(workload, BATCH, STRATEGY, unified).host
    host_use._pool.cache_clear()


@given(st.lists(st.floats(1, 4 * GIB), min_size=1, max_size=40))
def test_pool_regions_hold_all_requests_in_their_order(requests):
    """Ascending powers of two, so that XLA's pool makes each in its own size; placed best fit."""
    regions = pool_regions(requests)
    assert list(regions) == sorted(set(regions))
    assert all(region.bit_count() == 1 and region >= 2 * MIB for region in regions)
    free = list(regions)
    for request in requests:
        room = min(room for room in free if room >= request)
        free[free.index(room)] = room - request


def test_the_pool_of_real_gradients_wastes_little():
    """Layers first, then the embedding, as backward sends those of a tied 4B model."""
    requests = [202 * MIB] * 36 + [778 * MIB]
    assert sum(pool_regions(requests)) < 1.15 * sum(requests)


def test_halving_the_loss_chunk_halves_the_logits():
    workload = Workload.from_config(named_config("qwen3-0.6b"))
    batch = BatchShape(num_rows=1, seq_length=16384)
    uses = [
        memory_use(
            workload,
            batch,
            Strategy(
                layers_per_chunk=1,
                rows_per_microbatch=1,
                num_microbatches=1,
                loss_chunk_tokens=size,
            ),
            named_hardware("h200"),
        )
        for size in (2048, 1024)
    ]
    assert [use.device_phase for use in uses] == ["loss", "loss"]
    assert uses[0].device["logits"] == 2 * uses[1].device["logits"]
    assert uses[1].device["logits"] == 1024 * 151936 * (4 + 2)


def test_a_loss_that_holds_all_logits_needs_them_for_a_whole_microbatch():
    described = Workload.from_config(named_config("qwen3-0.6b"))
    workload = replace(described, own_loss_tokens=math.inf)
    strategy = Strategy(
        layers_per_chunk=1, rows_per_microbatch=2, num_microbatches=3, loss_chunk_tokens=256
    )
    batch = BatchShape(num_rows=6, seq_length=4096)
    use = memory_use(workload, batch, strategy, named_hardware("h200"))
    assert use.device_phase == "loss"
    assert use.device["logits"] == 2 * 4096 * 151936 * 4 * 3
    own = replace(described, own_loss_tokens=512)
    use = memory_use(own, batch, strategy, named_hardware("h200"))
    assert use.device["logits"] == 512 * 151936 * 4 * 3


def _config(num_layers: int, hidden: int, *, tied: bool) -> ModelConfig:
    return replace(
        named_config("tiny-tied" if tied else "tiny"),
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        layer_windows=(),
    )


@given(
    layers=st.integers(1, 12),
    chunk=st.integers(1, 6),
    rows=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    num_devices=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
)
def test_more_of_anything_never_needs_less(layers, chunk, rows, microbatches, num_devices, tied):
    hardware = named_hardware("h200", num_devices=num_devices)

    def use(num_layers=layers, hidden=64, num_rows=rows, num_microbatches=microbatches, seq=32):
        return memory_use(
            Workload.from_config(_config(num_layers, hidden, tied=tied)),
            BatchShape(num_rows=num_devices * num_rows * num_microbatches, seq_length=seq),
            Strategy(
                layers_per_chunk=chunk,
                rows_per_microbatch=num_rows,
                num_microbatches=num_microbatches,
                num_host_devices=num_devices,
                block_size=64,
            ),
            hardware,
        )

    base = use()
    for larger in (
        use(num_layers=layers + 1),
        use(hidden=96),
        use(num_rows=rows + 1),
        use(num_microbatches=microbatches + 1),
        use(seq=33),
    ):
        assert larger.device_bytes >= base.device_bytes
        assert larger.host_bytes >= base.host_bytes


def test_packed_attention_grows_with_documents_as_measured():
    """H200, 8 rows of 4096 tokens, 32 heads of 128: 2,960, 5,024 and 17,408 MiB for 1, 4, 16."""
    workload = Workload.from_config(named_config("qwen3-4b"))
    strategy = replace(STRATEGY, layers_per_chunk=1, rows_per_microbatch=8, num_microbatches=1)

    def packed_bytes(documents, compute_dtype="bfloat16"):
        batch = BatchShape(num_rows=8, seq_length=4096, documents_per_row=documents)
        return packed_attention_bytes(
            workload, batch, replace(strategy, compute_dtype=compute_dtype)
        )

    measured = {1: 2960, 4: 5024, 16: 17408}
    for documents, mib in measured.items():
        grown = packed_bytes(documents) - packed_bytes(1)
        assert grown / 2**20 == pytest.approx(mib - measured[1], rel=0.01)
    assert packed_bytes(16, "float32") == 0  # cuDNN is not used
    assert packed_bytes(None) == 0


def test_rows_with_many_documents_are_computed_in_smaller_microbatches():
    workload = Workload.from_config(named_config("qwen3-4b"))
    hardware = named_hardware("h200")
    rows = {}
    for documents in (None, 256):
        batch = BatchShape(num_rows=8, seq_length=4096, documents_per_row=documents)
        chosen = plan(workload, batch, hardware).chosen
        rows[documents] = chosen.strategy.rows_per_microbatch
        assert chosen.memory.device_bytes <= hardware.device_memory_bytes
    assert rows[256] < rows[None] == 8


def test_packed_rows_keep_statistics_once_per_document():
    """Float32 [rows * documents, heads, T] of each kept layer; whole rows keep [rows, ...]."""
    workload = Workload.from_config(named_config("qwen3-4b"))
    strategy = Strategy(
        layers_per_chunk=1, rows_per_microbatch=8, num_microbatches=1, kept_chunks=12
    )
    kept = {}
    for documents in (None, 16, 64):
        batch = BatchShape(num_rows=8, seq_length=4096, documents_per_row=documents)
        kept[documents] = memory_use(workload, batch, strategy, named_hardware("h200"))
    one = 4 * 8 * 4096 * 32 * 12  # bytes of one document's
    for documents in (16, 64):
        more = kept[documents].device["kept_chunks"] - kept[None].device["kept_chunks"]
        assert more == (documents - 1) * one

"""The head in slices of the vocabulary, as the planner counts it."""

from dataclasses import replace

import pytest

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.chunking import chunk_stages, padded_size
from slidedp_jax.planner.device_phases import device_phases
from slidedp_jax.planner.device_sizes import LOGITS_COPIES
from slidedp_jax.planner.durations import chunk_durations
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.memory import memory_use
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.search import plan
from slidedp_jax.planner.sliced_head import slice_counts, with_slices
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload

LAYER = StageWork(name="layer", group_parameters=(30,), matmul_parameters=30)
ROWS, TOKENS, HIDDEN, VOCAB = 2, 16, 4, 10
BATCH = BatchShape(num_rows=2 * ROWS, seq_length=TOKENS)
STRATEGY = Strategy(
    layers_per_chunk=1,
    rows_per_microbatch=ROWS,
    num_microbatches=2,
    num_host_devices=4,
    block_size=2,
    loss_chunk_tokens=8,
    vocab_slices=2,
)


def work(*, tied):
    return Workload(
        name="paper",
        embed=StageWork(name="embed", group_parameters=(VOCAB * HIDDEN,)),
        layers=(LAYER,) * 3,
        head=StageWork(
            name="head",
            group_parameters=(HIDDEN,) if tied else (VOCAB * HIDDEN, HIDDEN),
            matmul_parameters=VOCAB * HIDDEN,
        ),
        tied=tied,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        plain_vocabulary=True,
    )


def phases(strategy, *, tied):
    workload = work(tied=tied)
    chunks = chunk_stages(workload, 1, 2, 4, strategy.vocab_slices)
    return device_phases(workload, chunks, BATCH, strategy, 1)


def test_pieces_are_whole_rows():
    # 20 + 2 blocks of 2; a row is 2 blocks, so 4 pieces hold multiples of 8: 24 blocks.
    assert padded_size((40, 4), 2, 4, 4) == 48
    assert chunk_stages(work(tied=False), 1, 2, 4, 2).head.padded_parameters == 48
    # 7 blocks of 3 for rows of 7, 15 blocks: 4 x 7 of them.
    assert padded_size((43,), 3, 4, 7) == 28 * 3


def test_memory_of_the_second_pass_by_hand():
    slice_size, tokens = 48 / 2, 2 * ROWS * TOKENS
    loss = phases(STRATEGY, tied=False)["loss"]
    assert loss["head_weights"] == 2 * (48 + 2 * slice_size)
    assert loss["logits"] == LOGITS_COPIES * 4 * 8 * (slice_size / HIDDEN)
    assert loss["head_gradient"] == 4 * 4 * slice_size + 2 * 2 * slice_size
    assert loss["hidden_gradient"] == 4 * tokens * (HIDDEN + 4)
    lean = phases(replace(STRATEGY, slice_head_weights=True), tied=False)["loss"]
    assert lean["head_weights"] == 3 * 2 * slice_size


def test_of_a_tied_model_the_whole_gradient_waits_in_float32():
    table = 40  # 20 blocks, of whole rows in 4 pieces: 20 x 2 -> 24 blocks of 2
    padded = chunk_stages(work(tied=True), 1, 2, 4, 2).embed.padded_parameters
    assert padded == 48
    found = phases(STRATEGY, tied=True)
    assert found["loss"]["head_gradient"] == 4 * (padded + padded / 2)
    assert "embedding_weights" not in found["loss"]  # uploaded again
    assert found["embedding_backward"]["embedding_gradient_sum"] == 4 * table
    assert found["embedding_backward"]["embedding_gradient"] == (4 + 2 * 2) * padded / 2


def test_weights_in_slices_are_uploaded_for_either_pass():
    hardware = named_hardware("rtx4090")
    for tied in (False, True):
        once, twice = (
            chunk_durations(work(tied=tied), BATCH, strategy, hardware)[-1].upload_bytes
            for strategy in (STRATEGY, replace(STRATEGY, slice_head_weights=True))
        )
        assert twice - once == 2 * 48


def test_slices_are_whole_pieces_of_every_device():
    strategy = replace(STRATEGY, vocab_slices=1, num_host_devices=60)
    assert slice_counts(work(tied=True), strategy, 4) == [3, 5, 15]
    assert slice_counts(replace(work(tied=True), plain_vocabulary=False), strategy, 1) == []
    assert [
        (one.vocab_slices, one.slice_head_weights)
        for one in with_slices(work(tied=True), strategy, 4)
    ] == [(3, False), (15, False), (15, True)]


def test_one_pass_where_it_fits_and_two_where_it_does_not():
    """One more product of four is not taken for nothing."""
    workload = Workload.from_config(named_config("qwen3-14b"))
    batch = BatchShape(num_rows=2, seq_length=4096)
    hardware = replace(named_hardware("rtx4090"), host_memory_bytes=400 * GIB)

    def strategy(device_gib):
        return plan(workload, batch, hardware, device_budget_bytes=device_gib * GIB).strategy

    assert strategy(22).vocab_slices == 1
    assert strategy(11).vocab_slices > 1


def test_72b_on_four_cards_that_leave_20_gib():
    workload = Workload.from_config(named_config("qwen2.5-72b"))
    hardware = named_hardware("rtx4090", num_devices=4)
    hardware = replace(hardware, host_memory_bytes=1400 * GIB)
    found = plan(
        workload,
        BatchShape(num_rows=8, seq_length=4096),
        hardware,
        device_budget_bytes=20 * GIB,
    )
    assert found.strategy.vocab_slices > 1
    one_pass = replace(found.strategy, vocab_slices=1, slice_head_weights=False)
    need = memory_use(workload, BatchShape(num_rows=8, seq_length=4096), one_pass, hardware)
    assert need.device_bytes > found.job.device_budget_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_slices": 3}, "must divide"),
        ({"vocab_slices": 1, "slice_head_weights": True}, "weights are sliced where"),
    ],
)
def test_strategies_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(STRATEGY, **changes)

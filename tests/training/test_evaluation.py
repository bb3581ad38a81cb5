"""Evaluation is the training step's arithmetic: the same rows give the same bits.

At learning rate 0 a step leaves the weights as they are, so the loss that it reports is the one
that an evaluation of its batch must give.
"""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
from lanes import mostly_thorough
from streamed_training import small_config, strategy, trainer
from toy_layers import batches as toy_batches
from toy_layers import plan as toy_plan
from toy_layers import streamed
from toy_layers import trainer as toy_trainer

from slidedp_jax import UserError
from slidedp_jax.data import BatchSource, ExamplesBuilder

CONFIG = small_config(layers=3)
ROWS_PER_STEP = 5


def source(*, packing: bool, count: int = 11) -> BatchSource:
    """Documents of 3 to 24 tokens, the second half of each learnt; the last step has one row."""
    rng = np.random.default_rng(0)
    builder = ExamplesBuilder()
    for number in range(count * (2 if packing else 1)):
        length = 12 if packing else 3 + (7 * number) % 22
        ids = rng.integers(1, CONFIG.vocab_size, length).astype(np.int32)
        builder.append(ids, np.arange(length) >= length / 2, number)
    rows = BatchSource(
        builder.finish(), max_seq_length=24, step_size=ROWS_PER_STEP, packing=packing
    )
    assert rows.num_rows == count
    return rows


@pytest.mark.parametrize(
    "case",
    mostly_thorough(
        itertools.product((False, True), (1, 3), (1, 2), (0, 2)),
        {(False, 3, 2, 2)},  # packing, devices, microbatches, kept chunks
    ),
    ids=lambda case: "-".join(map(str, case)),
)
def test_the_batch_of_a_step_is_evaluated_to_its_loss(case):
    """Steps of five, five and one row."""
    packing, devices, micro, kept = case
    rows = source(packing=packing)
    plan = strategy(
        rows_per_microbatch=-(-ROWS_PER_STEP // (devices * micro)),
        num_microbatches=micro,
        kept_chunks=kept,
        num_host_devices=6,
    )
    with trainer(
        CONFIG,
        optax.sgd(0.0),
        plan,
        num_devices=devices,
        documents_per_row=rows.documents_per_row,
    ) as it:
        taken = [next(rows) for _ in range(rows.steps_per_epoch)]
        assert [len(batch.arrays["input_ids"]) for batch in taken] == [5, 5, 1]
        for batch in taken:
            metrics = it.step(batch.arrays)
            assert it.evaluate(batch.arrays) == (metrics.loss, batch.num_supervised_tokens)


def test_forward_is_the_steps_own_program_for_each_chunk():
    """A function whose value is another where it is differentiated, as a fused kernel's may be."""

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (1.5 * x, None), lambda _, dy: (1.5 * dy,))
    model = streamed(("plain", "plain", "plain"))
    fns = [lambda layer, x, batch, fn=fn: fn(layer, scaled(x), batch) for fn in model.layer_fns]
    model = dataclasses.replace(model, layer_fns=tuple(fns))
    batch, losses = toy_batches()[0], []
    for kept in (0, 1, 2):  # the lowest layer is never kept here
        with toy_trainer(model, toy_plan(1, 2, kept, 1), 1) as it:
            evaluated, _ = it.evaluate(batch)
            losses.append(it.step(batch).loss)
            assert evaluated == losses[-1]
    assert len(set(losses)) == 3


def test_several_batches_weigh_by_their_tokens():
    """Unequal batches, against the sums of the batches and one batch of all rows."""
    rows = source(packing=False)
    batches = [batch.arrays for batch in rows.one_epoch()]
    with trainer(CONFIG, optax.sgd(0.0), strategy(num_host_devices=6), num_devices=3) as it:
        together = it.evaluate(iter(batches))
        means = [it.evaluate(batch) for batch in batches]
        names = ("input_ids", "labels", "positions")
        at_once = it.evaluate({n: np.concatenate([b[n] for b in batches]) for n in names})
        with pytest.raises(UserError, match="no batch was given"):
            it.evaluate([])
    counts = [count for _, count in means]
    assert together[1] == at_once[1] == sum(counts) and len(set(counts)) == 3
    np.testing.assert_allclose(together[0], np.average([m for m, _ in means], weights=counts))
    np.testing.assert_allclose(together[0], at_once[0], rtol=1e-6)
    assert abs(together[0] - np.mean([m for m, _ in means])) > 1e-4  # weights matter here


def test_rows_that_fill_up_weigh_nothing():
    """One row on three devices in microbatches of two: five rows of padding beside it."""
    (row,) = [b.arrays for b in source(packing=False).one_epoch()][2:]
    figures = []
    for devices, rows in ((3, 2), (1, 1)):
        plan = strategy(rows_per_microbatch=rows, num_host_devices=6)
        with trainer(CONFIG, optax.sgd(0.0), plan, num_devices=devices) as it:
            figures.append(it.evaluate(row))
    assert figures[0][1] == figures[1][1]
    np.testing.assert_allclose(figures[0][0], figures[1][0], rtol=1e-6)

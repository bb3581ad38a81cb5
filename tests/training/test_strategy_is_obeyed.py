"""Every field of a strategy, and what the runtime does otherwise when it changes.

A new field needs a row here: what is seen of it in a run, as a function of the strategy.
"""

import contextlib
import dataclasses
import functools
import threading

import optax
import pytest
from plain_training import random_batch
from streamed_training import small_config, strategy

from slidedp_jax import Trainer, UserError
from slidedp_jax.models import decoder
from slidedp_jax.planner.chunking import padded_size
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.step.kept_programs import ONLY_ATTENTION
from slidedp_jax.tracer import Tracer

LAYERS, DEVICES, TOKENS = 4, 2, 8
CONFIG = small_config(layers=LAYERS)
BASE = strategy(rows_per_microbatch=1, num_microbatches=2, num_host_devices=2)

CHANGES = [
    {
        "layers_per_chunk": 2,
        "rows_per_microbatch": 2,
        "weight_route": "shard_all_gather",
        "kept_chunks": 2,
        "layer_block_tokens": 5,
        "resident_chunks": 2,
        "host_boundaries": 1,
        "host_boundary_bytes": 4096,
        "vocab_slices": 2,
        "slice_head_weights": True,
        "loss_chunk_tokens": 7,
        "num_host_devices": 4,
        "block_size": 128,
    },
    {
        "num_microbatches": 3,
        "gradient_route": "host_sum",
        "update_policy": "eager",
        "prefetch_depth": 2,
        "attention_chunks": 1,
        "compute_dtype": "bfloat16",
    },
]
"""Each field once. All of them are seen in every run, so several may change at a time."""


def layer_chunks(plan):
    return -(-LAYERS // plan.layers_per_chunk)


EXPECTED = {
    "layers_per_chunk": layer_chunks,
    "rows_per_microbatch": lambda plan: {DEVICES * plan.rows_per_microbatch},
    "num_microbatches": lambda plan: DEVICES * plan.rows_per_microbatch * plan.num_microbatches,
    "weight_route": lambda plan: DEVICES if plan.weight_route == "replicate" else 1,
    "gradient_route": lambda plan: DEVICES if plan.gradient_route == "host_sum" else 1,
    "update_policy": lambda plan: plan.update_policy == "eager",
    "prefetch_depth": lambda plan: 1 + plan.prefetch_depth,
    "kept_chunks": lambda plan: layer_chunks(plan) - max(1, plan.kept_chunks),
    "attention_chunks": lambda plan: plan.num_microbatches * plan.attention_chunks,
    "resident_chunks": lambda plan: layer_chunks(plan) + 2 - plan.resident_chunks,
    "host_boundaries": lambda plan: plan.num_microbatches * plan.host_boundaries,
    "host_boundary_bytes": lambda plan: plan.num_microbatches * plan.host_boundary_bytes * DEVICES,
    "layer_block_tokens": lambda plan: {plan.layer_block_tokens} - {0},
    "loss_chunk_tokens": lambda plan: {plan.loss_chunk_tokens},
    "vocab_slices": lambda plan: plan.vocab_slices if plan.vocab_slices > 1 else 0,
    "slice_head_weights": lambda plan: 2 if plan.slice_head_weights else 0,
    "compute_dtype": lambda plan: {plan.compute_dtype},
    "num_host_devices": lambda plan: {plan.num_host_devices},
    "block_size": lambda plan: padded_size(
        (plan.layers_per_chunk * CONFIG.num_layer_parameters,),
        plan.block_size,
        plan.num_host_devices,
    ),
}
"""Per field, what `seen` says under a strategy."""


class Watch(Tracer):
    """Names of what is issued, and whether an update ended before the last gradient was sent."""

    def __init__(self, patience_s):
        self.names, self.updated_meanwhile = [], False
        self._patience_s = patience_s
        self._committed = threading.Event()

    def begin(self):
        self.names.clear()
        self._committed.clear()

    @contextlib.contextmanager
    def span(self, lane, name):
        if name == "download embed":
            self.updated_meanwhile = self._committed.wait(self._patience_s)
        self.names.append(name)
        yield
        if name.startswith("commit"):
            self._committed.set()

    def count(self, what):
        return sum(name.startswith(what) for name in self.names)


@functools.cache
def seen(plan: Strategy):
    """Per field, what the second of two steps shows of it."""
    model = decoder.build(CONFIG)
    loss_chunks, gradients, rows, kinds, layer_blocks = set(), [], set(), [], set()

    def head_loss_for(tokens):
        loss_chunks.add(tokens)
        return model.head_loss_for(tokens)

    def layer_fns_for(tokens):
        layer_blocks.add(tokens)
        return model.layer_fns_for(tokens)

    watch = Watch(patience_s=30.0 if plan.update_policy == "eager" else 0.2)
    batches = {
        number: random_batch(CONFIG, number, TOKENS, packed=False) for number in range(1, 14)
    }
    most = batches[DEVICES * plan.rows_per_microbatch * plan.num_microbatches]
    with Trainer(
        dataclasses.replace(model, head_loss_for=head_loss_for, layer_fns_for=layer_fns_for),
        optax.adamw(1e-3),
        strategy=plan,
        num_devices=DEVICES,
        max_grad_norm=None,
        kernel_form="whole",
        tracer=watch,
    ) as it:
        it.step(most)
        it.wait()
        run, send, backward = it._pipeline.step, it._gradients.send, it._programs.backward

        def noting_kind(kind, **options):
            kinds.append(kind.keeps)
            return backward(kind, **options)

        def noting_rows(weights, microbatches, *others):
            rows.update(batch["input_ids"].shape[0] for batch in microbatches)
            return run(weights, microbatches, *others)

        def noting_gradient(wires, layout):
            gradient = send(wires, layout)
            if hasattr(gradient, "pinned"):
                gradients.append((gradient, layout))
            return gradient

        it._pipeline.step, it._gradients.send = noting_rows, noting_gradient
        it._programs.backward = noting_kind
        watch.begin()
        fetched = it.weights.bytes_fetched
        it.step(most)
        it.wait()
        it._programs.backward = backward
        fetched = it.weights.bytes_fetched - fetched
        names, layouts = list(watch.names), {one.name: one for one in it.store.layouts}
        slices = [name for name in names if name.startswith("upload") and " slice " in name]
        others = {*slices, *(name for name in names if " input of " in name)}
        uploads = [n.split()[1] for n in names if n.startswith("upload") and n not in others]
        travelled = sum(
            plan.upload_bytes * layouts[name].padded_size
            for name in uploads
            if not layouts[name].resident
        )
        for name in slices:
            travelled += plan.upload_bytes * layouts[name.split()[1]].padded_size / len({*slices})
        uploads += sorted({name.split()[1] for name in slices})
        arrays = [array for gradient, _ in gradients for array in gradient.pinned]
        arrived = sum(s.data.nbytes for array in arrays for s in array.addressable_shards)
        sent = sum(plan.gradient_bytes * layout.padded_size for _, layout in gradients)
        on_host = [part for part in it.store.parts if hasattr(part, "views")]
        return {
            "layers_per_chunk": len({name for name in names if name.startswith("forward")}),
            "rows_per_microbatch": rows,
            "num_microbatches": max(n for n, batch in batches.items() if accepts(it, batch)),
            "weight_route": fetched / travelled,
            "gradient_route": arrived / sent,
            "update_policy": watch.updated_meanwhile,
            "prefetch_depth": sum(n.startswith("upload") for n in names[: names.index("embed")]),
            "kept_chunks": len(uploads) - len(layouts),
            "attention_chunks": kinds.count(ONLY_ATTENTION),
            "resident_chunks": len(gradients),
            "host_boundaries": len(places := it._pipeline._boundaries._places.values()),
            "host_boundary_bytes": sum(place.nbytes for place in places),
            "layer_block_tokens": layer_blocks,
            "loss_chunk_tokens": loss_chunks,
            "vocab_slices": len({*slices}),
            "slice_head_weights": len(slices) / len({*slices}) if slices else 0,
            "compute_dtype": {str(array.dtype) for array in arrays},
            "num_host_devices": {len(part.arrays[0].sharding.device_set) for part in on_host},
            "block_size": it.store.layouts[1].padded_size,
        }


def accepts(trainer, batch):
    try:
        trainer.passes.prepare(batch, training=True)
    except UserError as error:
        assert "the strategy was planned for" in str(error)
        return False
    return True


def test_every_field_has_its_row():
    names = {field.name for field in dataclasses.fields(Strategy)}
    names = sorted(names - {"num_hosts"})  # takes several processes: `test_many_hosts.py`
    say = "say here what the runtime does otherwise under the new field"
    assert sorted(name for change in CHANGES for name in change) == names, say
    assert sorted(EXPECTED) == names, say


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
def test_the_runtime_obeys(change):
    changed = dataclasses.replace(BASE, **change)
    for name in change:  # so that a runtime that ignores the field cannot pass for both
        assert EXPECTED[name](changed) != EXPECTED[name](BASE)
    for plan in (BASE, changed):
        assert seen(plan) == {name: expected(plan) for name, expected in EXPECTED.items()}

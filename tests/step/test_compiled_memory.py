"""Programs that are compiled before there are weights are those that the step runs."""

import collections
import contextlib
import dataclasses
import logging

import jax
import optax
import pytest
from plain_training import random_batch
from shared_programs import unshared
from streamed_training import small_config, strategy

from slidedp_jax import Trainer, UserError
from slidedp_jax.assembly import compile_step
from slidedp_jax.models import decoder
from slidedp_jax.models.router_losses import RouterLosses
from slidedp_jax.trainer import make_step_programs

TOKENS = 12
DENSE = small_config(layers=4)
TIED = small_config(tied=True, layers=4)
EXPERTS = dataclasses.replace(
    small_config(),
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    norm_topk_prob=True,
    sparse_layers=(True, False, True, True),
    router_aux_loss_coef=0.3,
)

CASES = {
    "three devices": (
        TIED,
        3,
        {
            "num_microbatches": 3,
            "kept_chunks": 1,
            "attention_chunks": 1,
            "compute_dtype": "bfloat16",
        },
    ),
    "one microbatch": (DENSE, 1, {"kept_chunks": 2, "compute_dtype": "bfloat16"}),
    "two layers": (DENSE, 1, {"num_microbatches": 2, "layers_per_chunk": 2, "resident_chunks": 2}),
    "packed": (TIED, 2, {"layer_block_tokens": 4, "weight_route": "shard_all_gather"}),
    "host sum": (DENSE, 2, {"num_microbatches": 2, "gradient_route": "host_sum"}),
    "frozen": (DENSE, 2, {"kept_chunks": 1}),
    "experts": (EXPERTS, 2, {"num_microbatches": 2, "kept_chunks": 1}),
    "sliced, tied": (TIED, 2, {"num_microbatches": 2, "vocab_slices": 2}),
    "sliced": (DENSE, 2, {"vocab_slices": 2, "slice_head_weights": True}),
}
QUICK = ("three devices",)


COMPILED = "compiled"


@contextlib.contextmanager
def lowered():
    """What JAX says of each program that it lowers within, with the shapes of its arguments.

    And under `COMPILED`, how many this thread has had XLA compile.
    """
    found = collections.Counter()
    logs = [logging.getLogger(f"jax._src.{name}") for name in ("interpreters.pxla", "dispatch")]

    class Listener(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            if text.startswith("Compiling "):
                found[text.split(" Argument mapping")[0]] += 1
            elif text.startswith("Finished XLA compilation"):
                found[COMPILED] += 1

    listener, propagates = Listener(), [log.propagate for log in logs]
    for log in logs:
        log.addHandler(listener)
        log.propagate = False
    try:
        with jax.log_compiles():
            yield found
    finally:
        for log, before in zip(logs, propagates, strict=True):
            log.removeHandler(listener)
            log.propagate = before


def made(name, optimizer):
    config, num_devices, changes = CASES[name]
    plan = strategy(rows_per_microbatch=2, num_host_devices=2 * num_devices, **changes)
    losses = RouterLosses(load_balance=0.3, z=0.05) if config is EXPERTS else None
    given = {
        "strategy": plan,
        "num_devices": num_devices,
        "frozen": ("model.layers.0.*", "model.embed_tokens.*") if name == "frozen" else (),
    }
    model = decoder.build(config, router_losses=losses)
    return model, given, make_step_programs(model, optimizer, **given)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES],
)
def test_a_step_finds_its_programs_compiled(name):
    """Lowered beforehand and in the step is what a step alone lowers, each program once."""
    optimizer, packed = optax.sgd(0.1), name in ("packed", "experts")
    config, num_devices, changes = CASES[name]

    def first_step(model, given, **options):
        plan = given["strategy"]
        rows = plan.rows_per_microbatch * plan.num_microbatches * num_devices
        batch = random_batch(config, rows, TOKENS, packed=packed)
        more = {"documents_per_row": 2, "kernel_form": "whole"}
        with Trainer(model, optimizer, **more, **given, **options) as trainer:
            with lowered() as found:
                loss = trainer.step(batch).loss
            with lowered() as again:
                trainer.step(batch)
        assert not again
        return found, loss

    with unshared():
        model, given, _ = made(name, optimizer)
        alone, loss = first_step(model, given)
    with unshared():
        model, given, programs = made(name, optimizer)
        with lowered() as before:
            compiled = compile_step(
                programs, tokens_per_row=TOKENS, packed=packed, documents_per_row=2
            )
        then, same_loss = first_step(model, given, programs=programs)
    assert COMPILED not in before  # but in threads
    assert len(compiled) == before.total()
    for of_step in (then, alone):  # nothing that was lowered before is compiled now
        count = of_step.pop(COMPILED)
        assert count == of_step.total()
    assert before + then == alone
    assert same_loss == loss
    works = {"forward", "backward"} | (set() if "vocab_slices" in changes else {"head"})
    assert {program.work for program in compiled} == works


def test_each_program_stands_for_chunks_of_its_structure():
    """Of four layers the top one is kept, of the next attention's results are."""
    with unshared():
        _, _, programs = made("three devices", optax.sgd(0.1))
        compiled = compile_step(programs, tokens_per_row=TOKENS)
    by_work = {
        (one.work, one.chunks, one.adds, one.sums_above): one.name.split()[-1] for one in compiled
    }
    backward = {key[1:]: name for key, name in by_work.items() if key[0] == "backward"}
    assert {key[1] for key in by_work if key[0] == "forward"} == {(3,), (2,), (0, 1)}
    # Three microbatches: the first, those that add to it, and the last, which sums beside.
    assert {chunks for chunks, *_ in backward} >= {(3,), (2,), (1, 0)}
    for chunks in {(3,), (2,)}:
        assert {key[1:] for key in backward if key[0] == chunks} == {
            (False, False),
            (True, False),
            (True, True),
        }
    assert set(by_work.values()) >= {"layers.3-3", "layers.2-2", "head"}
    assert {key[2] for key in by_work if key[0] == "head"} == {False, True}
    x = 2 * TOKENS * 32 * 2  # of a device, in bfloat16
    for one in compiled:
        assert one.output >= x if one.work == "forward" else one.output > x
        assert one.own_bytes == one.temp + one.output - one.alias > 0


def test_programs_of_another_trainer_are_refused():
    optimizer = optax.sgd(0.1)
    model, given, programs = made("one microbatch", optimizer)
    others = {
        "model": {"model": decoder.build(TIED)},
        "strategy": {"strategy": dataclasses.replace(given["strategy"], kept_chunks=1)},
        "optimizer": {"optimizer": optax.sgd(0.2)},
        "frozen": {"frozen": ("model.embed_tokens.*",)},
        "devices": {"num_devices": 2},
    }
    for what, changes in others.items():
        arguments = {"model": model, "optimizer": optimizer, **given, **changes}
        with pytest.raises(UserError, match=f"made for other .*{what}"):
            Trainer(**arguments, programs=programs)
    programs.taken.append(True)
    with pytest.raises(UserError, match="another trainer runs these programs"):
        Trainer(model, optimizer, **given, programs=programs)

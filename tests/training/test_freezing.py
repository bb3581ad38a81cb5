"""Frozen parameters: the rest trains as if optax masked them, and nothing is done for them.

The reference is plain optax over all parameters in which the frozen ones' gradients are set to zero
before the clip, and their updates after it. Tolerances as in `test_against_plain_optax`.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import mostly_thorough
from plain_training import initial_parameters, random_batch
from plain_training import train as train_plainly
from streamed_training import small_config, strategy, train, trainer

from slidedp_jax import UserError
from slidedp_jax.state.freezing import frozen_names
from slidedp_jax.tracer import StepTracer

RATE, EPS, LIMIT = 1e-3, 1e-5, 0.7
OPTIMIZER = optax.adamw(RATE, eps=EPS, weight_decay=0.1)

PATTERNS = {
    "embedding": ["model.embed_tokens.*"],
    "lower_layers_and_embedding": ["model.embed_tokens.*", "model.layers.[01].*"],
    "upper_layers": ["model.layers.[23].*"],
    "one_in_the_middle": ["model.layers.2.*"],
    "head": ["lm_head.weight", "model.norm.weight"],
    "all_but_norms": ["*_proj.weight", "model.embed_tokens.*", "lm_head.*"],
    "all_but_the_head": ["model.embed_tokens.*", "model.layers.*"],
    "all_but_the_embedding": ["model.layers.*", "model.norm.*", "lm_head.*"],
    "norms": ["*norm.weight"],
}


ROWS = 8


def batches(config):
    return [random_batch(config, ROWS, 12, packed=True, seed=i) for i in range(3)]


def zero_where(frozen):
    def labels(params):
        return {name: "frozen" if name in frozen else "trained" for name in params}

    return optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.identity()}, labels
    )


@functools.cache
def plain(tied, frozen):
    config = small_config(tied=tied)
    mask = zero_where(frozen)
    transformation = optax.chain(mask, optax.clip_by_global_norm(LIMIT), OPTIMIZER, mask)
    _, _, parameters, state = train_plainly(
        config, initial_parameters(config), transformation, batches(config)
    )
    return parameters, optax.tree.get(state, "mu"), optax.tree.get(state, "nu")


CASES = [
    *((name, False, 1 if i % 2 else 3, 0) for i, name in enumerate(PATTERNS)),
    ("embedding", True, 1, 0),
    ("lower_layers_and_embedding", True, 3, 0),
    ("all_but_norms", True, 1, 0),
    ("all_but_the_embedding", True, 3, 0),
    # State on the devices: up to a frozen chunk, above it, in the middle of one, all of it.
    ("lower_layers_and_embedding", False, 1, 2),
    ("lower_layers_and_embedding", True, 1, 4),
    ("one_in_the_middle", False, 1, 4),
    ("upper_layers", False, 3, 2),
    ("all_but_norms", False, 1, 3),
    ("all_but_norms", True, 3, 4),
    ("all_but_the_head", False, 1, 6),
    ("all_but_the_embedding", True, 1, 6),
    ("head", False, 1, 6),
]


@pytest.mark.parametrize(
    "case",
    mostly_thorough(
        CASES,
        {
            ("lower_layers_and_embedding", False, 1, 0),
            ("lower_layers_and_embedding", True, 1, 4),
        },
    ),
    ids=lambda c: "-".join(map(str, c)),
)
def test_the_rest_trains_as_in_plain_optax(case):
    name, tied, layers, resident_chunks = case
    config = small_config(tied=tied)
    patterns = [p for p in PATTERNS[name] if not (tied and p.startswith("lm_head"))]
    start = initial_parameters(config)
    frozen = frozen_names(start, patterns)
    run = train(
        config,
        OPTIMIZER,
        strategy(
            layers_per_chunk=layers,
            rows_per_microbatch=2,
            num_microbatches=2,
            resident_chunks=resident_chunks,
        ),
        batches(config),
        parameters=start,
        frozen=patterns,
        max_grad_norm=LIMIT,
        num_devices=2,
    )
    expected, *moments = plain(tied, frozenset(frozen))
    for key in start:
        if key in frozen:
            assert run.parameters[key].tobytes() == start[key].tobytes(), key
            assert all(key not in state for state in run.state)
        else:
            np.testing.assert_allclose(
                run.parameters[key], expected[key], rtol=0, atol=0.01 * RATE, err_msg=key
            )
            for got, wanted in zip(run.state, moments, strict=True):
                atol = 2e-5 * float(jnp.abs(wanted[key]).max())
                np.testing.assert_allclose(got[key], wanted[key], rtol=0, atol=atol, err_msg=key)


def spans_of(patterns, tied=False):
    tracer = StepTracer(keep=True)
    config = small_config(tied=tied)
    plan = strategy(rows_per_step=ROWS)
    with trainer(config, OPTIMIZER, plan, frozen=patterns, num_devices=1, tracer=tracer) as it:
        for batch in batches(config):
            it.step(batch)
        it.wait()
        names = [span.name for span in tracer.spans]
        arrays = {part.layout.name: len(part.arrays) for part in it.store.parts}
        return {name: names.count(name) for name in names}, arrays


def test_a_frozen_chunk_is_neither_downloaded_nor_updated_nor_has_it_state():
    counts, arrays = spans_of(["model.embed_tokens.*", "model.layers.[02].*"])
    for chunk in ("embed", "layers.0-0", "layers.2-2"):
        assert f"download {chunk}" not in counts and f"update {chunk}" not in counts
    assert counts["download layers.1-1"] == counts["update layers.1-1"] == 3
    # Nothing below the lowest trained chunk has a backward pass; frozen ones above pass it on.
    assert "backward embed" not in counts and "backward layers.0-0" not in counts
    assert counts["upload layers.0-0"] == 3
    assert counts["backward layers.2-2"] == counts["backward layers.1-1"] == 3
    assert arrays["layers.2-2"] == arrays["embed"] == 2 and arrays["layers.1-1"] == 4


def test_only_what_is_trained_of_a_chunk_travels():
    """Norms alone: the gradient that leaves the device holds them and padding."""
    with trainer(small_config(), OPTIMIZER, strategy(), frozen=["*_proj.weight"]) as it:
        layout = it.store.layouts[1]
        (part,) = layout.trained_parts
        assert {slot.name.split(".")[-2] for slot in part.slots} == {
            "input_layernorm",
            "post_attention_layernorm",
            "q_norm",
            "k_norm",
        }
        sizes = []
        prepared = it.passes.prepare(batches(small_config())[0])
        it.weights.require(0)
        it.passes.forward_backward(it.weights, prepared, lambda chunk, wires: sizes.append(wires))
        assert [array.shape for array in sizes[1]] == [(part.padded_size,)]
        assert part.padded_size < layout.padded_size / 2


def test_the_optimizer_can_freeze_too():
    """`set_to_zero` for some is the same as naming them."""
    config = small_config()
    patterns = ["model.layers.[01].*", "model.embed_tokens.*"]
    frozen = frozen_names(config.parameter_shapes(), patterns)

    def labels(params):
        return {name: "frozen" if name in frozen else "trained" for name in params}

    by_optimizer = optax.multi_transform(
        {"trained": OPTIMIZER, "frozen": optax.set_to_zero()}, labels
    )
    runs = [
        train(
            config,
            optimizer,
            strategy(rows_per_step=ROWS),
            batches(config),
            parameters=initial_parameters(config),
            frozen=names,
            num_devices=1,
        )
        for optimizer, names in ((by_optimizer, []), (OPTIMIZER, patterns))
    ]
    assert runs[0].norms == runs[1].norms
    for name, values in runs[0].parameters.items():
        assert values.tobytes() == runs[1].parameters[name].tobytes(), name


def test_one_pattern_may_be_given_by_itself():
    assert frozen_names(["a.b", "a.c", "d"], "a.*") == {"a.b", "a.c"}


def test_patterns_that_fit_nothing_or_everything_are_refused():
    names = small_config().parameter_shapes()
    with pytest.raises(UserError, match=r"'embed\*'.*model\.embed_tokens\.weight"):
        frozen_names(names, ["embed*"])
    with pytest.raises(UserError, match="nothing is left to train"):
        frozen_names(names, ["*"])
    with (
        pytest.raises(UserError, match="changes no parameter"),
        trainer(small_config(), optax.set_to_zero(), strategy()),
    ):
        pass

"""The programs of a chunk: what they are made of, and what a choice of names keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, PartitionSpec
from toy_layers import CHOSEN, SHAPES, WIDTH, as_shapes, streamed

from slidedp_jax.jax_internals import inner_programs
from slidedp_jax.models.named_results import PRODUCTS
from slidedp_jax.step.kept_programs import DECISIONS, EVERYTHING, KeptPrograms
from slidedp_jax.step.layer_functions import ChunkKind
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.transfer.device_map import DeviceMap

ROWS, TOKENS = 4, 6
SPLIT, SAME = PartitionSpec("data"), PartitionSpec()


@functools.cache
def on_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    return DeviceMap(mesh, jnp.bfloat16)


def inputs(*kinds):
    """Trees of layers of these kinds, x and batch, as shapes."""
    trees = tuple(as_shapes(SHAPES[kind]) for kind in kinds)
    trees, x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16),
        (trees, jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.float32)),
    )
    return trees, x, {"targets": jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)}


def text(function, specs, outputs, arguments, donate=()):
    mapped = jax.shard_map(
        function, mesh=on_devices().mesh, in_specs=specs, out_specs=outputs, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=donate).lower(*arguments).as_text()


def test_layers_that_give_x_alone_compile_to_nothing_but_themselves():
    """Letter for letter the programs of the layers in turn and of their `jax.vjp`."""
    model = streamed(("plain", "plain"))
    programs = ComputePrograms(model, on_devices(), None, loss_chunk_tokens=1024)
    trees, x, batch = inputs("plain", "plain")

    def layers(trees, x, batch):
        for layer_fn, params in zip(model.layer_fns, trees, strict=True):
            x = layer_fn(params, x, batch)
        return x

    def body(trees, x, batch):
        return layers(trees, x, batch)

    forward = programs.forward(model.layer_fns)
    expected = text(body, (SAME, SPLIT, SPLIT), SPLIT, (trees, x, batch))
    assert forward.lower(trees, x, batch).as_text() == expected

    def body(trees, x, dy, batch, sums):
        gradients, dx = jax.vjp(lambda t, h: layers(t, h, batch), trees, x)[1](dy)
        return dx, jax.tree.map(lambda s, g: s + g[None].astype(jnp.float32), sums, gradients)

    sums = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), jnp.float32), trees)
    arguments = trees, x, x, batch, sums
    backward = programs.backward(ChunkKind(layer_fns=model.layer_fns, widen=True))
    expected = text(body, (SAME, *[SPLIT] * 4), (SPLIT, SPLIT), arguments, (2, 4))
    assert backward.lower(*arguments).as_text() == expected


@pytest.mark.parametrize(
    ("kinds", "aux", "is_decided"),
    [
        (("plain", "plain"), False, False),
        (("plain", "aux"), True, False),
        (("router", "plain"), True, True),
    ],
)
def test_what_layers_give_is_read_off_their_trace(kinds, aux, is_decided):
    model = streamed(kinds)
    programs = ComputePrograms(model, on_devices(), None, loss_chunk_tokens=1024)
    gives = programs.gives(model.layer_fns, *inputs(*kinds))
    assert (gives.aux, gives.decided) == (aux, is_decided)


def kept_programs(model, keeps):
    kind = ChunkKind(layer_fns=model.layer_fns, widen=False, gives_aux=True, keeps=keeps)
    return KeptPrograms(on_devices(), kind)


def test_decisions_alone_are_kept_of_a_chunk_that_recomputes():
    """Weights, x and the batch, which backward is given anyway, are not among them."""
    model = streamed(("router", "aux"))
    _, kept = jax.eval_shape(kept_programs(model, DECISIONS).forward, *inputs("router", "aux"))
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [
        ((2, ROWS // 2, TOKENS, CHOSEN), jnp.int32)
    ]


@pytest.mark.parametrize("keeps", [DECISIONS, EVERYTHING], ids=["decisions", "everything"])
def test_backward_chooses_nothing(keeps):
    model = streamed(("router",))
    programs = kept_programs(model, keeps)
    trees, x, batch = inputs("router")
    _, kept = jax.eval_shape(programs._forward, trees, x, batch)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    backward = jax.make_jaxpr(programs._backward)(trees, x, kept, x, batch, None, scale)
    forward = jax.make_jaxpr(programs._forward)(trees, x, batch)
    assert "top_k" in primitives(forward.jaxpr)
    assert "top_k" not in primitives(backward.jaxpr)


def test_products_that_are_not_recognised_are_kept_by_name():
    def kept(named, keeps):
        def layer(params, x, batch):
            product = jnp.einsum("btd,bde->bte", x, x[:, :WIDTH, :].mT @ x[:, :WIDTH, :])
            return jnp.tanh(checkpoint_name(product, PRODUCTS) if named else product)

        kind = ChunkKind(layer_fns=(layer,), widen=False, keeps=keeps)
        _, residuals = jax.eval_shape(KeptPrograms(on_devices(), kind).forward, *inputs("plain"))
        return [leaf.shape for leaf in residuals]

    assert kept(True, EVERYTHING) == [(2, ROWS // 2, TOKENS, WIDTH)]
    assert kept(False, EVERYTHING) == kept(True, DECISIONS) == []


def primitives(program):
    """Names of all primitives, those of inner programs included."""
    names = {equation.primitive.name for equation in program.eqns}
    for equation in program.eqns:
        for inner in inner_programs(equation):
            names |= primitives(inner)
    return names

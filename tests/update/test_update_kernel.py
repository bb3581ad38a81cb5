"""The update kernel in every form against plain optax, and in place."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from slidedp_jax.process import current_setup
from slidedp_jax.state.host_store import HOST_AXIS
from slidedp_jax.state.layout import FlatLayout, Slot
from slidedp_jax.state.split_float import join_numpy, split_numpy
from slidedp_jax.state.weight_rounding import NEAREST, WeightRounding
from slidedp_jax.update.decompose import DecomposedOptimizer
from slidedp_jax.update.elementwise import ElementwiseOptimizer
from slidedp_jax.update.update_kernel import KernelForm, UpdateKernels

FORMS = get_args(KernelForm)
BLOCK = 256
DEVICES = 4
GROUPS = (0,) * 9 + (1,) * 7
"""Group of each block: device 2 holds blocks of both, the others of one."""
SIZE = BLOCK * len(GROUPS)
SHAPES = {"matrix": (9, BLOCK), "vector": (7 * BLOCK,)}
ROUNDINGS = {
    "dither": WeightRounding.of("dither", seed=5),
    "nearest": WeightRounding.of("nearest", seed=5),
}
OFTEN_DITHER = ["dither", pytest.param("nearest", marks=pytest.mark.thorough)]
SIZES = {
    "odd": ((4 * BLOCK + 3, 1, 64, 5 * BLOCK - 68), (31, 2 * BLOCK, 5 * BLOCK - 31)),
    "runs of 32": ((4 * BLOCK + 32, 96, 5 * BLOCK - 128), (64, 2 * BLOCK, 5 * BLOCK - 64)),
    "whole blocks": ((4 * BLOCK, 5 * BLOCK), (7 * BLOCK,)),
}
"""Of parameters that lie one behind the other in the blocks of each group."""

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(
        optax.linear_schedule(1e-2, 1e-3, 5), weight_decay=0.1, mask=lambda p: masks(p)
    ),
    "lion": lambda: optax.lion(1e-2, weight_decay=0.1, mask=lambda p: masks(p)),
    "momentum": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), masks), optax.sgd(1e-2, momentum=0.9)
    ),
    "one group": lambda: optax.adam(1e-2),
}


def masks(params):
    return {name: leaf.ndim > 1 for name, leaf in params.items()}


def blocks_of(transformation) -> ElementwiseOptimizer:
    taken_apart = DecomposedOptimizer(transformation, SHAPES)
    return ElementwiseOptimizer(taken_apart, range(taken_apart.num_groups))


def layout(groups=GROUPS, sizes="odd") -> FlatLayout:
    """Parameters begin anywhere in blocks, and one block may hold several."""
    slots, end = [], 0
    for group, own in enumerate(SIZES[sizes]):
        for size in own:
            slots.append(Slot(name=f"{len(slots)}.w", shape=(size,), group=group, offset=end))
            end += size
    assert end == SIZE
    return FlatLayout(
        name="chunk",
        slots=tuple(slots),
        block_size=BLOCK,
        num_pieces=DEVICES,
        block_groups=groups,
    )


@pytest.fixture(scope="module")
def sharding():
    mesh = Mesh(
        np.array(current_setup().devices()[1][:DEVICES]), (HOST_AXIS,), axis_types=(AxisType.Auto,)
    )
    return NamedSharding(mesh, PartitionSpec(HOST_AXIS), memory_kind="pinned_host")


def owned(values: np.ndarray, sharding) -> jax.Array:
    """In a buffer of JAX's own: one that NumPy owns cannot be donated."""
    return jax.jit(lambda x: x.copy(), out_shardings=sharding)(jax.device_put(values, sharding))


def pointers(arrays) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards
    ]


class Dithers:
    """Of every element of a flat array, by the names and places of its parameters alone."""

    def __init__(self, layout: FlatLayout, rounding: WeightRounding):
        self._all = np.full(layout.padded_size, NEAREST)
        for slot in layout.slots:
            own = rounding.dither(slot.name, 0, slot.size)
            self._all[slot.offset : slot.offset + slot.size] = own

    def __call__(self, start: int, size: int) -> np.ndarray:
        return self._all[start : start + size]


class KernelRun:
    """State of one chunk and the kernel that updates it, over several steps."""

    def __init__(self, optimizer, form, sharding, master, rounding="dither", sizes="odd"):
        num_groups = optimizer.num_groups
        self.layout = layout(GROUPS if num_groups > 1 else (0,) * len(GROUPS), sizes)
        self.optimizer = optimizer
        self.sharding = sharding
        own = ROUNDINGS[rounding]
        self.kernels = UpdateKernels(optimizer, sharding, block_size=BLOCK, form=form, rounding=own)
        self.dithers = Dithers(self.layout, own)
        halves = split_numpy(master, self.dithers)
        zeros = [np.zeros(SIZE, dtype) for dtype in optimizer.state_dtypes]
        arrays = [owned(values, sharding) for values in (*halves, *zeros)]
        self.arrays = self.kernels.init(self.layout, arrays)
        self.shared = optimizer.initial_shared()

    def step(self, summands, norm=0.0, max_norm=np.inf):
        gradients = [owned(values, self.sharding) for values in summands]
        shared = self.kernels.place_shared(self.shared)
        self.arrays = self.kernels.start_update(
            self.layout, self.arrays, gradients, shared, norm, max_norm
        )
        self.shared = self.kernels.advance(self.shared)

    @property
    def master(self) -> np.ndarray:
        high, low = (np.asarray(array) for array in self.arrays[:2])
        return join_numpy(high, low, self.dithers)


def tree_of(flat) -> dict[str, jax.Array]:
    cut = 9 * BLOCK
    return {
        "matrix": jnp.asarray(flat[:cut]).reshape(SHAPES["matrix"]),
        "vector": jnp.asarray(flat[cut:]),
    }


def flat_of(tree) -> np.ndarray:
    return np.concatenate([np.asarray(tree[name]).reshape(-1) for name in SHAPES])


def random_summands(rng, count) -> list[np.ndarray]:
    return [rng.standard_normal(SIZE).astype(jnp.bfloat16) for _ in range(count)]


OFTEN = {("adamw", 1, "dither"), ("momentum", 3, "nearest")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "num_summands", "rounding"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.thorough)
        for case in (
            (name, *more) for name in OPTIMIZERS for more in ((1, "dither"), (3, "nearest"))
        )
    ],
)
def test_steps_are_those_of_optax(form, name, num_summands, rounding, sharding):
    """With a limit that is hit, one that is not, and none, in turn."""
    transformation = OPTIMIZERS[name]()
    rng = np.random.default_rng(0)
    master = rng.standard_normal(SIZE).astype(np.float32)
    run = KernelRun(blocks_of(transformation), form, sharding, master, rounding)
    params = tree_of(master)
    state = transformation.init(params)
    for limit in (0.5, 1e4, np.inf, 0.5):
        summands = random_summands(rng, num_summands)
        gradient = tree_of(sum(summand.astype(np.float32) for summand in summands))
        norm = float(np.linalg.norm(flat_of(gradient)))
        run.step(summands, norm, limit)
        if np.isfinite(limit):
            clip = optax.clip_by_global_norm(limit)
            gradient, _ = clip.update(gradient, clip.init(params))
        updates, state = transformation.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        # Other fusions contract other multiplications and additions: the last bits may differ.
        np.testing.assert_allclose(run.master, flat_of(params), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("form", FORMS)
def test_group_decides_what_decays(form, sharding):
    """Without gradient, AdamW moves only the decayed group, by lr * decay * weight."""
    transformation = optax.adamw(1e-2, weight_decay=0.1, mask=masks)
    master = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
    run = KernelRun(blocks_of(transformation), form, sharding, master)
    run.step([np.zeros(SIZE, jnp.bfloat16)])
    decayed = np.arange(SIZE) < 9 * BLOCK
    if DecomposedOptimizer(transformation, SHAPES).groups["matrix"] == 1:
        decayed = ~decayed
    np.testing.assert_array_equal(run.master[~decayed], master[~decayed])
    np.testing.assert_allclose(run.master[decayed], master[decayed] * (1 - 1e-3), rtol=2e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rounding", OFTEN_DITHER)
def test_state_stays_where_it_lay(form, rounding, sharding):
    transformation = OPTIMIZERS["adamw"]()
    run = KernelRun(blocks_of(transformation), form, sharding, np.ones(SIZE, np.float32), rounding)
    before = pointers(run.arrays)
    for limit in (0.5, np.inf):
        run.step(random_summands(np.random.default_rng(0), 2), 1.0, limit)
        assert pointers(run.arrays) == before
        assert all(array.sharding.memory_kind == "pinned_host" for array in run.arrays)


@pytest.mark.parametrize("form", FORMS)
def test_place_in_the_chunk_changes_no_bit(form, sharding):
    """Equal blocks give equal results wherever they lie, and whatever device holds them.

    But for `high`, which depends on the parameter as well.
    """
    transformation = optax.adam(1e-2)
    rng = np.random.default_rng(2)
    master = np.tile(rng.standard_normal(BLOCK).astype(np.float32), len(GROUPS))
    gradient = np.tile(rng.standard_normal(BLOCK).astype(jnp.bfloat16), len(GROUPS))
    run = KernelRun(blocks_of(transformation), form, sharding, master)
    run.step([gradient], 2.0, 1.0)
    for array in (run.master, *run.arrays[1:]):
        blocks = np.asarray(array).reshape(-1, BLOCK)
        np.testing.assert_array_equal(blocks, np.broadcast_to(blocks[:1], blocks.shape))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rounding", "sizes"),
    [
        ("dither", "odd"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("dither", "runs of 32"), ("dither", "whole blocks"), ("nearest", "odd"))
        ),
    ],
)
def test_split_result_is_the_exact_split(form, rounding, sizes, sharding):
    """`high` is the master rounded by each parameter's own dither, wherever it lies.

    The dithers that were made from tables while the kernel walked are those of names and indices.
    """
    rng = np.random.default_rng(3)
    master = (rng.choice([-1, 1], SIZE) * 10.0 ** rng.uniform(-30, 30, SIZE)).astype(np.float32)
    run = KernelRun(blocks_of(optax.adam(1e-2)), form, sharding, master, rounding, sizes)
    run.step(random_summands(np.random.default_rng(4), 1))
    high, low = split_numpy(run.master, run.dithers)
    np.testing.assert_array_equal(np.asarray(run.arrays[0]).view(np.uint16), high.view(np.uint16))
    np.testing.assert_array_equal(np.asarray(run.arrays[1]), low)


NAN_PATTERNS = np.array(
    [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F80FFFF, 0x7FBF8000], np.uint32
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("where", "rounding"),
    [
        ("master", "dither"),
        pytest.param("gradient", "dither", marks=pytest.mark.thorough),
        pytest.param("master", "nearest", marks=pytest.mark.thorough),
    ],
)
def test_nan_never_turns_into_a_number(form, where, rounding, sharding):
    """CUDA's NaN is 0x7fffffff: rounded up like a number it would become -0."""
    broken = np.arange(SIZE) % 3 == 0
    values = {"master": np.ones(SIZE, np.float32), "gradient": np.ones(SIZE, np.float32)}
    values[where][broken] = np.resize(NAN_PATTERNS, broken.sum()).view(np.float32)
    optimizer = blocks_of(optax.adam(1e-2))
    run = KernelRun(optimizer, form, sharding, values["master"], rounding)
    run.step([values["gradient"]], 2.0, 1.0)
    high = np.asarray(run.arrays[0]).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(high), broken)
    np.testing.assert_array_equal(np.isnan(run.master), broken)


SPECIAL_PATTERNS = np.concatenate(
    [
        np.array([sign | upper << 16 | lower], np.uint32)
        for sign in (0, 1 << 31)
        for upper in (0, 1, 0x7F, 0x80, 0x3F80, 0x7F7E, 0x7F7F)
        for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    ]
    + [np.array([0x7F800000, 0xFF800000], np.uint32)]
)
"""Zeros, subnormals, ones, the largest finite values and infinities, of either sign."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rounding", OFTEN_DITHER)
def test_special_values_pass_the_kernel_in_every_bit(form, rounding, sharding):
    """A step of nothing: what was joined is split again, a `high` of infinity included."""
    nothing = optax.stateless(lambda updates, params: jax.tree.map(jnp.zeros_like, updates))
    master = np.resize(SPECIAL_PATTERNS, SIZE).view(np.float32)
    run = KernelRun(blocks_of(nothing), form, sharding, master, rounding)
    before = [np.asarray(array).copy() for array in run.arrays]
    run.step([np.zeros(SIZE, jnp.bfloat16)])
    assert run.master.tobytes() == master.tobytes()
    assert [np.asarray(array).tobytes() for array in run.arrays] == [a.tobytes() for a in before]


def test_sum_of_squares_adds_the_summands_first(sharding):
    kernels = UpdateKernels(
        blocks_of(optax.adam(1e-2)),
        sharding,
        block_size=BLOCK,
        form="whole",
        rounding=ROUNDINGS["dither"],
    )
    summands = random_summands(np.random.default_rng(5), 3)
    squares = kernels.sum_of_squares([owned(values, sharding) for values in summands])
    total = sum(values.astype(np.float64) for values in summands)
    expected = (total.reshape(DEVICES, -1) ** 2).sum(axis=1)
    np.testing.assert_allclose(squares, expected, rtol=1e-5)


def test_unsorted_groups_are_refused(sharding):
    optimizer = blocks_of(OPTIMIZERS["adamw"]())
    kernels = UpdateKernels(
        optimizer, sharding, block_size=BLOCK, form="blocked", rounding=ROUNDINGS["nearest"]
    )
    zeros = [np.zeros(SIZE, dtype) for dtype in (jnp.bfloat16, np.int16, *optimizer.state_dtypes)]
    with pytest.raises(AssertionError, match="one group after another"):
        kernels.init(layout((1, 0) * 8), [owned(values, sharding) for values in zeros])


def test_unknown_form_is_refused(sharding):
    optimizer = blocks_of(optax.adam(1e-2))
    with pytest.raises(ValueError, match="fused"):
        UpdateKernels(
            optimizer, sharding, block_size=BLOCK, form="fast", rounding=ROUNDINGS["nearest"]
        )

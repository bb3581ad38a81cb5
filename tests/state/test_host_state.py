"""The one host copy: what it holds, where it lies, how many bytes it owns."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from plain_training import initial_parameters, random_batch
from streamed_training import BLOCK_SIZE, optimizer_state, padding, small_config, strategy, trainer

from slidedp_jax import TrainingStopped, UserError
from slidedp_jax.models.streamed import Stage
from slidedp_jax.process import current_setup
from slidedp_jax.state.host_store import HostStore
from slidedp_jax.state.layout import block_groups_array, lay_out
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.transfer.routes import weight_path
from slidedp_jax.update.block_dithers import block_dithers

ADAMW = optax.adamw(1e-2)


def compute_and_host_devices():
    return current_setup().devices()


def stage(name, **shapes):
    return Stage(
        name=name,
        shapes={key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()},
    )


STAGES = [stage("first", a=(7, 5), b=(3,), c=(11,)), stage("second", a=(50,), d=(2, 3, 4))]
GROUPS = {"first.a": 0, "first.b": 1, "first.c": 0, "second.a": 1, "second.d": 0}


def small_store(
    num_pieces: int,
    state_dtypes=(jnp.float32, jnp.bfloat16),
    *,
    resident: bool = False,
    rounding: str = "dither",
) -> HostStore:
    """Pieces of 16 or 32 elements, so that parameters begin and end anywhere in them."""
    compute, host = compute_and_host_devices()
    layout = lay_out("both", STAGES, GROUPS, block_size=16, num_pieces=num_pieces)
    mesh = Mesh(np.array(compute[:num_pieces]), ("data",), axis_types=(AxisType.Auto,))
    return HostStore(
        [dataclasses.replace(layout, resident=resident)],
        host[:num_pieces],
        [state_dtypes],
        device_sharding=NamedSharding(mesh, PartitionSpec("data")),
        upload_low=True,
        rounding=WeightRounding.of(rounding, seed=3),
    )


def any_floats(shape, seed):
    """Random bit patterns but for NaNs, which `write` may change."""
    bits = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)
    values = bits.view(np.float32)
    return np.where(np.isnan(values), np.float32(seed), values)


@pytest.mark.parametrize(
    "rounding", ["dither", pytest.param("nearest", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    "num_pieces", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 8))]
)
def test_what_is_written_is_read_back_across_pieces(num_pieces, resident, rounding):
    store = small_store(num_pieces, resident=resident, rounding=rounding)
    layout = store.layouts[0].parts[0]
    assert sum(layout.piece_size % slot.size for slot in layout.slots)
    written = {
        name: any_floats(shape, seed) for seed, (name, shape) in enumerate(store.shapes.items())
    }
    assert list(written) == ["first.a", "first.b", "first.c", "second.a", "second.d"]
    for name, values in written.items():
        store.write(name, values)
        for number in range(2):
            store.write_state(name, number, (values * (2 + number)).astype(np.float32))
    for name, values in written.items():
        assert store.read(name).tobytes() == values.tobytes()
        assert store.read_state(name, 0).tobytes() == (values * 2).astype(np.float32).tobytes()
        expected = (values * 3).astype(np.float32).astype(ml_dtypes.bfloat16)
        assert store.read_state(name, 1).tobytes() == expected.tobytes()
    name = "second.a"  # written anew, beside others that stay
    store.write(name, -written[name])
    assert store.read(name).tobytes() == (-written[name]).tobytes()
    assert store.read("first.a").tobytes() == written["first.a"].tobytes()


def test_the_flat_array_holds_each_parameter_at_its_slot_and_zeros_elsewhere():
    store = small_store(3)
    layout = store.layouts[0].parts[0]
    expected = np.zeros(layout.padded_size, np.float32)
    for seed, (name, shape) in enumerate(store.shapes.items()):
        values = np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)
        store.write(name, values)
        slot = next(slot for slot in layout.slots if slot.name == name)
        assert not expected[slot.offset : slot.offset + slot.size].any()
        expected[slot.offset : slot.offset + slot.size] = values.reshape(-1).astype(np.float32)
    flat = np.concatenate(store.parts[0].views[0]).astype(np.float32)
    np.testing.assert_array_equal(flat, expected)
    assert not np.concatenate(store.parts[0].views[1]).any()
    # A block has one group: what the kernel does to a block is right for all in it.
    groups = block_groups_array(layout)
    for slot in layout.slots:
        first, last = slot.offset // 16, (slot.offset + slot.size - 1) // 16
        assert set(groups[first : last + 1]) == {GROUPS[slot.name]}


def test_a_parameter_is_written_from_any_float_dtype_and_layout():
    store = small_store(3)
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float64)
    store.write("first.a", values.T)
    np.testing.assert_array_equal(store.read("first.a"), values.T.astype(np.float32))
    store.write("first.b", np.array([1, 2, 3], np.float16))
    np.testing.assert_array_equal(store.read("first.b"), np.array([1, 2, 3], np.float32))


def test_wrong_names_and_shapes_are_refused():
    store = small_store(1)
    with pytest.raises(ValueError, match=r"first\.a has shape \(7, 5\), got \(5, 7\)"):
        store.write("first.a", np.zeros((5, 7)))
    with pytest.raises(ValueError, match=r"first\.b has shape \(3,\), got \(4,\)"):
        store.write_state("first.b", 0, np.zeros(4))
    for access in (store.read, lambda name: store.write(name, np.zeros(1))):
        with pytest.raises(KeyError, match="third"):
            access("third")
    config = small_config()
    incomplete = initial_parameters(config)
    incomplete["lm_head.bias"] = incomplete.pop("lm_head.weight")
    with (
        pytest.raises(UserError, match=r"lm_head\.weight.*lm_head\.bias"),
        trainer(config, ADAMW, strategy(), parameters=incomplete),
    ):
        pass


@pytest.mark.parametrize(
    "route", ["shard_all_gather", pytest.param("replicate", marks=pytest.mark.thorough)]
)
def test_an_upload_is_not_changed_by_a_later_update(route):
    config = small_config()
    batch = random_batch(config, 8, 12, packed=False)
    with trainer(config, ADAMW, strategy(), num_devices=2) as it:
        path = weight_path(route, it.passes._rows.mesh)
        views = [view for part in it.store.parts for view in part.views[:2]]
        before = [np.concatenate(view) for view in views]
        uploads = [path.fetch(view) for view in views]
        it.step(batch)
        it.wait()
        changed = [
            not np.array_equal(np.concatenate(view), old)
            for view, old in zip(views, before, strict=True)
        ]
        assert all(changed)
        for arrays, old in zip(uploads, before, strict=True):
            if route == "replicate":
                for device in range(2):
                    shards = [array.addressable_shards[device].data for array in arrays]
                    np.testing.assert_array_equal(np.concatenate(shards), old)
            else:
                # The n-th array holds the n-th piece of each device's half.
                halves = np.concatenate([np.asarray(a).reshape(2, -1) for a in arrays], axis=1)
                np.testing.assert_array_equal(halves.reshape(-1), old)


def test_the_state_stays_where_it_is_and_of_its_kind():
    config = small_config()
    batches = [random_batch(config, 8, 12, packed=False, seed=i) for i in range(3)]

    def addresses(store):
        return [
            shard.data.unsafe_buffer_pointer()
            for part in store.parts
            for array in part.arrays
            for shard in array.addressable_shards
        ]

    _, host = compute_and_host_devices()
    with trainer(config, ADAMW, strategy(), num_devices=2) as it:
        before = addresses(it.store)
        for batch in batches:
            it.step(batch)
        it.wait()
        assert addresses(it.store) == before
        for part in it.store.parts:
            for array in part.arrays:
                assert array.sharding.memory_kind == "pinned_host"
                assert [s.device for s in array.addressable_shards] == host
        # What the views show is what the arrays hold.
        for part in it.store.parts:
            for array, view in zip(part.arrays, part.views, strict=True):
                np.testing.assert_array_equal(np.asarray(array), np.concatenate(view))


def test_a_tracked_view_that_would_make_the_update_copy_is_an_error():
    """JAX copies a donated array that a NumPy view refers to; stale page locks would follow."""
    config = small_config()
    with trainer(config, ADAMW, strategy(), num_devices=2) as it:
        held = [np.asarray(s.data) for s in it.store.parts[1].arrays[2].addressable_shards]
        it.step(random_batch(config, 8, 12, packed=False))
        with pytest.raises(TrainingStopped, match="moved its state") as caught:
            it.wait()
        assert isinstance(caught.value.__cause__, RuntimeError)
        del held


def live_host_buffers():
    """Address -> bytes of all buffers in pinned memory of the host devices, whoever holds them."""
    _, host = compute_and_host_devices()
    return {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        if array.sharding.memory_kind == "pinned_host"
        for shard in array.addressable_shards
        if shard.device in host
    }


def bytes_of_tables(layout, rounding, form="whole") -> int:
    """Of the groups and the dithers of a part's blocks."""
    dithers = block_dithers(layout, rounding, layout.num_pieces, form)
    return sum(array.nbytes for array in (block_groups_array(layout), *dithers))


@pytest.mark.parametrize("form", ["whole", "fused"])
def test_tables_of_a_real_shape_are_below_two_thousandths(form):
    names = [f"part.{number}" for number in range(9)]
    matrices = stage("layer", **dict.fromkeys(names, (2560, 9728)), norm=(2560,))
    groups = dict.fromkeys([f"layer.{name}" for name in [*names, "norm"]], 0)
    layout = lay_out("layer", [matrices], groups, block_size=4096, num_pieces=15).parts[0]
    tables = bytes_of_tables(layout, WeightRounding.of("dither", seed=0), form)
    assert tables < 2e-3 * 12 * layout.num_parameters


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [
        (ADAMW, 12),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (optax.adamw(1e-2, mu_dtype=jnp.bfloat16), 10),
                (optax.lion(1e-2), 8),
                (optax.sgd(1e-2), 4),
            )
        ),
    ],
    ids=["adamw", "adamw_bf16_mu", "lion", "sgd"],
)
def test_one_copy_of_the_state_whatever_the_number_of_devices(optimizer, bytes_per_parameter):
    config = small_config()
    batch = random_batch(config, 8, 12, packed=False)
    owned = []
    for num_devices in (1, 4):
        held = jax.live_arrays()  # so that no address below is freed and given to the new state
        before = live_host_buffers()
        plan = strategy(rows_per_step=len(batch["input_ids"]), num_devices=num_devices)
        with trainer(config, optimizer, plan, num_devices=num_devices) as it:
            store = it.store
            assert store.num_parameters == config.num_parameters
            elements = config.num_parameters + padding(store.layouts)
            assert store.owned_bytes == bytes_per_parameter * elements
            # Padding: less than a block per group of a chunk, then up to a block per piece.
            blocks = sum(1 + part.layout.num_pieces for part in store.parts)
            assert 0 <= padding(store.layouts) < blocks * BLOCK_SIZE
            it.step(batch)
            it.step(batch)
            it.wait()
            time.sleep(0.1)  # the update thread lets go of the last gradient after its commit
            new = sum(n for at, n in live_host_buffers().items() if at not in before)
            tables = sum(bytes_of_tables(part.layout, store.rounding) for part in store.parts)
            # Beside the state only what the update knows of its blocks, and a few scalars.
            assert store.owned_bytes <= new <= store.owned_bytes + tables + 1024
            owned.append(store.owned_bytes)
        del held
    assert owned[0] == owned[1]


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b"])
def test_padding_of_a_real_shape_is_below_a_thousandth(name):
    """With the block size and host devices of a 16-core machine."""
    from slidedp_jax.models import decoder
    from slidedp_jax.models.config import named_config

    model = decoder.build(named_config(name))
    names = [parameter for each in model.stages() for parameter in each.parameter_names()]
    groups = {parameter: int(parameter.endswith("norm.weight")) for parameter in names}
    layouts = [
        lay_out(each.name, [each], groups, block_size=16384, num_pieces=12)
        for each in model.stages()
    ]
    total = sum(layout.num_parameters for layout in layouts)
    assert total == sum(math.prod(s) for s in named_config(name).parameter_shapes().values())
    assert padding(layouts) < 2e-3 * total


def test_starting_state_is_what_the_optimizer_begins_with():
    config = small_config(layers=1)
    with trainer(config, optax.adagrad(1e-2, initial_accumulator_value=0.25), strategy()) as it:
        (accumulator,) = optimizer_state(it.store)
        for name, values in accumulator.items():
            np.testing.assert_array_equal(values, np.full(it.store.shapes[name], 0.25, np.float32))

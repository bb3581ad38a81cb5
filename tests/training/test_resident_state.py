"""Chunks whose training state stays on the compute devices: the same training, nothing copied."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from streamed_training import assert_bitwise_equal, small_config, strategy, train, trainer

from slidedp_jax import TrainingStopped, UserError
from slidedp_jax.state.device_state import DevicePartState

OPTIMIZER = optax.adamw(1e-3, eps=1e-5, weight_decay=0.1)
LAYERS = 4
CHUNKS = LAYERS + 2
ROWS = 12


def batches(config):
    return [random_batch(config, ROWS, 12, packed=True, seed=i) for i in range(3)]


@functools.cache
def run(
    *,
    tied=False,
    num_devices=1,
    policy="deferred",
    ema_decay=None,
    frozen=(),
    rounding="dither",
    **changes,
):
    config = small_config(tied=tied, layers=LAYERS)
    return train(
        config,
        OPTIMIZER,
        strategy(
            rows_per_step=ROWS,
            num_devices=num_devices,
            update_policy=policy,
            num_host_devices=6,
            **changes,
        ),
        batches(config),
        parameters=initial_parameters(config),
        num_devices=num_devices,
        ema_decay=ema_decay,
        frozen=frozen,
        weight_rounding=rounding,
        max_grad_norm=None if policy == "eager" else 0.7,
    )


@pytest.mark.parametrize(
    "rounding", ["dither", pytest.param("nearest", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    ("resident", "case"),
    [
        ((1,), {"num_devices": 3, "rows_per_microbatch": 1, "weight_route": "shard_all_gather"}),
        pytest.param(
            (2, CHUNKS),
            {"num_devices": 2, "policy": "eager", "tied": True},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            (3,),
            {"policy": "eager", "kept_chunks": 2, "layers_per_chunk": 3},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            (3,),
            {"frozen": ("model.layers.0.*", "*norm*"), "ema_decay": 0.9, "prefetch_depth": 3},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            (CHUNKS + 5,),
            {"compute_dtype": "bfloat16", "num_devices": 2, "rows_per_microbatch": 3},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_where_the_state_lies_changes_no_bit(resident, case, rounding):
    """On CPU devices one kernel updates both; a clip is hit in every deferred step."""
    case = case | {"rounding": rounding}
    on_host = run(**case)
    assert case.get("policy") == "eager" or min(on_host.norms) > 0.7
    for resident_chunks in resident:
        assert_bitwise_equal(run(resident_chunks=resident_chunks, **case), on_host)


def test_nothing_of_a_resident_chunk_is_copied():
    config = small_config(layers=LAYERS)
    fetched, pinned, bytes_on_host = [], [], []
    for resident_chunks in (0, 2):
        plan = strategy(rows_per_step=ROWS, resident_chunks=resident_chunks)
        with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
            send, sent = it.passes.send, []
            it.passes.send = lambda chunk, wires, send=send, sent=sent: (
                sent.append(send(chunk, wires)) or sent[-1]
            )
            it.step(batches(config)[0])
            it.wait()
            fetched.append(it.weights.bytes_fetched)
            arrays = [array for one in sent for array in getattr(one, "pinned", ())]
            pinned.append(sum(array.size for array in arrays))
            bytes_on_host.append(sum(a.nbytes for part in it.store.host_parts for a in part.arrays))
            embed, layer = (it.store.layouts[chunk].padded_size for chunk in (0, 1))
    # fp32 compute uploads both halves: the embedding once, a layer once forward and once backward.
    assert fetched[0] - fetched[1] == 4 * (embed + 2 * layer)
    assert pinned[0] - pinned[1] == embed + layer
    assert bytes_on_host[0] - bytes_on_host[1] == 12 * (embed + layer)


def test_each_device_holds_its_share_of_resident_state():
    config = small_config(layers=LAYERS)
    plan = strategy(
        rows_per_step=ROWS,
        num_devices=3,
        resident_chunks=2,
        rows_per_microbatch=1,
        weight_route="shard_all_gather",
        num_host_devices=6,
    )
    with trainer(config, OPTIMIZER, plan, num_devices=3) as it:
        it.step(batches(config)[0])
        it.wait()
        for part in (*it.store.chunks[0], *it.store.chunks[1]):
            for array in part.arrays:
                shares = array.addressable_shards
                assert [share.data.shape for share in shares] == [(array.size // 3,)] * 3
                assert {share.device for share in shares} == set(it._devices)


def test_resident_weights_are_gathered_by_a_program():
    """Whatever the weight route; a sharding that jit changes by itself would be slow on GPUs."""
    config = small_config(layers=LAYERS)
    plan = strategy(resident_chunks=1, rows_per_microbatch=6)
    with trainer(config, OPTIMIZER, plan, num_devices=2) as it:
        it.step(batches(config)[0])
        it.wait()
        layout, parts = it.store.layouts[0], it.store.chunks[0]
        fetched = tuple(tuple((part.arrays[field],) for field in (0, 1)) for part in parts)
        program = it._programs.wire._unpack[layout.signature]
        assert "all_gather" in program.lower(fetched, None).as_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after"), [(CHUNKS, 2), pytest.param(0, 3, marks=pytest.mark.thorough)]
)
def test_a_checkpoint_goes_on_with_other_chunks_on_the_devices(before, after, tmp_path):
    config = small_config(tied=True, layers=LAYERS)
    rows = batches(config)

    def start(resident_chunks, num_devices, seed):
        plan = strategy(
            resident_chunks=resident_chunks,
            rows_per_microbatch=12 // num_devices,
            num_host_devices=6,
        )
        return trainer(config, OPTIMIZER, plan, num_devices=num_devices, seed=seed)

    with start(before, 1, 0) as it:
        it.step(rows[0])
        path = it.save(tmp_path)
        saved = it.parameters()
        loss = it.step(rows[1]).loss
        expected = it.parameters()
    with start(after, 2, 1) as it:
        it.restore(path)
        assert {k: v.tobytes() for k, v in it.parameters().items()} == {
            k: v.tobytes() for k, v in saved.items()
        }
        assert it.step(rows[1]).loss == pytest.approx(loss, rel=1e-6)
        for name, values in it.parameters().items():
            np.testing.assert_allclose(values, expected[name], atol=1e-6, err_msg=name)


def test_restoring_sends_each_resident_array_once(tmp_path, monkeypatch):
    config = small_config(layers=LAYERS)
    plan = strategy(rows_per_step=ROWS, resident_chunks=CHUNKS, layers_per_chunk=1)
    with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
        it.step(batches(config)[0])
        path = it.save(tmp_path)
        expected = it.parameters()
    sent = []
    send = DevicePartState._send
    monkeypatch.setattr(
        DevicePartState,
        "_send",
        lambda part, index: sent.append((id(part), index)) or send(part, index),
    )
    with trainer(config, OPTIMIZER, plan, num_devices=1, seed=1) as it:
        sent.clear()
        it.restore(path)
        arrays = sum(len(part.dtypes) for part in it.store.parts)
        assert len(sent) == len(set(sent)) == arrays
        found = it.parameters()
    assert all(found[name].tobytes() == values.tobytes() for name, values in expected.items())


def test_a_bad_step_leaves_resident_state_as_it_was():
    config = small_config(layers=LAYERS)
    plan = strategy(rows_per_step=ROWS, resident_chunks=3)
    with trainer(config, OPTIMIZER, plan, num_devices=1, max_loss=1e-3) as it:
        before = it.parameters()
        with pytest.raises(TrainingStopped, match="loss"):
            _ = it.step(batches(config)[0]).grad_norm
        found = {name: it.store.read(name) for name in before}
    assert all(found[name].tobytes() == before[name].tobytes() for name in before)


def test_state_on_the_devices_needs_an_elementwise_optimizer_and_summed_gradients():
    config = small_config(layers=1)
    refused = trainer(config, optax.lamb(1e-3), strategy(resident_chunks=2), num_devices=1)
    with pytest.raises(UserError, match="resident_chunks=0"), refused:
        pass
    with pytest.raises(ValueError, match="use 'reduce_scatter'"):
        strategy(resident_chunks=1, gradient_route="host_sum")


def test_resident_state_passes_through_host_memory_an_array_at_a_time():
    """An array goes to the devices when all of it has been written, not when it is first used."""
    config = small_config(layers=LAYERS)
    plan = strategy(resident_chunks=CHUNKS)
    with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
        parts = it.store.parts
        assert not any(part._written for part in parts)
        names = it.store.parameter_names
        expected = {name: np.full(it.store.shapes[name], i + 1.0) for i, name in enumerate(names)}
        for name in names[:-1]:
            it.store.write(name, expected[name])
        waiting = [part for part in parts if part._written]
        assert waiting in ([], [it.store._slots[names[-1]][0]])
        assert it.store.read(names[0]).tobytes() == expected[names[0]].astype(np.float32).tobytes()
        it.store.write(names[-1], expected[names[-1]])
        assert not any(part._written for part in parts)
        # A second time, and only some of it: the rest stays.
        it.store.write(names[1], -expected[names[1]])
        for name, values in expected.items():
            wanted = -values if name == names[1] else values
            np.testing.assert_array_equal(it.store.read(name), wanted, err_msg=name)


def test_what_is_written_beside_a_reader_arrives():
    """A reader waits for writers; a shorter range written later does not undo a longer one."""
    config = small_config(layers=LAYERS)
    plan = strategy(resident_chunks=CHUNKS)
    with trainer(config, OPTIMIZER, plan, num_devices=1) as it:
        part = max(it.store.parts, key=lambda part: part.layout.num_parameters)
        size = part.layout.num_parameters // 8
        wanted = np.concatenate([np.full(size, i + 1.0, np.float32) for i in range(8)])
        stop = threading.Event()

        def keep_reading():
            while not stop.is_set():
                _ = part.arrays

        reader = threading.Thread(target=keep_reading)
        reader.start()
        with ThreadPoolExecutor(4) as pool:
            for _ in range(10):
                cuts = [(i * size, wanted[i * size : (i + 1) * size]) for i in range(8)]
                list(pool.map(lambda cut: part.write(2, *cut), cuts))
                np.testing.assert_array_equal(part.read(2, 0, 8 * size), wanted)
                wanted = -wanted
        stop.set()
        reader.join()
        part.write(2, 0, np.ones(20, np.float32))
        part.write(2, 0, np.full(3, 2.0, np.float32))
        part.write(2, 0, np.empty(0, np.float32))
        expected = [2.0] * 3 + [1.0] * 17
        np.testing.assert_array_equal(part.read(2, 0, 20), expected)

"""Each thing that JAX, XLA and Orbax do not promise; what fails here has changed there."""

import glob
import importlib.metadata
import importlib.util
import logging
import mmap
import os
import pathlib
import re
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax import jax_internals
from slidedp_jax.jax_internals import (
    addresses,
    bytes_accessed,
    called_program,
    cuda_capability,
    draws_from_constants,
    inner_programs,
    inputs_read,
    is_fused_attention,
    is_ready,
    jaxpr_of,
    packed_cudnn_attention,
    page_lock,
    page_unlock,
    passed_through,
    pullback_parts,
    raw_view,
    read_arrays,
    say_failures_once,
    temporary_bytes,
    values_within,
    varying_axes,
)

ROOT = pathlib.Path(__file__).parents[1]
JAX = importlib.metadata.version("jax")

no_gpu = pytest.mark.skipif(
    not (pathlib.Path("/dev/nvidiactl").exists() and jax_internals.has_cuda_plugin()),
    reason="needs an NVIDIA GPU and JAX's CUDA plugin",
)


def run(code: str, **environment: str) -> str:
    """What a fresh process prints; it computes on the CPU."""
    dropped = ("XLA_FLAGS", "JAX_PLATFORMS", "PJRT_NPROC")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.stdout if result.returncode == 0 else f"failed: {result.stderr}"


# Before JAX's first use.


def test_it_is_known_whether_the_backends_have_started():
    told = run(
        "from slidedp_jax.jax_internals import backends_have_started as it\n"
        "told = [it()]\nimport jax; told.append(it())\n"
        "jax.devices(); told.append(it())\nprint(told)"
    )
    assert told == "[False, False, True]\n"


def test_a_jax_that_does_not_tell_is_named(monkeypatch):
    monkeypatch.delattr("jax._src.xla_bridge.backends_are_initialized")
    with pytest.raises(RuntimeError, match=rf"JAX {JAX} no longer has jax\._src\.xla_bridge"):
        jax_internals.backends_have_started()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flag",
    [
        *(f"--{name}={value}" for name, value in jax_internals.CHOOSE_WITHOUT_TIMING.items()),
        *(f"--{name}={value}" for name, value in jax_internals.WITHOUT_GRAPHS.items()),
        jax_internals.RAGGED_DOT_FUSION,
    ],
)
def test_xla_knows_the_flags_that_are_set_beside_gpus(flag):
    name = flag.lstrip("-").split("=")[0]
    start = "import jax; print(jax.devices()[0].platform)"
    assert run(start, XLA_FLAGS=flag) == "cpu\n"
    assert f"Unknown flag in XLA_FLAGS: --{name}x" in run(start, XLA_FLAGS=f"--{name}x=0")


@pytest.mark.thorough
def test_xla_knows_the_option_of_multi_output_fusion():
    """It changes what two results over the same inputs are compiled to."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "both = jax.jit(lambda a, b: (jnp.sin(a * b) + a, jnp.sin(a * b) - b))\n"
        "x = jnp.ones(4096)\n"
        "print(both.lower(x, x).compile().as_text())"
    )
    option = jax_internals.BACKEND_OPTIONS + jax_internals.MULTI_OUTPUT_FUSION
    plain, fused, unknown = (run(code, XLA_FLAGS=flag) for flag in ("", option, option + "x"))
    assert "failed" not in plain + fused + unknown
    assert plain == unknown != fused


@pytest.mark.thorough
def test_the_number_of_cpu_threads_is_set_by_a_variable():
    code = (
        "import glob, jax\njax.block_until_ready(jax.jit(lambda x: x + 1)(1))\n"
        "names = [open(f).read() for f in glob.glob('/proc/self/task/*/comm')]\n"
        "print(sum('Eigen' in name for name in names))"
    )
    counts = [run(code, **{jax_internals.NUM_CPU_THREADS: number}) for number in ("3", "17")]
    assert counts == ["3\n", "17\n"]


def test_the_share_of_gpu_memory_is_set_by_a_variable(monkeypatch):
    from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

    for name in (jax_internals.GPU_MEMORY_FRACTION, jax_internals.FORMER_MEMORY_FRACTION):
        monkeypatch.delenv(name, raising=False)
    assert "memory_fraction" not in generate_pjrt_gpu_plugin_options()
    jax_internals.set_gpu_memory_fraction(0.81)
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.81
    jax_internals.set_gpu_memory_fraction(0.5)
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.81
    monkeypatch.delenv(jax_internals.GPU_MEMORY_FRACTION)
    monkeypatch.setenv(jax_internals.FORMER_MEMORY_FRACTION, "0.7")  # JAX refuses both together
    jax_internals.set_gpu_memory_fraction(0.5)
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.7


@pytest.mark.skipif(not jax_internals.has_cuda_plugin(), reason="needs JAX's CUDA plugin")
def test_the_gpu_client_reads_the_cap_of_pinned_memory():
    folders = [
        folder
        for name in ("jaxlib", "jax_plugins")
        for folder in importlib.util.find_spec(name).submodule_search_locations
    ]
    libraries = [
        path for folder in folders for path in glob.glob(f"{folder}/**/*.so", recursive=True)
    ]

    def names_it(path):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(jax_internals.PINNED_LIMIT_GIB.encode()) >= 0

    assert any(map(names_it, libraries))


def test_the_cuda_plugin_is_found_by_the_names_of_its_modules(monkeypatch, tmp_path):
    released = {
        int(found[1])
        for wanted in importlib.metadata.requires("jax")
        if (found := re.match(r"jax-cuda(\d+)-plugin", wanted))
    }
    assert released <= {12, 13}
    assert released
    code = "from slidedp_jax.jax_internals import has_cuda_plugin; print(has_cuda_plugin())"
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    assert run(code, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}") == "True\n"


def test_the_version_is_known_without_jax():
    assert jax_internals.jax_version() == tuple(map(int, jax.__version__.split(".")[:2]))
    gains = [jax_internals.gains_from_multi_output_fusion((0, minor)) for minor in (10, 11, 12)]
    assert gains == [True, True, False]


# Arrays and memory.


def host_sharding(count=4):
    mesh = Mesh(np.array(jax.devices("cpu")[8 : 8 + count]), ("host",))
    return NamedSharding(mesh, PartitionSpec("host"), memory_kind="pinned_host")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int16, jnp.float32, jnp.uint8])
def test_a_donated_array_is_written_in_place_and_seen_by_its_raw_views(dtype):
    sharding, size = host_sharding(), 4 * 1024
    make = jax.jit(lambda: jnp.arange(size).astype(dtype), out_shardings=sharding)
    add = jax.jit(
        lambda x: jax.device_put(x, jax.memory.Space.Device) + jnp.ones((), dtype),
        donate_argnums=0,
        out_shardings=sharding,
    )
    array = jax.block_until_ready(make())
    places = addresses(array)
    assert len({*places}) == 4
    views = [raw_view(place, size // 4, array.dtype) for place in places]
    expected = np.arange(size).astype(np.dtype(dtype))
    np.testing.assert_array_equal(np.concatenate(views), expected)
    views[2][5] = expected[2 * 1024 + 5] = 3  # what is written through a view, the program reads
    for _ in range(2):
        array = jax.block_until_ready(add(array))
        expected = expected + np.ones((), expected.dtype)
        assert addresses(array) == places
    np.testing.assert_array_equal(np.concatenate(views), expected)
    np.testing.assert_array_equal(np.asarray(array), expected)


def test_every_client_can_lock_pages_but_that_of_cpus():
    device = jax.devices("cpu")[0]
    memory = np.zeros(1 << 20, np.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="DmaMap"):
        page_lock(device, memory.ctypes.data, memory.nbytes)
    with pytest.raises(jax.errors.JaxRuntimeError, match="DmaUnmap"):
        page_unlock(device, memory.ctypes.data)


@no_gpu
def test_a_gpu_locks_pages_and_says_what_it_is():
    code = (
        "import mmap, jax, numpy as np\n"
        "from slidedp_jax.jax_internals import cuda_capability, page_lock, page_unlock\n"
        "gpu, size = jax.devices()[0], 1 << 24\n"
        "memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)\n"
        "for _ in range(2):\n"
        "    page_lock(gpu, memory.ctypes.data, size)\n"
        "    memory[:] = 7\n"
        "    assert int(jax.device_put(memory, gpu).astype('int32').sum()) == 7 * size\n"
        "    page_unlock(gpu, memory.ctypes.data)\n"
        "print(cuda_capability(gpu) >= 7)"
    )
    assert run(code, JAX_PLATFORMS="cuda,cpu") == "True\n"


def test_an_array_tells_whether_it_is_there():
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.ones((256, 256))
    jax.block_until_ready(program(x))
    array = program(x)
    assert not is_ready(array)
    deadline = time.monotonic() + 60
    while not is_ready(array):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nvidia_gpus_are_told_from_others():
    def gpu(version):
        client = types.SimpleNamespace(platform_version=version)
        return types.SimpleNamespace(platform="gpu", client=client, compute_capability="9.0")

    assert isinstance(jax.devices("cpu")[0].client.platform_version, str)
    assert cuda_capability(jax.devices("cpu")[0]) is None
    assert cuda_capability(gpu("PJRT C API\ncuda 13000")) == 9.0
    assert cuda_capability(gpu("PJRT C API\nrocm 70000")) is None


# Traced and compiled programs.


def packed_arguments():
    q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    lengths = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    return q, kv, kv, offsets, lengths


def attend_packed(q, k, v, offsets, lengths):
    return packed_cudnn_attention()(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=0.125,
        sliding_window_length=None,
    )


def attend_whole(q, k, v, *_):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


@pytest.mark.parametrize("attend", [attend_packed, attend_whole])
def test_cudnn_attention_is_one_primitive_of_a_known_name(attend, traced_cudnn):
    q, *others = packed_arguments()

    def both_ways(q, *others):
        y, pullback = jax.vjp(lambda q: attend(q, *others), q)
        return y, pullback(y)

    traced = jax.make_jaxpr(both_ways)(q, *others)
    assert [aval.shape for aval in traced.out_avals] == [q.shape, q.shape]
    named = [eqn.primitive for eqn in traced.eqns if "attention" in eqn.primitive.name]
    assert list(map(is_fused_attention, named)) == [True, False]  # forward, backward


def test_a_jax_without_packed_attention_is_named(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    fresh = packed_cudnn_attention.__wrapped__
    monkeypatch.setattr(fused, "dot_product_attention", lambda q, k, v, *, mask_type, scale: q)
    assert f"JAX {JAX} has no packed cuDNN call" in fresh()
    assert "it lacks kv_offsets, kv_seqlen, q_offsets, q_seqlen, qkv_layout" in fresh()
    monkeypatch.delattr(fused, "dot_product_attention")
    assert "has no attribute 'dot_product_attention'" in fresh()


@jax.custom_jvp
def by_own_tangent(x):
    return jnp.sin(x)


by_own_tangent.defjvps(lambda t, _, x: t * x)


@jax.custom_vjp
def by_own_gradient(x):
    return jnp.sin(x)


by_own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * x,))


@pytest.mark.parametrize(
    "call",
    [jax.jit(jnp.sin), by_own_tangent, by_own_gradient, jax.checkpoint(jnp.sin)],
    ids=["jit", "jvp", "vjp", "checkpoint"],
)
def test_programs_within_programs_are_seen(call):
    (equation,) = jax.make_jaxpr(call)(1.0).eqns
    jaxpr, constants = called_program(equation)
    assert [inner.primitive.name for inner in jaxpr.eqns] == ["sin"]
    assert len(jaxpr.invars) == len(equation.invars)
    assert len(jaxpr.constvars) == len(constants) == 0


def test_a_program_with_constants_brings_them():
    table = np.arange(3.0, dtype=np.float32)
    (equation,) = jax.make_jaxpr(jax.jit(lambda x: x + table))(table).eqns
    jaxpr, constants = called_program(equation)
    assert len(jaxpr.constvars) == len(constants)
    assert len(jaxpr.invars) == len(equation.invars)


def test_loops_and_branches_are_no_calls():
    def program(x):
        x = jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)
        return jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x)

    names = {eqn.primitive.name: called_program(eqn) for eqn in jax.make_jaxpr(program)(1.0).eqns}
    assert {"cond", "scan"} <= names.keys()
    assert {*names.values()} == {None}


def test_all_programs_within_an_equation_are_found():
    def program(x):
        x = jax.lax.cond(x > 0, jnp.sin, jnp.cos, jax.checkpoint(jnp.exp)(x))
        x = jax.lax.fori_loop(0, x.astype(int), lambda _, y: jnp.tanh(y), x)
        return by_own_gradient(x), jax.vmap(lambda y: jnp.log(y))(x[None])

    def names(jaxpr):
        return {eqn.primitive.name for eqn in jaxpr.eqns} | {
            name for eqn in jaxpr.eqns for inner in inner_programs(eqn) for name in names(inner)
        }

    traced = jax.make_jaxpr(jax.jit(program))(1.0)
    assert {"sin", "cos", "exp", "tanh", "log", "cond", "while"} <= names(jaxpr_of(traced))
    assert jaxpr_of(jaxpr_of(traced)) is jaxpr_of(traced)


def test_what_a_program_reads_is_seen_through_calls_loops_and_branches():
    def program(read, dropped, looped, branched, shape_alone):
        first, _ = jax.jit(lambda a, b: (a * 2, b * 3))(read, dropped)
        looped = jax.lax.fori_loop(0, 3, lambda _, y: y * 2, looped)
        branched = jax.lax.cond(first > 0, lambda b: b, lambda b: -b, branched)
        return first + looped + branched + jnp.zeros_like(shape_alone)

    assert inputs_read(jax.make_jaxpr(program)(*[1.0] * 5)) == [True, False, True, True, False]


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_numbers_of_a_key_made_within_a_program_are_known(implementation):
    def own(key, x):
        inner = jax.random.key(0, impl=implementation)
        return jax.checkpoint(lambda x: x + jax.random.uniform(inner, x.shape))(x)

    def given(key, x):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=implementation), 3)
        return jax.lax.fori_loop(0, 2, lambda i, x: x + jax.random.normal(key, x.shape), x)

    def unread(key, x):
        jax.random.normal(jax.random.key(0, impl=implementation), x.shape)
        return x

    data = jax.random.key_data(jax.random.key(0, impl=implementation))
    found = [
        draws_from_constants(jax.make_jaxpr(program)(data, jnp.ones(3)), [True, False])
        for program in (own, given, unread, lambda key, x: given(key, own(key, x)))
    ]
    assert found == [True, False, False, True]


def test_results_that_are_arguments_are_known_through_calls():
    def inner(a, b):
        return b, a * 2, a

    def program(a, b, c):
        first = jax.checkpoint(inner)(a, b)
        second = jax.jit(jax.checkpoint(inner))(c, first[0])
        return first[0], second[0], second[1], second[2], c + 0

    traced = jax.make_jaxpr(program)(1.0, 2.0, 3.0)
    assert passed_through(traced) == [1, 1, None, 2, None]


def test_values_within_a_program_are_computed_wherever_they_are():
    def turn(carry, row):
        carry = jax.checkpoint(lambda c: c + 1)(carry)
        return carry, row * 10

    def program(x):
        y = jax.jit(lambda x: jnp.sin(x) * 2)(x)
        y, rows = jax.lax.scan(turn, y, jnp.stack([x, x]), reverse=True)
        y = jax.lax.cond(y.sum() > 0, lambda y: y * 3, lambda y: y * 5, by_own_gradient(y))
        return y.sum() + rows.sum()

    x = np.array([0.1, 0.2, 0.3], np.float32)
    traced = jax.make_jaxpr(program)(x)
    found = [np.asarray(v) for v in jax.jit(lambda x: values_within(traced, [x], 3))(x)]
    y = 2 * np.sin(x)
    expected = [np.sin(x), y, y + 1, 10 * x, y + 2, 3 * np.sin(y + 2)]
    for wanted in expected:
        assert any(np.allclose(value, wanted, rtol=1e-6) for value in found), wanted
    assert all(value.shape == (3,) for value in found)


def test_a_pullback_holds_the_tracers_that_it_was_given():
    seen = {}

    def program(w, unread, x):
        y, pullback = jax.vjp(jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), w, x)
        structure, leaves, places = pullback_parts(pullback, [unread, w, x])
        seen["places"] = places
        again = jax.tree.unflatten(structure, leaves)
        return [a - b for a, b in zip(again(y), pullback(y), strict=True)]

    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    differences = jax.jit(program)(w, w, x)
    assert sorted(place for place in seen["places"] if place is not None) == [1, 2]
    assert not any(jnp.any(difference) for difference in differences)


def test_a_jax_whose_pullbacks_hold_copies_is_named(monkeypatch):
    true_vjp = jax.vjp

    def copying(*arguments):
        y, pullback = true_vjp(*arguments)
        return y, jax.tree.map(jnp.copy, pullback)

    jax_internals._check_pullbacks.cache_clear()
    monkeypatch.setattr(jax, "vjp", copying)
    with pytest.raises(RuntimeError, match=rf"JAX {JAX} no longer has the arrays that jax\.vjp"):
        jax.eval_shape(lambda x: pullback_parts(copying(jnp.sin, x)[1], [x])[1], 1.0)
    monkeypatch.undo()
    jax.eval_shape(lambda x: pullback_parts(true_vjp(jnp.sin, x)[1], [x])[1], 1.0)


def test_the_axes_over_which_an_array_varies_are_known():
    seen = {}

    def program(same, own):
        seen.update(same=varying_axes(same), own=varying_axes(own), both=varying_axes(same + own))
        return same + own

    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("a", "b"))
    specs = (PartitionSpec(), PartitionSpec("b"))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=specs[1])
    jax.jit(mapped)(jnp.ones(2), jnp.ones(4))
    assert seen == {"same": frozenset(), "own": {"b"}, "both": {"b"}}
    assert varying_axes(jnp.ones(2)) == frozenset()


def test_xla_gives_account_of_memory_and_traffic():
    n = 1 << 12
    add = jax.jit(lambda a, b: a + b).lower(jnp.ones(n), jnp.ones(n)).compile()
    assert (temporary_bytes(add), bytes_accessed(add)) == (0, 3 * 4 * n)
    product = jax.jit(lambda x: jnp.sum(jnp.sort(x) @ x)).lower(jnp.ones((64, 64))).compile()
    assert temporary_bytes(product) >= 4 * 64 * 64


@pytest.mark.parametrize("account", [temporary_bytes, bytes_accessed])
def test_a_backend_without_such_an_account_is_named(account):
    silent = types.SimpleNamespace(memory_analysis=lambda: None, cost_analysis=lambda: None)
    with pytest.raises(RuntimeError, match="_analysis"):
        account(silent)


# Orbax.


def test_arrays_are_written_and_read_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "one": {"master": rng.standard_normal((300, 32), np.float32)},
        "two": {
            "master": np.array([np.nan, -0.0, np.inf], np.float32),
            "state_0": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
            "state_1": np.array(7, np.int32),
        },
    }
    item = tmp_path / "item"
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True)
    ocp.Checkpointer(handler).save(item, args=ocp.args.PyTreeSave(arrays))
    specs = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    for found in (read_arrays(item), read_arrays(item, specs)):
        jax.tree.map(
            lambda a, b: np.testing.assert_equal(np.asarray(a).tobytes(), b.tobytes()),
            found,
            arrays,
        )
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(read_arrays(item, specs)))
    with pytest.raises((ValueError, OSError)):
        read_arrays(tmp_path / "other", specs)
    with pytest.raises((ValueError, KeyError)):
        read_arrays(item, specs | {"three": specs["one"]})


def test_failures_of_orbax_are_said_once(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: told.append(raised.exc_value))
    filters = {name: list(logging.getLogger(name).filters) for name in ("absl", "asyncio")}
    say_failures_once.__wrapped__()
    try:
        for text, of in (("Event loop is closed", None), ("Event loop is closed", 1), ("x", None)):
            sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text), object=of))
        assert [str(error) for error in told] == ["Event loop is closed", "x"]
        for name, text, kept in (
            (
                "absl",
                "[process=0][thread=x] _SignalingThread.run() raised an exception: full",
                False,
            ),
            ("absl", "something else", True),
            (
                "asyncio",
                "Task exception was never retrieved\nfuture: <Task coro=<NumpyHandler._open()>>",
                False,
            ),
            ("asyncio", "Task exception was never retrieved\nfuture: <Task coro=<mine()>>", True),
        ):
            record = logging.LogRecord(name, logging.ERROR, "", 0, text, None, None)
            assert bool(logging.getLogger(name).filter(record)) == kept
    finally:
        for name, before in filters.items():
            logging.getLogger(name).filters[:] = before


def test_the_service_of_several_hosts_keeps_values_and_has_barriers():
    printed = run(
        "import socket, jax\n"
        "from slidedp_jax.jax_internals import service_client\n"
        "assert service_client() is None\n"
        "with socket.socket() as tried:\n"
        "    tried.bind(('127.0.0.1', 0)); port = tried.getsockname()[1]\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', 1, 0)\n"
        "client = service_client()\n"
        "client.key_value_set('a/b/0', 'one', allow_overwrite=True)\n"
        "client.key_value_set('a/b/0', 'two', allow_overwrite=True)\n"
        "client.key_value_set('a/bc/0', 'three', allow_overwrite=True)\n"
        "client.wait_at_barrier('here', 1000)\n"
        "print(client.key_value_dir_get('a/b/'), client.key_value_dir_get('x/'))"
    )
    assert printed.strip() == "[('a/b/0', 'two')] []"


def test_events_of_a_profile_are_where_the_clock_says(tmp_path):
    """Only planes of devices are read, so the host's stands in for one here."""
    with jax.profiler.trace(str(tmp_path)):
        began = time.time_ns()
        with jax.profiler.TraceAnnotation("marked"):
            time.sleep(0.002)
        ended = time.time_ns()
    (file,) = tmp_path.rglob("*.xplane.pb")
    assert list(jax_internals.traced_events(file)) == []  # no device, on a CPU
    profile = file.read_bytes()
    assert profile.count(b"/host:CPU") == 1
    file.write_bytes(profile.replace(b"/host:CPU", b"/device:C"))
    (marked,) = [e for e in jax_internals.traced_events(file) if e.name == "marked"]
    assert marked.plane == "/device:C" and marked.stats() == frozenset()
    millisecond = 1_000_000  # the profiler has a clock of its own
    assert began - millisecond <= marked.start_ns
    assert marked.start_ns + marked.duration_ns <= ended + millisecond
    assert marked.duration_ns >= 2 * millisecond

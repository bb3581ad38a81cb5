"""What the package relies on though JAX, XLA and Orbax do not promise it, all in one place.

One function or constant each; it says what it relies on and what breaks if that changes. Each has a
test of its own (`tests/test_jax_internals.py`), so that a version that changes one fails there and
says which. JAX and Orbax are imported by the functions that need them: some of this comes before
JAX's first use, and the planner does without.

What public functions do without promising it stays with its use and its test: which forms of the
update are fast (`update/kernel_form.py`), that XLA's pinned pool keeps what it is given
(`planner/pinned_pool.py`), which primitives multiply matrices (`adapter/matmul_flops.py`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.extend.core import Jaxpr, JaxprEqn, Primitive

# Before JAX's first use.

CHOOSE_WITHOUT_TIMING: Mapping[str, str] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": "false",
}
"""XLA flags under which kernels of matrix products are chosen by cuBLAS's rules.

By default XLA times candidates while it compiles and takes the fastest, which differs from one
compilation to the next and with it the last bits of results: on an H200 the same command ended in
other weights (docs/benchmarks). Steps are as fast, and compiling is twice as fast. XLA ends the
process at a flag that it does not know; one that means something else shows in `check_same_bits`.
"""

WITHOUT_GRAPHS: Mapping[str, str] = {"xla_gpu_enable_command_buffer": ""}
"""XLA flags under which no programs become CUDA graphs.

When jax.profiler stops, it has CUPTI let go of the process, and where XLA has made graphs of
programs the next call of CUDA then fails for good with CUDA_ERROR_LAUNCH_FAILED (JAX 0.11.2, CUDA
13, an H200; github.com/jax-ml/jax #40260). Steps of a small model, which Python bounds, take an
eighth longer without graphs.
"""

MULTI_OUTPUT_FUSION = "xla_cpu_use_multi_output_fusion"
"""Option of XLA:CPU under which the outputs of one host update are compiled together.

An unknown option is ignored without a word, and the update is then 2 to 5 times slower.
"""

BACKEND_OPTIONS = "--xla_backend_extra_options="
"""XLA flag that takes such options, separated by commas; the last one given wins."""

NUM_CPU_THREADS = "PJRT_NPROC"
"""Environment variable: threads of XLA's CPU client. Unknown, a collective of more devices than
there are cores could wait for ever for a thread."""

GPU_MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
"""Environment variable: share of a GPU's memory that JAX reserves at its start. Unknown, it would
reserve its usual three quarters, and plans that need more would run out of memory."""

FORMER_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Its former name; JAX refuses to start where both are set."""

PINNED_LIMIT_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable: cap of the pinned host pool of JAX's GPU client. Unknown, the pool would
end at 64 GiB, and gradients of larger models would find no room."""


RAGGED_DOT_FUSION = "--xla_gpu_experimental_use_ragged_dot_fusion=true"
"""Flag under which XLA has cuDNN multiply rows with their group's matrix. Without it, `ragged_dot`
on a GPU is one product with every group's matrix, so it is not used there. Asked for by the user
only: XLA does not start with a flag that it does not know."""


def jax_version() -> tuple[int, int]:
    """Major and minor version, without importing JAX."""
    major, minor = importlib.metadata.version("jax").split(".")[:2]
    return int(major), int(minor)


def gains_from_multi_output_fusion(version: tuple[int, int]) -> bool:
    """Whether the host update is faster with `MULTI_OUTPUT_FUSION`, by version of JAX.

    On 0.11 the blocked update then runs about five times as fast, on 0.10 the one on whole arrays
    twice as fast. From 0.12 on XLA compiles the loop as one kernel by itself, and with the option
    it no longer writes in place. `scripts/bench/bench_host_update.py` measures a new version.
    """
    return version < (0, 12)


def xla_flags() -> list[str]:
    """Flags that XLA will read, or has read, from the environment."""
    return os.environ.get("XLA_FLAGS", "").split()


def add_xla_flags(wanted: Mapping[str, str]) -> None:
    """Set flags, name to value, that nobody has set otherwise.

    Relies on XLA reading `XLA_FLAGS` when its backends start, and only then.
    """
    named = {flag.lstrip("-").split("=")[0] for flag in xla_flags()}
    added = [f"--{name}={value}" for name, value in wanted.items() if name not in named]
    os.environ["XLA_FLAGS"] = " ".join([*xla_flags(), *added])


def graph_flags() -> list[str]:
    """Flags that are set otherwise than `WITHOUT_GRAPHS` wants them."""
    unset = [f"--{name}={value}" for name, value in WITHOUT_GRAPHS.items()]
    named = [flag.split("=")[0] for flag in unset]
    return [flag for flag in xla_flags() if flag.split("=")[0] in named and flag not in unset]


def add_backend_option(option: str) -> None:
    """Add to the `BACKEND_OPTIONS` an option that nobody has set otherwise."""
    given = [flag for flag in xla_flags() if flag.startswith(BACKEND_OPTIONS)]
    options = given[-1].removeprefix(BACKEND_OPTIONS).split(",") if given else []
    if not any(other.startswith(option) for other in options):
        options.append(option)
    others = [flag for flag in xla_flags() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([*others, BACKEND_OPTIONS + ",".join(options)])


def set_gpu_memory_fraction(fraction: float) -> float:
    """Set `GPU_MEMORY_FRACTION` where the user has not, under either name; what then holds."""
    former = FORMER_MEMORY_FRACTION in os.environ
    return _set_number(FORMER_MEMORY_FRACTION if former else GPU_MEMORY_FRACTION, fraction)


def set_pinned_limit_gib(limit_gib: int) -> int:
    """Set `PINNED_LIMIT_GIB` where the user has not; what then holds."""
    return int(_set_number(PINNED_LIMIT_GIB, limit_gib))


def _set_number(name: str, number: float) -> float:
    """What the environment says, or from now on `number`."""
    text = os.environ.setdefault(name, str(number))
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{name}={text!r} in the environment; give a number, or unset it"
        ) from None


def has_cuda_plugin() -> bool:
    """Whether JAX's CUDA plugin is installed.

    Relies on the names of its modules, `jax_plugins.xla_cuda12` and `13`; under another name,
    platform "auto" would compute on the CPU.
    """
    return any(_is_module(f"jax_plugins.xla_cuda{major}") for major in (12, 13))


def backends_have_started() -> bool:
    """Whether JAX's backends have started, without starting them.

    Relies on `jax._src.xla_bridge`, which alone knows. Could it not be told, `configure()` might
    come too late, and XLA ignores flags that are set then.

    Raises:
      RuntimeError: this version of JAX does not tell.
    """
    if "jax" not in sys.modules:
        return False
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError as error:
        raise _changed("jax._src.xla_bridge.backends_are_initialized") from error
    return backends_are_initialized()


def _changed(what: str) -> RuntimeError:
    """The error where a version of JAX lacks something that there is no doing without."""
    return RuntimeError(
        f"JAX {importlib.metadata.version('jax')} no longer has {what} as slidedp_jax knows it "
        "(slidedp_jax/jax_internals.py). Install an older JAX, or a newer slidedp_jax"
    )


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# Several hosts.


def service_client() -> Any:
    """This process's client of the service that `jax.distributed.initialize` joins; None: not yet.

    Relies on `jax._src.distributed.global_state`, since JAX offers neither the service's table of
    keys and values nor its barriers. Used are `key_value_set(key, value, allow_overwrite)`,
    `key_value_dir_get(prefix)`, pairs of whole keys and values, and `wait_at_barrier(name,
    milliseconds)`.

    Raises:
      RuntimeError: this version of JAX has no such thing.
    """
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except (ImportError, AttributeError) as error:
        raise _changed("jax._src.distributed.global_state.client") from error


# Arrays and memory.

_INTEGERS: Mapping[int, Any] = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}


def addresses(array: jax.Array) -> list[int]:
    """Addresses of an array's pieces in host memory, in the order of its sharding's devices.

    Relies on `unsafe_buffer_pointer`, and, with all that is built on it, on programs writing
    donated arrays of memory kind `pinned_host` in place and on JAX never moving an array. An update
    that moves its state is noticed (`PartState.replace`).
    """
    # `addressable_shards` computes an index per shard; `addressable_data` only looks up.
    count = len(array.sharding.device_set)
    return [array.addressable_data(number).unsafe_buffer_pointer() for number in range(count)]


def raw_view(address: int, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Writable NumPy view of `size` elements at an address.

    JAX does not know of it: the owner of the memory must not free or move it, and the caller must
    not read while a program writes. (A view made by `np.asarray(array)` is tracked, and turns the
    array's next donation into a silent copy.)
    """
    import numpy as np

    dtype = np.dtype(dtype)
    raw = (_INTEGERS[dtype.itemsize] * size).from_address(address)
    return np.ctypeslib.as_array(raw).view(dtype)


def page_lock(device: jax.Device, address: int, num_bytes: int) -> None:
    """Register a range of host memory with the driver of a GPU.

    Relies on `dma_map` of the device's client, and on copies from registered memory taking no
    detour; without the latter uploads would be as slow as from pageable memory.

    Raises:
      Exception: the driver refuses; of what type is not said.
    """
    device.client.dma_map(address, num_bytes)


def page_unlock(device: jax.Device, address: int) -> None:
    """Undo `page_lock`; must come before the memory is freed."""
    device.client.dma_unmap(address)


def is_ready(array: jax.Array) -> bool:
    """Whether an array's values are there, without waiting for them.

    Relies on `is_ready`, which the type of arrays does not list. Without it updates would wait for
    their gradients in the order of the chunks.
    """
    unlisted: Any = array
    return bool(unlisted.is_ready())


def cuda_capability(device: jax.Device) -> float | None:
    """Compute capability of an NVIDIA GPU, None of any other device.

    Relies on `client.platform_version` naming CUDA (JAX calls ROCm devices `gpu` too) and on
    `compute_capability`; told otherwise, cuDNN's attention would no longer be chosen.
    """
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return None
    return float(device.compute_capability)


# Traced and compiled programs.

FUSED_ATTENTION = "dot_product_attention_fwd"
"""How names of cuDNN's primitives begin. By another name attention would be recomputed silently in
the backward pass of chunks that keep their results."""

CALLS = frozenset(
    {"pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
    | {"remat2", "remat", "checkpoint"}
)
"""Names of primitives that run another program. One of another name would look as if each of its
results depended on all of its inputs, and optimizers and layers that use it would be refused."""


def is_fused_attention(primitive: Primitive) -> bool:
    """Whether a primitive is a fused attention program's forward pass (`FUSED_ATTENTION`)."""
    return primitive.name.startswith(FUSED_ATTENTION)


def called_program(equation: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Jaxpr and constants that an equation runs on its operands as they are, None of any other.

    Relies on the names in `CALLS` and on their parameters `jaxpr` or `call_jaxpr`.
    """
    if equation.primitive.name not in CALLS:
        return None
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    if inner is None:
        return None
    return jaxpr_of(inner), getattr(inner, "consts", ())


def jaxpr_of(program: Any) -> Jaxpr:
    """The equations of what `jax.make_jaxpr` returns, or of a program within an equation.

    Such a program holds its constants beside a jaxpr; from JAX 0.12 on it is the jaxpr itself.
    """
    jaxpr: Jaxpr = getattr(program, "jaxpr", program)
    return jaxpr


def inner_programs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Programs that an equation runs, calls, loops and branches alike.

    Relies on their being its parameters, or in tuples of them; one that is held otherwise would be
    left out of what is counted.
    """
    from jax.extend.core import Jaxpr

    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            jaxpr = jaxpr_of(part)
            if isinstance(jaxpr, Jaxpr):
                yield jaxpr


def inputs_read(program: Any) -> list[bool]:
    """Which inputs of a traced program (`jax.make_jaxpr`) its results depend on.

    Relies on `dce_jaxpr` of `jax.interpreters.partial_eval`. It decides which stage owns a
    parameter, and whether the embedding's gradient needs its weights.

    Raises:
      RuntimeError: this version of JAX has no such function.
    """
    return _needed(program)[1]


def _needed(program: Any) -> tuple[Jaxpr, list[bool]]:
    """A traced program without what none of its results needs, and which inputs are left of it."""
    try:
        from jax.interpreters.partial_eval import dce_jaxpr
    except ImportError as error:
        raise _changed("jax.interpreters.partial_eval.dce_jaxpr") from error
    jaxpr = jaxpr_of(program)
    needed, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return needed, list(used)


DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Names of primitives that make random numbers. Of one by another name it would not be noticed that
its numbers are the same in each step."""


def draws_from_constants(program: Any, keys: Sequence[bool]) -> bool:
    """Whether results of a traced program need random numbers from a key that is made within it.

    Args:
      program: from `jax.make_jaxpr`.
      keys: which of its inputs are keys.
    """
    needed, used = _needed(program)

    def within(jaxpr: Jaxpr, given: Sequence[bool]) -> bool:
        from_keys = {var for var, is_given in zip(jaxpr.invars, given, strict=True) if is_given}
        for equation in jaxpr.eqns:
            own = [not hasattr(atom, "val") and atom in from_keys for atom in equation.invars]
            if any(own):
                from_keys.update(equation.outvars)
            elif equation.primitive.name in DRAWS:
                return True
            called = called_program(equation)
            if called is not None:
                if within(called[0], own):
                    return True
            elif any(
                within(inner, [any(own)] * len(inner.invars)) for inner in inner_programs(equation)
            ):
                return True
        return False

    return within(needed, [is_key for is_key, is_used in zip(keys, used, strict=True) if is_used])


def passed_through(program: Any) -> list[int | None]:
    """For each result of a traced program the index of the input that it is, None if it is none.

    Calls are looked through (`called_program`): a function under `jax.jit` or `jax.checkpoint` that
    returns an argument as it is has an equation whose result is another variable.
    """

    def follow(jaxpr: Jaxpr, inputs: Sequence[int | None]) -> list[int | None]:
        known: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int | None:
            return None if hasattr(atom, "val") else known.get(atom)

        for equation in jaxpr.eqns:
            called = called_program(equation)
            if called is not None:
                results = follow(called[0], [read(atom) for atom in equation.invars])
                known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    jaxpr = jaxpr_of(program)
    return follow(jaxpr, range(len(jaxpr.invars)))


def values_within(program: Any, arguments: Sequence[Any], size: int) -> list[jax.Array]:
    """What a traced program computes on its way: all floats of `size` elements, in order.

    Calls and loops of known length are looked into. To be called inside a trace. Relies on
    `primitive.bind` and `get_bind_params` to compute an equation, and on the parameters of `scan`;
    without them a difference between a user's stages and the whole model has no place.
    """
    import jax
    import jax.numpy as jnp

    found: list[jax.Array] = []

    def note(value: Any) -> None:
        if value.size == size and jnp.issubdtype(value.dtype, jnp.floating):
            found.append(value)

    def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else env[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            called = called_program(equation)
            if called is not None:
                results = evaluate(*called, operands)
            elif equation.primitive.name == "scan":
                results = turns(equation, operands)
            else:
                params = equation.primitive.get_bind_params(equation.params)
                results = equation.primitive.bind(*operands, **params)
                results = results if equation.primitive.multiple_results else [results]
                for value in results:
                    note(value)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def turns(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        given, body = equation.params, equation.params["jaxpr"]
        first, last = given["num_consts"], given["num_consts"] + given["num_carry"]
        carry, rows = list(operands[first:last]), []
        order = range(given["length"])
        for turn in reversed(order) if given["reverse"] else order:
            own = [operand[turn] for operand in operands[last:]]
            results = evaluate(
                jaxpr_of(body), getattr(body, "consts", ()), [*operands[:first], *carry, *own]
            )
            carry, row = results[: len(carry)], results[len(carry) :]
            rows.append(row)
        if given["reverse"]:
            rows.reverse()
        return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]

    with jax.numpy_rank_promotion("allow"):
        evaluate(jaxpr_of(program), program.consts, arguments)
    return found


def pullback_parts(pullback: Any, given: Sequence[Any]) -> tuple[Any, list[Any], list[int | None]]:
    """What the second result of `jax.vjp` holds, inside a trace.

    Relies on its being a pytree of the arrays that it reads, among them, as the very tracers that
    were passed, arguments of the differentiated function. If those were copies, a chunk that keeps
    its results would hold its weights twice.

    Args:
      pullback: of a function under `jax.checkpoint`.
      given: tracers, what the function was called with among them.

    Returns:
      The tree's structure, its leaves, and for each leaf its index among `given`, None if it is
      none of them.

    Raises:
      RuntimeError: in this version of JAX a pullback holds something else.
    """
    import jax

    _check_pullbacks()
    leaves, structure = jax.tree.flatten(pullback)
    return structure, leaves, [_index(leaf, given) for leaf in leaves]


@functools.cache
def _check_pullbacks() -> None:
    """On a product with a weight: as it is, in a program of its own, and by a rule of its own."""
    import jax

    @jax.custom_vjp
    def ruled(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return x @ w, (x, w)

    def backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        return dy @ kept[1].T, kept[0].T @ dy

    ruled.defvjp(forward, backward)

    def layer(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        x = jax.numpy.tanh(x @ weights[0])
        x = jax.numpy.tanh(jax.jit(lambda x, w: x @ w)(x, weights[1]))
        return jax.numpy.tanh(ruled(x, weights[2]))

    found: list[set[int | None]] = []

    def trial(weights: Sequence[jax.Array], x: jax.Array) -> None:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        _, pullback = jax.vjp(jax.checkpoint(layer, policy=policy), weights, x)
        leaves = jax.tree.leaves(pullback)
        found.append({_index(leaf, (*weights, x)) for leaf in leaves})
        found.append({number for number, leaf in enumerate(leaves) if leaf.shape == (4, 4)})

    weight = jax.ShapeDtypeStruct((4, 4), "float32")
    jax.eval_shape(trial, [weight] * 3, jax.ShapeDtypeStruct((2, 4), "float32"))
    held, weights = found
    if not held >= {0, 1, 2, 3} or len(weights) != 3:
        raise _changed("the arrays that jax.vjp was given in the pullback that it returns")


def _index(leaf: Any, given: Sequence[Any]) -> int | None:
    return next((index for index, other in enumerate(given) if other is leaf), None)


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Mesh axes over which an array varies inside `jax.shard_map` with `check_vma=True`.

    Relies on `mat.varying` of an array's type; without it custom derivatives would not trace there.
    """
    import jax

    axes: frozenset[str] = frozenset(jax.typeof(array).mat.varying)
    return axes


@functools.cache
def packed_cudnn_attention() -> Callable[..., jax.Array] | str:
    """Causal attention of packed rows by cuDNN, or the reason why there is none.

    The function takes q, k, v [B, T, N, H], `q_seqlen`, `kv_seqlen`, `q_offsets`, `kv_offsets`,
    `scale` and `sliding_window_length`. Relies on a call that JAX does not export, so its
    signature is checked; without it packed rows take portable code, and the run says so.
    """
    version = f"JAX {importlib.metadata.version('jax')} has no packed cuDNN call of the form known"
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused

        call, mask_type = fused.dot_product_attention, fused.MaskType.PADDING_CAUSAL
    except (ImportError, AttributeError) as error:
        return f"{version} ({error})"
    expected = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type"}
    expected |= {"sliding_window_length", "qkv_layout"}
    missing = expected - inspect.signature(call).parameters.keys()
    if missing:
        return f"{version} (it lacks {', '.join(sorted(missing))})"
    packed: Callable[..., jax.Array] = functools.partial(
        call, mask_type=mask_type, qkv_layout="BTNH"
    )
    return packed


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Memory for what a compiled program makes on its way, by XLA's account.

    Relies on `memory_analysis`. Without it no memory of an adapted model could be planned.

    Raises:
      RuntimeError: this backend or version of JAX gives no such account.
    """
    found = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    if found is None:
        raise _changed("memory_analysis().temp_size_in_bytes of compiled programs")
    return int(found)


class ProgramBytes(NamedTuple):
    """Memory of a compiled program on one device: its temporaries, arguments and results.

    `alias` are results that take the place of arguments.
    """

    temp: int
    argument: int
    output: int
    alias: int


def program_bytes(compiled: jax.stages.Compiled) -> ProgramBytes:
    """What a compiled program takes of each device, by XLA's account.

    Relies on `memory_analysis`. Without it no plan could be checked before weights are loaded.

    Raises:
      RuntimeError: this backend or version of JAX gives no such account.
    """
    found = compiled.memory_analysis()
    sizes = [getattr(found, f"{name}_size_in_bytes", None) for name in ProgramBytes._fields]
    if None in sizes:
        raise _changed("memory_analysis() of compiled programs, with the bytes of its arrays")
    return ProgramBytes(*(int(size) for size in sizes if size is not None))


def bytes_accessed(compiled: jax.stages.Compiled) -> float:
    """Bytes that a compiled program reads and writes, by XLA's account.

    Relies on `cost_analysis`. Without it no memory traffic of an adapted model could be planned.

    Raises:
      RuntimeError: this backend or version of JAX gives no such account.
    """
    found = (compiled.cost_analysis() or {}).get("bytes accessed")
    if found is None:
        raise _changed("cost_analysis()['bytes accessed'] of compiled programs")
    return float(found)


# Orbax.


@functools.cache
def say_failures_once() -> None:
    """Let a failed write or read be told by the exception that the caller gets, and by no other.

    Orbax's threads log each failed array with its traceback and raise it again; tasks that are
    given up are logged when they are collected; and what TensorStore still finishes for an event
    loop that is closed by then ends in a traceback each, by `sys.unraisablehook` and of no object,
    also after the save. A full disk took 400 lines. Relies on their words: under others all of it
    is printed again, and nothing else changes.
    """
    repeated = re.compile(
        r"_SignalingThread\.run\(\) raised an exception"
        r"|(?s:Task exception was never retrieved.*coro=<NumpyHandler\.)"
    )
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(lambda record: not repeated.search(record.getMessage()))
    tell = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        if str(raised.exc_value) != "Event loop is closed" or raised.object is not None:
            tell(raised)

    sys.unraisablehook = hook


def _stats_of(event: Any) -> frozenset[str]:
    return frozenset(str(name) for name, _ in event.stats)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedEvent:
    """Something that happened while jax.profiler looked.

    Attributes:
      plane: of whom, such as `/device:GPU:0`.
      line: where there, such as a stream.
      name: of the event.
      stats: gives the names of what else is known of it.
      start_ns: as `time.time_ns` gives it.
      duration_ns: how long it took.
    """

    plane: str
    line: str
    name: str
    stats: Callable[[], frozenset[str]]
    start_ns: int
    duration_ns: float


def traced_events(file: Path) -> Iterator[TracedEvent]:
    """Events of devices, line by line, in what jax.profiler has written.

    Relies on `jax.profiler.ProfileData`, on times being nanoseconds since the profile began, and on
    the plane `Task Environment` saying when that was. The file of the same name in Chrome's format
    is made of this one and ends after a million events.

    Raises:
      ValueError: it does not say when the profile began.
    """
    import jax

    profile = jax.profiler.ProfileData.from_file(str(file))
    environment = profile.find_plane_with_name("Task Environment")
    begun = dict(environment.stats).get("profile_start_time") if environment else None
    if begun is None:
        raise ValueError(f"{file} does not say when the profile began")
    for plane in profile.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            for event in line.events:
                yield TracedEvent(
                    plane=plane.name,
                    line=line.name,
                    name=event.name,
                    stats=functools.partial(_stats_of, event),
                    start_ns=int(begun) + round(event.start_ns),
                    duration_ns=event.duration_ns,
                )


def read_arrays(item: Path, specs: Any = None) -> Any:
    """Read an Orbax item as a tree of NumPy arrays, or of what Orbax makes of it without `specs`.

    Args:
      item: absolute path.
      specs: what is expected, a tree of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError, KeyError, OSError, RuntimeError: it is not there, or damaged.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    if specs is None:
        return _checkpointer().restore(item)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), specs)
    wanted = ocp.args.PyTreeRestore(item=specs, restore_args=as_numpy)
    return _checkpointer().restore(item, args=wanted)


def _checkpointer() -> ocp.Checkpointer:
    """Of Orbax's former interface, `Checkpointer(PyTreeCheckpointHandler(...))`."""
    import orbax.checkpoint as ocp

    say_failures_once()
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

"""Programs that tests have in common are traced and compiled once per process.

Every trainer traces and compiles programs of its own, and most tests make trainers whose programs
are equal: making them anew takes five sixths of the time.
"""

import contextlib
import functools
import inspect
import os
import re
import sys
import threading

import jax
import numpy as np
import optax

from slidedp_jax import assembly, trainer
from slidedp_jax.models import decoder
from slidedp_jax.run import compiled
from slidedp_jax.update import decompose, part_updates, treatments

_compiled = {}
_traced = {}
_taken_apart = {}
_elementwise = {}
_starting = {}
_active = True


def share() -> None:
    """From now on; before anything else takes hold of what is replaced here."""
    _share_compiled_programs()
    _share_contexts()
    _share_traces()
    _share_optimizers()
    _share_starting_values()
    _share_updates()
    _share_trials_of_optimizers()


def forget() -> None:
    """Let go of all programs."""
    _compiled.clear()
    _traced.clear()
    _taken_apart.clear()
    decoder.build.cache_clear()


@contextlib.contextmanager
def unshared():
    """Within it, trainers trace programs of their own, of models of their own."""
    global _active
    _active = False
    try:
        yield
    finally:
        _active = True


def _share_compiled_programs() -> None:
    """By their text, for equal devices; not where JAX compiles in a way that is not known here."""
    try:
        from jax._src import cache_key, compiler

        compile_and_load = compiler.backend_compile_and_load
        signature = inspect.signature(compile_and_load)
        signature.bind("backend", "module", "devices", "options", "callbacks")
        inspect.signature(cache_key.get).bind("module", "devices", "options", "backend")
    except (ImportError, AttributeError, TypeError) as error:
        _say_once(error)
        return

    def key_of(backend, module, devices, options, callbacks):
        if callbacks:
            return None
        names = tuple(device.id for device in devices)
        return names, cache_key.get(module, np.array([*devices]), options, backend)

    def compile_once(*arguments, **named):
        try:
            key = key_of(*signature.bind(*arguments, **named).args)
        except Exception as error:
            _say_once(error)
            key = None
        if key is None:
            return compile_and_load(*arguments, **named)
        if key not in _compiled:
            _compiled[key] = compile_and_load(*arguments, **named)
        return _compiled[key]

    compiler.backend_compile_and_load = compile_once


def _say_once(error: Exception) -> None:
    """Of all processes of a test run, if it is known before they start."""
    if "PROGRAMS_ARE_NOT_SHARED" not in os.environ:
        os.environ["PROGRAMS_ARE_NOT_SHARED"] = "1"
        print(
            "WARNING: this version of JAX compiles in another way than tests/shared_programs.py "
            f"knows, so every test compiles its own programs, which takes several times as long: "
            f"{type(error).__name__}: {error}",
            file=sys.__stderr__,
        )


PROGRAMS_OF_A_CONTEXT = 200
"""A context keeps every type and attribute that was ever made in it."""


def _share_contexts() -> None:
    """MLIR's, of which JAX makes one for each program: a third of the time of lowering a small one.

    Each thread has its own.
    """
    try:
        from jax._src.interpreters import mlir

        make_context = mlir.make_ir_context
        inspect.signature(make_context).bind()
    except (ImportError, AttributeError, TypeError):
        return
    of_thread = threading.local()

    def context_of_thread():
        number = getattr(of_thread, "number", 0)
        if number % PROGRAMS_OF_A_CONTEXT == 0:
            of_thread.context = make_context()
        of_thread.number = number + 1
        return of_thread.context

    mlir.make_ir_context = context_of_thread


def _share_traces() -> None:
    """Of models that were built alike, on equal devices, with equal routes."""
    build = decoder.build
    build_once = functools.cache(build)

    @functools.wraps(build)
    def build_shared(*args, **options):
        return (build_once if _active else build)(*args, **options)

    build_shared.cache_clear = build_once.cache_clear
    decoder.build = build_shared
    make_wire, make_programs = assembly.WirePrograms, assembly.ComputePrograms

    def wire_once(on_devices, weights, gradients):
        route = type(weights), gradients.sums_on_host, gradients.wire_dtype
        key = on_devices.mesh, on_devices.compute_dtype, route
        if not _active or key not in _traced:
            wire = make_wire(on_devices, weights, gradients)
            return _traced.setdefault(key, wire) if _active else wire
        return _traced[key]

    def programs_once(model, on_devices, wire, **trained):
        key = id(model), id(wire), tuple(trained.items())
        if not _active or key not in _traced:
            programs = make_programs(model, on_devices, wire, **trained)
            return _traced.setdefault(key, programs) if _active else programs
        return _traced[key]

    assembly.WirePrograms, assembly.ComputePrograms = wire_once, programs_once


def _share_optimizers() -> None:
    """Of equal arguments; a transformation is a pair of pure functions."""
    for name in ("adamw", "sgd"):
        setattr(optax, name, _once(getattr(optax, name), lambda *given, **named: (given, named)))

    make_optimizer = compiled.make_optimizer

    def of_settings(settings, num_steps):
        return make_optimizer(settings, num_steps)

    def key_of(settings, num_steps):
        # Of a constant rate the number of steps decides nothing.
        return settings.values(), None if settings.lr_scheduler_type == "constant" else num_steps

    make_once = _once(of_settings, key_of)
    compiled.make_optimizer = lambda args, num_steps: make_once(_OfOptimizers(args), num_steps)


class _OfOptimizers:
    """The training command's settings of which an optimizer may be made, and no others."""

    names = re.compile("optim|learning_rate|lr_|warmup_|min_lr_|weight_decay|adam_")

    def __init__(self, args):
        self._args = args

    def __getattr__(self, name):
        assert self.names.match(name), f"optimizers depend on {name}: name it in {__file__}"
        return getattr(self._args, name)

    def values(self):
        return {name: own for name, own in vars(self._args).items() if self.names.match(name)}


def _share_starting_values() -> None:
    """Of the state that no parameter owns."""
    initial_shared = decompose.DecomposedOptimizer.initial_shared

    def made_once(optimizer):
        if not _active:
            return initial_shared(optimizer)
        if optimizer.shared_text not in _starting:
            _starting[optimizer.shared_text] = initial_shared(optimizer)
        return [leaf.copy() for leaf in _starting[optimizer.shared_text]]

    decompose.DecomposedOptimizer.initial_shared = made_once


def _once(make, key_of):
    """`make`, called once for arguments that look alike but for functions, which must be one."""
    made = {}

    @functools.wraps(make)
    def make_once(*given, **named):
        arguments = (*given, *named.values())
        if any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(arguments)):
            return make(*given, **named)  # of a trace, or whose text does not tell all values
        functions = [x for x in arguments if callable(x)]
        key = repr(key_of(*given, **named)), *map(id, functions)
        if key not in made:
            made[key] = make(*given, **named), functions
        return made[key][0]

    return make_once


def _share_updates() -> None:
    """How an optimizer is taken apart, and the traces of equal ones' kernels on equal devices."""
    make_treatments, make_kernels = trainer.Treatments, part_updates.UpdateKernels

    def treatments_once(optimizer, shapes, **options):
        key = id(optimizer), tuple(shapes.items()), tuple(options.items())
        if not _active or key not in _taken_apart:
            taken_apart = make_treatments(optimizer, shapes, **options)
            if not _active:
                return taken_apart
            _taken_apart[key] = taken_apart, optimizer  # which keeps its id
        return _taken_apart[key][0]

    def kernels_sharing_traces(optimizer, sharding, **options):
        kernels = make_kernels(optimizer, sharding, **options)
        if _active:
            key = _text_of(optimizer), sharding, tuple(options.items())
            if key not in _taken_apart:
                _taken_apart[key] = make_kernels(optimizer, sharding, **options), optimizer
            for name in ("_update", "_init", "_square", "_advance"):
                setattr(kernels, name, getattr(_taken_apart[key][0], name))
        return kernels

    trainer.Treatments = treatments_once
    part_updates.UpdateKernels = kernels_sharing_traces


def _text_of(optimizer):
    """What an element-wise optimizer computes, whatever its parameters are called."""
    whole, members = optimizer._optimizer, optimizer._members
    programs = tuple((whole.texts[group], len(whole.shape(group))) for group in members)
    return programs, optimizer.state_dtypes, whole.shared_text


def _share_trials_of_optimizers() -> None:
    """Whether an update may be run on blocks is found out once for each text of it."""
    is_elementwise = treatments.is_elementwise

    def tried_once(optimizer, group):
        key = optimizer.texts[group], optimizer.shared_text, len(optimizer.shape(group))
        if key not in _elementwise:
            _elementwise[key] = is_elementwise(optimizer, group)
        return _elementwise[key]

    treatments.is_elementwise = tried_once

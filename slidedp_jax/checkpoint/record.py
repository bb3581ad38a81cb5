"""`trainer.json`: what a checkpoint says of itself, and whether a trainer can go on from it.

It is written last, so a folder that has one is whole, and judged first: what does not fit is
refused by name before a single array is read.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import jax
import numpy as np

from slidedp_jax.errors import UserError
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.update.kernel_form import KernelForm, kernel_form, major_minor
from slidedp_jax.update.state_gate import StateGate
from slidedp_jax.update.state_meaning import digest
from slidedp_jax.whole_files import write_whole

RECORD = "trainer.json"
FORMAT = 2

_LOG = logging.getLogger(__name__)

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "format": int,
    "step": int,
    "shared_optimizer_state": list,
    "optimizer_state": dict,
    "kernel_form": str,
    "ema_decay": (float, int, type(None)),
    "extra": dict,
}
"""Of the entries that every record has; later versions added some that older ones lack."""

WEIGHTS_ONLY = "weights_only"
"""Entry of copies without the optimizer's state."""
_DIGEST = "digest"
ROUNDING = "weight_rounding"
"""Entry of how masters become the weights that compute."""
_PROGRAM_PACKAGES = ("jax", "optax")
"""Their versions decide how an optimizer's programs are written down."""


def describe(
    gate: StateGate, configuration: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of the present version, without its arrays' checksums and its shared state.

    Raises:
      TypeError: `extra` holds what JSON cannot.
    """
    meaning = gate.meaning
    record = {
        "format": FORMAT,
        "step": gate.version,
        "versions": {name: importlib.metadata.version(name) for name in _PROGRAM_PACKAGES},
        "configuration": configuration,
        "shared_optimizer_state_names": list(meaning.shared),
        "optimizer_state": state_kinds(gate),
        "optimizer_state_names": meaning.names,
        "optimizer_programs": meaning.programs,
        "kernel_form": gate.kernel_form,
        ROUNDING: gate.rounding.record(),
        "ema_decay": gate.ema_decay,
        "extra": dict(extra),
    }
    return dict(json.loads(json.dumps(record)))


def describe_shared(shared: Sequence[np.ndarray]) -> dict[str, Any]:
    """What the record says of the optimizer state that no parameter owns."""
    return {"shared_optimizer_state": [to_json(leaf) for leaf in shared]}


def write_record(folder: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Write the record of a checkpoint; from then on the folder counts as whole."""
    record = json.loads(json.dumps(record))
    write_whole(folder / RECORD, json.dumps({**record, _DIGEST: _digest(record)}, indent=1))


def read_record(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The record of a checkpoint.

    Raises:
      UserError: it is missing, damaged or of another format.
    """
    path = checkpoint / RECORD
    try:
        record = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise UserError(
            f"{checkpoint} is not a complete checkpoint: {path.name} is missing"
        ) from None
    except ValueError as error:  # not JSON, or not even text
        raise _damaged(path, str(error)) from None
    if not isinstance(record, dict):
        raise _damaged(path, f"it holds a {type(record).__name__}")
    stored = record.pop(_DIGEST, None)
    if record.get("format", FORMAT) != FORMAT:
        raise UserError(f"{path} has format {record['format']}, this version reads {FORMAT}")
    if missing := sorted(_TYPES.keys() - record.keys()):
        raise _damaged(path, f"it lacks {', '.join(missing)}")
    wrong = [name for name, kind in _TYPES.items() if not isinstance(record[name], kind)]
    if wrong or record["step"] < 0 or stored not in (None, _digest(record)):
        raise _damaged(path, f"{wrong[0] if wrong else 'its content'} is not what was written")
    return {ROUNDING: WeightRounding.recorded(None).record(), **record}


def check_fits(
    checkpoint: pathlib.Path,
    record: Mapping[str, Any],
    gate: StateGate,
    configuration: Mapping[str, Any],
) -> None:
    """Whether a trainer can go on from a checkpoint, as far as its record tells.

    Raises:
      UserError: it cannot; the message names what differs.
    """
    check_configuration(checkpoint, record, configuration)
    if record.get(WEIGHTS_ONLY):
        raise UserError(
            f"{checkpoint} is a copy of weights without the optimizer's state, from which training "
            "cannot go on. Export it and start a new run from that folder, or give the checkpoint "
            "that it is a copy of"
        )
    _check_kinds(checkpoint, record["optimizer_state"], state_kinds(gate))
    _check_shared(checkpoint, record, gate)
    _check_meaning(checkpoint, record, gate)
    if record["ema_decay"] != gate.ema_decay:
        raise UserError(
            f"{checkpoint} was made with ema_decay={record['ema_decay']}, this trainer has "
            f"ema_decay={gate.ema_decay}; use the former"
        )
    if record["kernel_form"] not in get_args(KernelForm):
        raise _damaged(checkpoint / RECORD, f"kernel_form is {record['kernel_form']!r}")
    recorded_rounding(checkpoint, record)


def check_configuration(
    checkpoint: pathlib.Path, record: Mapping[str, Any], configuration: Mapping[str, Any]
) -> None:
    """Whether a model is configured as the one that a checkpoint is of.

    Raises:
      UserError: it is not; every field that differs is named.
    """
    now = json.loads(json.dumps(configuration))
    differing = _differences(record.get("configuration", {}), now)
    if differing:
        raise UserError(
            f"{checkpoint} was trained with another model configuration: {'; '.join(differing)}. "
            "Bring the model's config.json back to what it was, or export the checkpoint and start "
            "a new run from that"
        )


def recorded_rounding(checkpoint: pathlib.Path, record: Mapping[str, Any]) -> WeightRounding:
    """How the run that saved a checkpoint made the weights that computed from its masters.

    Raises:
      UserError: the record is damaged.
    """
    try:
        return WeightRounding.recorded(record[ROUNDING])
    except ValueError as error:
        raise _damaged(checkpoint / RECORD, str(error)) from None


def form_to_go_on_with(record: Mapping[str, Any]) -> KernelForm:
    """The form of the update kernel that the checkpoint was made with.

    Under another version of JAX nothing promises the same bits, and that form may have become a
    hundred times slower: then the one that is fastest now.
    """
    then, now = record.get("versions", {}).get("jax", jax.__version__), jax.__version__
    if major_minor(then) == major_minor(now):
        return cast(KernelForm, record["kernel_form"])
    form = kernel_form(now)
    if form != record["kernel_form"]:
        _LOG.warning(
            "the checkpoint was made with JAX %s and the update kernel %r, this is JAX %s with %r: "
            "results may differ in the last bit",
            *(then, record["kernel_form"], now, form),
        )
    return form


def state_kinds(gate: StateGate) -> dict[str, list[str]]:
    """Parameter name -> dtype and shape of each of its optimizer state arrays; none if frozen."""
    return {
        name: [f"{spec.dtype}{list(spec.shape)}" for spec in gate.state_specs(name)]
        for name in gate.parameter_names
    }


def to_json(leaf: np.ndarray) -> dict[str, Any]:
    """An array, exactly."""
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "hex": leaf.tobytes().hex()}


def shared_state(checkpoint: pathlib.Path, record: Mapping[str, Any]) -> list[np.ndarray]:
    """The optimizer state that no parameter owns.

    Raises:
      UserError: it is damaged.
    """
    try:
        return [
            np.frombuffer(bytes.fromhex(leaf["hex"]), np.dtype(leaf["dtype"]))
            .reshape(leaf["shape"])
            .copy()
            for leaf in record["shared_optimizer_state"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(checkpoint / RECORD, f"shared_optimizer_state: {error}") from None


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Fields that both know and that differ; those of nested values by their own names."""
    found = []
    for name in saved.keys() & now.keys():
        one, other = saved[name], now[name]
        if isinstance(one, dict) and isinstance(other, dict):
            found += [
                f"{name}.{key} was {one.get(key)!r}, now {other.get(key)!r}"
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            ]
        elif one != other:
            found.append(f"{name} was {one!r}, now {other!r}")
    return sorted(found)


def _check_kinds(
    checkpoint: pathlib.Path, saved: Mapping[str, list[str]], wanted: Mapping[str, list[str]]
) -> None:
    if saved.keys() != wanted.keys():
        odd = min(saved.keys() ^ wanted.keys())
        raise UserError(f"{checkpoint} does not fit this model: only one of them has {odd}")
    for name, kinds in wanted.items():
        if saved[name] != kinds:
            raise UserError(
                f"{checkpoint} holds optimizer state {saved[name]} of {name}, this optimizer keeps "
                f"{kinds}; resume with the optimizer and the frozen parameters of the saving run"
            )


def _check_shared(checkpoint: pathlib.Path, record: Mapping[str, Any], gate: StateGate) -> None:
    def kinds(leaves: list[np.ndarray]) -> list[str]:
        return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]

    saved = kinds(shared_state(checkpoint, record))
    wanted, own = kinds(gate.shared), list(gate.meaning.shared)
    names = record.get("shared_optimizer_state_names", own)
    if saved != wanted or names != own:
        raise UserError(
            f"{checkpoint} holds the shared optimizer state {saved} ({', '.join(names)}), this "
            f"optimizer keeps {wanted} ({', '.join(own)}): a constant "
            "learning rate and a schedule differ so; resume with an optimizer of the same form"
        )


def _check_meaning(checkpoint: pathlib.Path, record: Mapping[str, Any], gate: StateGate) -> None:
    """Arrays of the same shapes may be other things, or be made in another way."""
    if "optimizer_state_names" not in record:
        return
    meaning = gate.meaning
    for name, wanted in meaning.names.items():
        saved = record["optimizer_state_names"].get(name)
        if saved != list(wanted):
            raise UserError(
                f"{checkpoint} holds the optimizer state {saved} of {name}, this optimizer keeps "
                f"{list(wanted)}; resume with the optimizer of the saving run"
            )
    versions = {name: importlib.metadata.version(name) for name in _PROGRAM_PACKAGES}
    if record["versions"] != versions:  # they may write the same program down otherwise
        return
    for name, program in meaning.programs.items():
        if record["optimizer_programs"].get(name) != program:
            raise UserError(
                f"the optimizer that made {checkpoint} computes its state of {name} in another way "
                f"than this one, though both keep {list(meaning.names[name])}; resume with the "
                "optimizer of the saving run (rates and other constants may change)"
            )


def _digest(record: Mapping[str, Any]) -> str:
    return digest(json.dumps(record, sort_keys=True))


def _damaged(path: pathlib.Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged: {why}. To go on from an earlier checkpoint, move {path.parent} away"
    )

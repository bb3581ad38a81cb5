"""Hosts that the planner knows: rates and sizes, measured or taken from data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slidedp_jax.planner.cards import CARDS, DESKTOP, HOSTS, Card
from slidedp_jax.planner.hardware import GIB, MIB, HardwareProfile, LinkRate
from slidedp_jax.planner.process_limits import usable_device_bytes


def _link(bytes_per_s: float) -> LinkRate:
    """A link of another speed, with the 0.2 ms of latency per copy that H200's figures show."""
    sizes = (4 * MIB, 64 * MIB, 4 * GIB)
    return LinkRate(points=tuple((size, size / (2e-4 + size / bytes_per_s)) for size in sizes))


# pinned_host <-> device, jax.device_put: 15 GiB/s at 4 MB, 41 at 64 MB, 47-50 at 256 MB and above.
_H200_LINK = LinkRate(
    points=((4 * MIB, 15 * GIB), (64 * MIB, 41 * GIB), (256 * MIB, 48.5 * GIB)),
)

_H200 = HardwareProfile(
    name="h200",
    provenance="measured on 1 and 2 H200 SXM with PCIe 5 x16 and 16 vCPU, 128 GiB per GPU",
    num_devices=1,
    device_memory_bytes=usable_device_bytes(139 * GIB, 1.5 * GIB),
    device_reserve_bytes=1.5 * GIB,
    # Data sheet of H100/H200 SXM: 989 TFLOP/s dense bf16, 67 TFLOP/s fp32 outside tensor cores.
    peak_flops_per_s=989e12,
    # This and the next two are fitted together to the resident step times of the whole Qwen3-4B and
    # -8B models at 8k..64k tokens with random inputs (with which they agree within 5 %). Constant
    # inputs draw less power and run up to 10 % faster.
    bf16_matmul_flops_per_s=700e12,
    fp32_matmul_flops_per_s=50e12,
    # 400 TFLOP/s alone: 4.8 ms forward + backward for 4 rows of 4096, 32 heads of 128.
    attention_flops_per_s=450e12,
    device_memory_bytes_per_s=4.0e12,  # data sheet 4.8 TB/s
    h2d=_H200_LINK,
    d2h=_H200_LINK,
    duplex_bytes_per_s=80e9,  # both directions at once
    gather_bytes_per_s=202 * GIB,  # all-gather of 1 GiB on two GPUs: 2.5 ms for 0.5 GiB inbound
    num_host_cores=16,
    host_memory_bytes=128 * GIB,
    host_reserve_bytes=6.5 * GIB,  # 14 jobs on one GPU took 5.7 to 7.3 (docs/benchmarks)
    host_memory_bytes_per_s=108e9,  # in-place triad 106-110 GB/s
    # Two sockets of eight channels of DDR5-4800, 614 GB/s on paper, at four fifths.
    most_host_memory_bytes_per_s=490e9,
    # 12-byte state, blocks of 4096 elements, 14-16 CPU devices of 16 cores: 3.4-3.9e9 alone,
    # 2.7-3.4e9 within steps (with `step_end_s`, 3.1e9 fits the full steps best).
    host_update_params_per_s=3.1e9,
    # From 15 and 30 pieces of a layer: at 8k tokens per GPU it decides between the weight routes.
    copy_gap_s=1.5e-5,
    # Without uploads 1 to 2 ms per chunk and pass, from steps of a model of a million parameters.
    # Uploads: 45-58 us per piece to one GPU, 57-63 to two.
    visit_dispatch_s=1e-3,
    upload_call_s=4e-5,
    upload_call_per_device_s=1e-5,
    # Full steps with state on the GPU beyond their forward and backward passes, 4B and 8B at 8k
    # tokens: 20, 29, 34, 36 ms.
    step_end_s=2.5e-2,
)

# The profiles below are not measured: rates follow the data sheet in the proportions that were
# measured on H200, host shares are those of common machines with the card (`cards.py`).
_DERIVED = "derived from data sheets with the efficiencies measured on H200; not measured"
_LINKS: Mapping[int, tuple[LinkRate, LinkRate, float]] = {
    5: (_H200_LINK, _H200_LINK, _H200.duplex_bytes_per_s),
    4: (_link(25e9), _link(25e9), 35e9),  # `cards.PCIE4_SOURCE`
    0: (_link(375e9), _link(297e9), 600e9),
}
"""Generation of PCIe, 0 for NVLink-C2C -> links up and down, and both together."""

_PEERS_SHARE, _THROUGH_HOST_SHARE = 0.8, 0.48
"""Of a link, what collectives without NVLink reach: between GPUs that read each other's memory, and
where everything goes up and down through the host. Assumed."""


def _of_card(card: Card) -> HardwareProfile:
    """A card in its usual host."""
    sheet, host = CARDS["h200"], HOSTS[card.name]
    desktop = host is DESKTOP
    matrix = card.bf16_flops_per_s / sheet.bf16_flops_per_s
    fp32 = card.fp32_flops_per_s / sheet.fp32_flops_per_s
    memory = card.memory_bytes_per_s / sheet.memory_bytes_per_s
    up, down, duplex = _LINKS[card.pcie]
    gather = card.nvlink_bytes_per_s / sheet.nvlink_bytes_per_s * _H200.gather_bytes_per_s
    if not gather:
        share = _PEERS_SHARE if card.peer_access else _THROUGH_HOST_SHARE
        gather = share * up.points[-1][1]
    reserve_bytes = 1.0 * GIB if desktop else _H200.device_reserve_bytes
    return replace(
        _H200,
        name=card.name,
        provenance=_DERIVED,
        device_memory_bytes=usable_device_bytes(card.memory_gib * GIB, reserve_bytes),
        device_reserve_bytes=reserve_bytes,
        peak_flops_per_s=card.bf16_flops_per_s,
        bf16_matmul_flops_per_s=_H200.bf16_matmul_flops_per_s * matrix,
        attention_flops_per_s=_H200.attention_flops_per_s * matrix,
        fp32_matmul_flops_per_s=_H200.fp32_matmul_flops_per_s * fp32,
        device_memory_bytes_per_s=_H200.device_memory_bytes_per_s * memory,
        h2d=up,
        d2h=down,
        duplex_bytes_per_s=duplex,
        gather_bytes_per_s=gather,
        peer_access=card.peer_access,
        num_host_cores=host.num_cores,
        host_memory_bytes=host.memory_bytes,
        host_memory_bytes_per_s=host.memory_bytes_per_s,
        most_host_memory_bytes_per_s=host.most_memory_bytes_per_s,
        host_update_params_per_s=host.update_params_per_s,
    )


_CPU = replace(
    _H200,
    name="cpu",
    provenance="a small laptop or CI machine, orders of magnitude only; not measured",
    # Two cores with AVX2 at 3 GHz: 2 x 96 GFLOP/s of fp32 at the very best; one memory channel.
    # Copies and collectives of the CPU backend are memcpy; everything shares one memory.
    device_memory_bytes=8 * GIB,
    device_reserve_bytes=0.0,
    peak_flops_per_s=192e9,
    bf16_matmul_flops_per_s=30e9,
    fp32_matmul_flops_per_s=60e9,
    attention_flops_per_s=15e9,
    device_memory_bytes_per_s=8e9,
    h2d=LinkRate(points=((4 * MIB, 4e9),)),
    d2h=LinkRate(points=((4 * MIB, 4e9),)),
    duplex_bytes_per_s=4e9,
    gather_bytes_per_s=2e9,
    num_host_cores=2,
    host_memory_bytes=8 * GIB,
    host_reserve_bytes=1 * GIB,
    host_memory_bytes_per_s=10e9,
    host_update_params_per_s=0.2e9,
    step_end_s=0.0,
    unified_memory=True,
)

PRESETS: Mapping[str, HardwareProfile] = {
    **{name: _H200 if name == "h200" else _of_card(card) for name, card in CARDS.items()},
    "cpu": _CPU,
}
"""Hosts with one GPU and its usual share of the host; grow them with `with_devices`."""


def named_hardware(name: str, *, num_devices: int = 1) -> HardwareProfile:
    """A preset grown to `num_devices` GPUs.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"No hardware preset is named {name!r}; known: {', '.join(PRESETS)}.")
    return PRESETS[name].with_devices(num_devices)


_PRESET_OF_KIND: Mapping[str, str] = {
    **{card.kind: name for name, card in CARDS.items()},
    "cpu": "cpu",
}
"""Device kinds as JAX spells them, to the last letter."""

_NEAREST = {
    "GH200": "gh200",
    "H200": "h200",
    "B200": "b200",
    "B300": "b200",
    "H100 NVL": "h100-pcie",
    "H100": "h100",
    "A100-PCIE-40GB": "a100-40g",
    "A100": "a100-80g",
    "A40": "a6000",
    "5090": "rtx5090",
    "4090": "rtx4090",
    "3090": "rtx3090",
}
"""Part of another device's name -> the preset that is nearest to it; the first that fits counts."""

_OF_THE_UNKNOWN = "h100"


def preset_of_kind(device_kind: str) -> HardwareProfile | None:
    """The preset of this very kind of device, as JAX spells it; None if it has none."""
    return PRESETS.get(_PRESET_OF_KIND.get(device_kind, ""))


def profile_of_kind(device_kind: str) -> HardwareProfile:
    """Profile of one device by its kind as JAX spells it.

    Of a kind without a preset, the rates are those of the nearest by name, or of h100. The
    provenance says so, and begins with `measured` only where that very kind was.
    """
    own = preset_of_kind(device_kind)
    if own is not None:
        return replace(own, name=device_kind, provenance=f"{own.provenance} (preset {own.name})")
    near = next((name for part, name in _NEAREST.items() if part in device_kind), None)
    assumed = near or _OF_THE_UNKNOWN
    why = "the nearest there is" if near else "though none is near, so they may be far off"
    return replace(
        PRESETS[assumed],
        name=device_kind,
        provenance=f"rates of preset {assumed} are assumed, {why}; not measured",
    )

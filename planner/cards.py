"""GPUs by their data sheets, and the hosts that they are usually bought or rented with.

Everything here is what a maker or somebody else has published, with its source; nothing is
measured by this project. `presets.py` makes profiles of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slidedp_jax.planner.hardware import GIB


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU.

    Attributes:
      name: of its preset.
      kind: as JAX spells it.
      bf16_flops_per_s: dense, with fp32 accumulation.
      fp32_flops_per_s: outside tensor cores.
      memory_bytes_per_s: of its own memory.
      memory_gib: that CUDA reports, less what no process gets.
      pcie: generation of its sixteen lanes; 0 for NVLink-C2C.
      nvlink_bytes_per_s: between the GPUs of a host, both directions together; 0 for none.
      peer_access: whether the driver lets the GPUs of a host read each other's memory.
      source: of the figures.
    """

    name: str
    kind: str
    bf16_flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    memory_gib: float
    pcie: int
    nvlink_bytes_per_s: float = 0.0
    peer_access: bool = True
    source: str


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """What of a host comes with one GPU.

    Attributes:
      num_cores: for the job.
      memory_bytes: likewise.
      memory_bytes_per_s: reached by in-place updates.
      most_memory_bytes_per_s: of a whole host, however many GPUs it has.
      update_params_per_s: AdamW; by memory traffic where it was not measured.
      source: of the figures.
    """

    num_cores: int
    memory_bytes: float
    memory_bytes_per_s: float
    most_memory_bytes_per_s: float
    update_params_per_s: float
    source: str


_TERA, _GIGA = 1e12, 1e9

_NO_PEERS = "NVIDIA's driver gives GeForce cards no peer access over PCIe"

CARDS = {
    card.name: card
    for card in (
        Card(
            name="h200",
            kind="NVIDIA H200",
            bf16_flops_per_s=989 * _TERA,
            fp32_flops_per_s=67 * _TERA,
            memory_bytes_per_s=4.8 * _TERA,
            memory_gib=139,
            pcie=5,
            nvlink_bytes_per_s=900 * _GIGA,
            source="NVIDIA H200 Tensor Core GPU data sheet",
        ),
        Card(
            name="b200",
            kind="NVIDIA B200",
            bf16_flops_per_s=2250 * _TERA,
            fp32_flops_per_s=75 * _TERA,
            memory_bytes_per_s=7.7 * _TERA,
            memory_gib=178,
            pcie=5,
            nvlink_bytes_per_s=1800 * _GIGA,
            source="NVIDIA HGX B200 data sheet, an eighth of it; 180 GB",
        ),
        Card(
            name="gh200",
            kind="NVIDIA GH200 480GB",
            bf16_flops_per_s=990 * _TERA,
            fp32_flops_per_s=67 * _TERA,
            memory_bytes_per_s=4 * _TERA,
            memory_gib=94.5,
            pcie=0,
            nvlink_bytes_per_s=900 * _GIGA,
            source="NVIDIA GH200 Grace Hopper Superchip data sheet (96 GB HBM3)",
        ),
        Card(
            name="h100",
            kind="NVIDIA H100 80GB HBM3",
            bf16_flops_per_s=989 * _TERA,
            fp32_flops_per_s=67 * _TERA,
            memory_bytes_per_s=3.35 * _TERA,
            memory_gib=79,
            pcie=5,
            nvlink_bytes_per_s=900 * _GIGA,
            source="NVIDIA H100 Tensor Core GPU data sheet, SXM",
        ),
        Card(
            name="h100-pcie",
            kind="NVIDIA H100 PCIe",
            bf16_flops_per_s=756 * _TERA,
            fp32_flops_per_s=51 * _TERA,
            memory_bytes_per_s=2 * _TERA,
            memory_gib=79,
            pcie=5,
            source="NVIDIA H100 Tensor Core GPU data sheet, PCIe, without an NVLink bridge",
        ),
        Card(
            name="a100-80g",
            kind="NVIDIA A100-SXM4-80GB",
            bf16_flops_per_s=312 * _TERA,
            fp32_flops_per_s=19.5 * _TERA,
            memory_bytes_per_s=2.04 * _TERA,
            memory_gib=79,
            pcie=4,
            nvlink_bytes_per_s=600 * _GIGA,
            source="NVIDIA A100 Tensor Core GPU data sheet, SXM 80 GB",
        ),
        Card(
            name="a100-40g",
            kind="NVIDIA A100-SXM4-40GB",
            bf16_flops_per_s=312 * _TERA,
            fp32_flops_per_s=19.5 * _TERA,
            memory_bytes_per_s=1.555 * _TERA,
            memory_gib=39.4,
            pcie=4,
            nvlink_bytes_per_s=600 * _GIGA,
            source="NVIDIA A100 Tensor Core GPU architecture white paper, SXM 40 GB",
        ),
        Card(
            name="l40s",
            kind="NVIDIA L40S",
            bf16_flops_per_s=362 * _TERA,
            fp32_flops_per_s=91.6 * _TERA,
            memory_bytes_per_s=0.864 * _TERA,
            memory_gib=44.5,
            pcie=4,
            source="NVIDIA L40S data sheet",
        ),
        Card(
            name="a6000",
            kind="NVIDIA RTX A6000",
            bf16_flops_per_s=154.8 * _TERA,
            fp32_flops_per_s=38.7 * _TERA,
            memory_bytes_per_s=0.768 * _TERA,
            memory_gib=47.5,
            pcie=4,
            source="NVIDIA Ampere GA102 architecture white paper, appendix C, without a bridge",
        ),
        Card(
            name="a10",
            kind="NVIDIA A10",
            bf16_flops_per_s=125 * _TERA,
            fp32_flops_per_s=31.2 * _TERA,
            memory_bytes_per_s=0.6 * _TERA,
            memory_gib=22,
            pcie=4,
            source="NVIDIA A10 Tensor Core GPU data sheet (150 W)",
        ),
        Card(
            name="l4",
            kind="NVIDIA L4",
            bf16_flops_per_s=121 * _TERA,
            fp32_flops_per_s=30.3 * _TERA,
            memory_bytes_per_s=0.3 * _TERA,
            memory_gib=22,
            pcie=4,
            source="NVIDIA L4 Tensor Core GPU data sheet (72 W, which may hold it below)",
        ),
        Card(
            name="rtx5090",
            kind="NVIDIA GeForce RTX 5090",
            bf16_flops_per_s=209.5 * _TERA,
            fp32_flops_per_s=104.8 * _TERA,
            memory_bytes_per_s=1.792 * _TERA,
            memory_gib=31.3,
            pcie=5,
            peer_access=False,
            source=f"NVIDIA RTX Blackwell GPU architecture white paper, appendix; {_NO_PEERS}",
        ),
        Card(
            name="rtx4090",
            kind="NVIDIA GeForce RTX 4090",
            bf16_flops_per_s=165 * _TERA,
            fp32_flops_per_s=82.6 * _TERA,
            memory_bytes_per_s=1.01 * _TERA,
            memory_gib=23.5,
            pcie=4,
            peer_access=False,
            source=f"NVIDIA Ada GPU architecture white paper, appendix A; {_NO_PEERS} "
            "(https://allanchan339.github.io/bug-fixes/2025/05/21/4090-P2P.html)",
        ),
        Card(
            name="rtx3090",
            kind="NVIDIA GeForce RTX 3090",
            bf16_flops_per_s=71 * _TERA,
            fp32_flops_per_s=35.6 * _TERA,
            memory_bytes_per_s=0.936 * _TERA,
            memory_gib=23.5,
            pcie=4,
            peer_access=False,
            source=f"NVIDIA Ampere GA102 architecture white paper, appendix A; {_NO_PEERS}",
        ),
    )
}
"""Name of a preset -> its card."""

_HGX_LIMIT = 490e9
"""Two sockets of eight channels of DDR5-4800, 614 GB/s on paper, at four fifths."""

HOST_OF_HOPPER = HostShare(
    num_cores=26,
    memory_bytes=225 * GIB,
    memory_bytes_per_s=108e9,
    most_memory_bytes_per_s=_HGX_LIMIT,
    update_params_per_s=3.1e9,
    source="26 vCPU and 225 GiB per GPU are a common rented share; memory and update as measured "
    "beside an H200",
)
HOST_OF_AMPERE = HostShare(
    num_cores=16,
    memory_bytes=128 * GIB,
    memory_bytes_per_s=38e9,
    most_memory_bytes_per_s=330e9,
    update_params_per_s=1.2e9,
    source="an eighth of two 64-core EPYC 7003 with 16 channels of DDR4-3200, 410 GB/s on paper",
)
DESKTOP = HostShare(
    num_cores=16,
    memory_bytes=120 * GIB,
    memory_bytes_per_s=65e9,
    most_memory_bytes_per_s=260e9,
    update_params_per_s=1.9e9,
    source="two channels of DDR5-5600, 90 GB/s on paper; several cards: a workstation of up to "
    "eight channels",
)
GRACE = HostShare(
    num_cores=64,
    memory_bytes=432 * GIB,
    memory_bytes_per_s=486e9,
    most_memory_bytes_per_s=4 * 486e9,
    update_params_per_s=12.4e9,
    source="STREAM triad of Grace, and 375 GB/s up and 297 GB/s down over NVLink-C2C, as measured "
    "by Schieffer et al., Harnessing Integrated CPU-GPU System Memory for HPC (2024), "
    "https://4nownews.com/2024/07/27/not-so-simple-and-not-so-fast-scientists-studied-the-features"
    "-of-memory-and-nvlink-c2c-in-nvidia-grace-hopper; the update in proportion to cores",
)

HOSTS = {
    **dict.fromkeys(("b200", "h100", "h100-pcie"), HOST_OF_HOPPER),
    **dict.fromkeys(("a100-80g", "a100-40g", "l40s", "a6000", "a10", "l4"), HOST_OF_AMPERE),
    **dict.fromkeys(("rtx5090", "rtx4090", "rtx3090"), DESKTOP),
    "gh200": GRACE,
}
"""Name of a preset -> its share of a host; h200's was measured."""

PCIE4_SOURCE = (
    "24.8 GB/s up or down by nvbandwidth beside an A100, 35 both ways: "
    "https://forums.developer.nvidia.com/t/asymmetric-pcie-bandwidth-in-bidirectional-transfers-"
    "h2d-drops-56-while-d2h-maintains-performance/352186"
)
"""Of links of four generations; those of five are as measured beside an H200."""

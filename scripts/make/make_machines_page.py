"""docs/machines.md: three models on every preset, and what more of one thing would bring.

    python scripts/make/make_machines_page.py            print what would be written
    python scripts/make/make_machines_page.py --write    write it

Made by the planner, so it stays true with it. Only the two counts by hand are text of this file;
their figures are worked out here from the presets with the formulas that are printed beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.asked_job import AskedJob, asked_job
from slidedp_jax.planner.cards import CARDS, HOSTS, PCIE4_SOURCE
from slidedp_jax.planner.command_line import COUNTS
from slidedp_jax.planner.comparison import Row, binding, compared
from slidedp_jax.planner.hardware import GIB, HardwareProfile
from slidedp_jax.planner.presets import PRESETS, named_hardware
from slidedp_jax.planner.upgrades import upgrades
from slidedp_jax.planner.workload import BatchShape, Workload

PAGE = Path(__file__).resolve().parents[2] / "docs" / "machines.md"
SEQ_LENGTH = 4096
MODELS = {
    "Qwen3-14B": ("qwen3-14b", 131_072),
    "Qwen2.5-72B": ("qwen2.5-72b", 131_072),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", 131_072),
}
"""Title -> named shape and tokens of a step."""
COUNTS_OF_GPUS = (4,)
BY_HAND = (("rtx4090", 4), ("h100", 4))
ROOMY_GIB = 2048
"""Host memory for those where the usual share has no room."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = "\n".join(page()) + "\n"
    if parser.parse_args().write:
        PAGE.write_text(text)
    else:
        print(text)


def page() -> Iterator[str]:
    yield "# Machines"
    yield ""
    yield "Made by `scripts/make/make_machines_page.py`: what `slidedp compare` says of three"
    yield f"models on four GPUs, rows of {SEQ_LENGTH:,} tokens, AdamW, clipped, bf16 compute."
    yield "Only H200 was measured; figures of all other machines are derived from data sheets"
    yield "(sources below), so expect larger errors. `slidedp compare` takes other counts and"
    yield "prices; `slidedp measure` measures your own machine. † The host has no room with its"
    yield f"usual share: planned for one of {ROOMY_GIB:,} GiB."
    for title, (name, tokens) in MODELS.items():
        yield ""
        yield f"## {title}, {tokens:,} tokens per step"
        yield ""
        yield from model_section(name, tokens)
    yield ""
    yield "## By hand"
    yield ""
    yield from by_hand()
    yield ""
    yield "## What would help most"
    yield ""
    yield from purchases()
    yield ""
    yield "## Where the figures come from"
    yield ""
    yield from sources()


def request(name: str, tokens: int) -> AskedJob:
    """The job as the command would be told it."""
    defaults = dict.fromkeys(
        (
            *("weight_route", "gradient_route", "keep_activations", "resident_state"),
            *("device_memory_budget_gib", "host_memory_budget_gib", "model_name_or_path"),
            *("optim", "optimizer_state_bytes", "ema_decay", "document_length", *COUNTS),
        )
    )
    return asked_job(
        argparse.Namespace(
            **defaults,
            preset=name,
            tokens_per_step=tokens,
            seq_length=SEQ_LENGTH,
            max_grad_norm=1.0,
            compute_dtype="bfloat16",
            freeze=[],
        )
    )


def best(job: AskedJob, hardware: HardwareProfile) -> tuple[Row, bool]:
    """The job on a machine, else on one with a roomy host; whether it is that."""
    (row,) = compared(job, [hardware])
    if row.plan is not None or "host memory" not in row.reason:
        return row, False
    roomy = with_host(hardware)
    return compared(job, [roomy])[0], True


def with_host(hardware: HardwareProfile) -> HardwareProfile:
    """The same with a roomy host."""
    return replace(hardware, host_memory_bytes=float(ROOMY_GIB * GIB))


def model_section(name: str, tokens: int) -> Iterator[str]:
    job = request(name, tokens)
    yield "| machine | tokens/s | step | GPU | host | what binds |"
    yield "|---|---|---|---|---|---|"
    for preset in PRESETS:
        if preset == "cpu":
            continue
        for count in COUNTS_OF_GPUS:
            row, roomy = best(job, named_hardware(preset, num_devices=count))
            yield table_line(row, roomy)


def table_line(row: Row, roomy: bool) -> str:
    hardware = row.hardware
    machine = f"{hardware.num_devices} x {hardware.name}{' †' if roomy else ''}"
    if row.plan is None:
        return f"| {machine} | does not fit | | | | {row.reason} |"
    time, memory = row.plan.chosen.time, row.plan.chosen.memory
    return (
        f"| {machine} | {time.tokens_per_s:,.0f} | {time.step_s:.3g} s | "
        f"{memory.device_bytes / GIB:.1f} GiB | {memory.host_bytes / GIB:,.0f} GiB | "
        f"{binding(time)} |"
    )


def by_hand() -> Iterator[str]:
    """Lanes of a step from first principles, beside the plan."""
    title, (name, tokens) = next(iter(MODELS.items()))
    workload = Workload.from_config(named_config(name))
    params, batch = workload.num_parameters, BatchShape(num_rows=tokens // 4096, seq_length=4096)
    products = 2.0 * tokens * sum(s.matmul_parameters for s in (*workload.layers, workload.head))
    attention = batch.num_rows * sum(stage.attention_flops(batch) for stage in workload.layers)
    yield f"{title}, {tokens:,} tokens per step, all state on the host, everything recomputed:"
    yield "products are 2 P operations per token and pass, four passes; attention 4.5 times its"
    yield "forward's; weights go up twice and gradients down once in bf16; the update is P over its"
    yield "rate. A step takes at least the longest of these lanes, and what does not overlap;"
    yield "the plan recomputes less where memory is left, so it may be faster."
    yield ""
    yield "| machine | compute | copies up | copies down | host update | longest | plan |"
    yield "|---|---|---|---|---|---|---|"
    for preset, count in BY_HAND:
        hardware = named_hardware(preset, num_devices=count)
        compute_s = 4 * products / hardware.bf16_matmul_flops_per_s
        compute_s += 4.5 * attention / hardware.attention_flops_per_s
        compute_s /= count
        # Each GPU pulls a share; the rest comes from the others, or through the host.
        share = 1 / count
        up_s = 2 * 2 * params * share / hardware.h2d.points[-1][1]
        gather_s = 2 * 2 * params * (1 - share) / hardware.gather_bytes_per_s
        sum_s = 2 * params * (1 - share) / hardware.gather_bytes_per_s
        down_s = 2 * params * share / hardware.d2h.points[-1][1]
        update_s = params / hardware.host_update_params_per_s
        compute_s += gather_s + sum_s
        row, roomy = best(request(name, tokens), hardware)
        planned = "" if row.plan is None else f"{row.plan.chosen.time.step_s:.1f} s"
        lanes = (compute_s, up_s, down_s, update_s)
        texts = " | ".join(f"{seconds:.1f} s" for seconds in (*lanes, max(lanes)))
        yield f"| {count} x {preset}{' †' if roomy else ''} | {texts} | {planned} |"
    yield ""
    yield "(compute with what the GPUs gather and sum, which no copy hides)"


def purchases() -> Iterator[str]:
    yield "Twice of one thing, everything else as it is; tokens per second, and the gain."
    yield ""
    for title, (name, tokens) in MODELS.items():
        job = request(name, tokens)
        for preset, count in BY_HAND:
            row, roomy = best(job, named_hardware(preset, num_devices=count))
            if row.plan is None:
                continue
            found = upgrades(job, row.hardware, row.plan)[:3]
            machine = f"{count} x {preset}{' †' if roomy else ''}"
            texts = "; ".join(upgrade.describe() for upgrade in found)
            yield f"- {title}, {machine} ({row.tokens_per_s:,.0f} tokens/s): {texts}"


def sources() -> Iterator[str]:
    yield "| preset | JAX's name | bf16 | memory | to host | between GPUs | peer access | source |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, card in CARDS.items():
        profile = PRESETS[name]
        yield (
            f"| {name} | {card.kind} | {card.bf16_flops_per_s / 1e12:g} TFLOP/s | "
            f"{card.memory_gib:g} GiB, {card.memory_bytes_per_s / 1e12:g} TB/s | "
            f"{profile.h2d.points[-1][1] / 1e9:.0f} GB/s | "
            f"{profile.gather_bytes_per_s / 1e9:.0f} GB/s | "
            f"{'yes' if card.peer_access else 'no'} | {card.source} |"
        )
    yield ""
    yield "Hosts:"
    yield ""
    for host in dict.fromkeys(HOSTS.values()):
        names = ", ".join(name for name, own in HOSTS.items() if own is host)
        yield (
            f"- {names}: {host.num_cores} cores, {host.memory_bytes / GIB:.0f} GiB and "
            f"{host.memory_bytes_per_s / 1e9:.0f} GB/s per GPU, at most "
            f"{host.most_memory_bytes_per_s / 1e9:.0f} GB/s in all, "
            f"{host.update_params_per_s / 1e9:g}e9 parameters per second: {host.source}"
        )
    yield "- h200: measured (docs/benchmarks)"
    yield ""
    yield f"Links of PCIe 4: {PCIE4_SOURCE}."
    yield "Of PCIe 5: as measured beside an H200. Rates of products, attention and memory are the"
    yield "data sheet's times what was reached of it on an H200."


if __name__ == "__main__":
    main()

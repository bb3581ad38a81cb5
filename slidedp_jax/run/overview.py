"""What a run is, on five lines: model, data, memory, time in all, and where it goes.

    model    Qwen3-8B (qwen3): 8.19B parameters, all trained
    data     2,996 of 3,000 rows, 1.50M tokens, 61 % supervised; 46 steps of 8 rows, 1.00 epochs
    memory   GPU 23.1 of 23.5 GiB, host 122.7 of 125.1 GiB, disk 311 of 900 GiB free
    time     46 steps of 19.0 s, about 15 min, plus loading and saving (predicted); the disk takes
             76 s for 1 save of 91.53 GiB and the export (1.5 GB/s, measured just now)
    output   out: checkpoint every 500 steps and at the end, then export/

The plan in full and the report on the data are printed by `--dry_run` and `--verbose`.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from slidedp_jax.data import DataReport, account
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.report import notes as plan_notes
from slidedp_jax.planner.report import plan_as_text
from slidedp_jax.planner.search import Plan
from slidedp_jax.planner.words import LANE_WORDS
from slidedp_jax.run.arguments import STATED, TrainArguments
from slidedp_jax.run.checks import RunInputs, epochs_note, frozen_note
from slidedp_jax.run.disk import RunDisk
from slidedp_jax.run.time_text import duration
from slidedp_jax.wording import columns_of, counted, short_count, wrapped

_LABEL = 9
"""Columns of a line's name."""

LONG_WAIT = 0.1
"""Share of a step from which on waiting is worth a word."""


def opening(
    args: TrainArguments,
    inputs: RunInputs,
    plan: Plan,
    disk: RunDisk,
    notes: Sequence[str],
    *,
    whole: bool,
) -> str:
    """What is printed before a run begins.

    Args:
      args: the run's settings.
      inputs: model and data.
      plan: how it will be run.
      disk: what it will write.
      notes: for the user, on the folder and the settings.
      whole: the plan in full as well (the data's report, `data_details`, comes before planning).
    """
    columns = columns_of(sys.stdout)
    sections = []
    if whole:
        other = args.hardware is not None
        assumed = [name for name in STATED if other and getattr(args, name) is None]
        sections = [wrapped(f"{plan_as_text(plan, assumed=assumed)}\n{disk}\n", columns)]
    sections.append(overview_text(overview(args, inputs, plan, disk), columns))
    if not whole:  # else they are in the details
        notes = [*_data_notes(inputs), *notes, *plan_notes(plan)]
    return "\n".join([*sections, *(wrapped(f"note: {note}", columns, 6) for note in notes)])


def data_details(inputs: RunInputs) -> str:
    """What became of all rows, those for evaluation included, and the first as it is learnt."""
    tokenizer = inputs.pretrained.tokenizer
    shown = functools.partial(account, tokenizer=tokenizer, columns=columns_of(sys.stdout))
    reports = [shown(inputs.source.examples, inputs.report)]
    for name, report in inputs.evaluation_reports.items():
        held_out = shown(inputs.evaluation[name].examples, report)
        reports.append(f"for evaluation{f', {name}' if name else ''}\n{held_out}")
    return "\n".join(reports) + "\n"


def _data_notes(inputs: RunInputs) -> list[str]:
    """What is worth knowing of the rows even where their report is not printed."""
    found = []
    for report in (inputs.report, *inputs.evaluation_reports.values()):
        if report.dropped:
            first = f" (the first: {report.bad_rows[0]})" if report.bad_rows else ""
            found.append(f"rows dropped from {_files(report)}: {report.drops}{first}")
        if report.truncated:
            found.append(
                f"{counted(report.truncated, 'row')} of {_files(report)} cut to max_seq_length "
                f"{report.max_seq_length:,}; the longest has {report.longest_row:,} tokens"
            )
        found += report.notes
    return found


def _files(report: DataReport) -> str:
    return ", ".join(report.files[:3]) + (" ..." if len(report.files) > 3 else "")


def overview(args: TrainArguments, inputs: RunInputs, plan: Plan, disk: RunDisk) -> dict[str, str]:
    """Name of a line -> its text.

    Args:
      args: the run's settings.
      inputs: model and data; steps that are done already are those of an earlier run.
      plan: how it will be run.
      disk: what it will write.
    """
    return {
        "model": _model(args, inputs),
        "data": _data(args, inputs),
        "memory": _memory(plan, disk),
        "time": _time(args, inputs, plan, disk),
        "output": _output(args),
    }


def overview_text(lines: dict[str, str], columns: int | None) -> str:
    """The lines for the console, broken between words to fit.

    Args:
      lines: what `overview` gave.
      columns: of the terminal; None breaks nothing.
    """
    return "\n".join(
        wrapped(f"{name:<{_LABEL}}{text}", columns, _LABEL) for name, text in lines.items()
    )


def _model(args: TrainArguments, inputs: RunInputs) -> str:
    config = inputs.pretrained.config
    name = pathlib.Path(args.model_name_or_path).name or args.model_name_or_path
    size = f"{name} ({config.model_type}): {short_count(config.num_parameters)} parameters"
    if config.num_experts:
        size += f" ({short_count(config.num_active_parameters)} active)"
    return f"{size}; {frozen_note(args, config)}" if args.freeze else f"{size}, all trained"


def _data(args: TrainArguments, inputs: RunInputs) -> str:
    report = inputs.report
    share = 100 * report.num_supervised_tokens / max(1, report.num_tokens)
    rows = counted(report.rows_in, "row")
    rows = f"{report.rows_kept:,} of {rows}" if report.rows_dropped else rows
    packed = f", packed into {inputs.source.num_rows:,}" if args.packing else ""
    text = f"{rows}{packed}, {short_count(report.num_tokens)} tokens, {share:.0f} % supervised"
    text += f", padding {inputs.source.padding_share:.1%} of the rows{_mix(inputs)}"
    text += f"; {epochs_note(inputs, args)}"
    if inputs.evaluation_reports:
        text += f"; held out: {_held_out(inputs)}"
    return text


def _mix(inputs: RunInputs) -> str:
    """What an epoch has of each file, where those have weights."""
    total = max(1, inputs.source.num_rows)
    parts = [
        f"{pathlib.Path(file).name} {rows / total:.0%} of rows, {tokens:.0%} of tokens"
        for file, (rows, tokens) in zip(inputs.report.files, inputs.source.mix, strict=False)
    ]
    return f"; an epoch takes {', '.join(parts)}" if parts else ""


def _held_out(inputs: RunInputs) -> str:
    reports = inputs.evaluation_reports
    rows = sum(report.rows_kept for report in reports.values())
    names = [f"{name} {report.rows_kept:,}" for name, report in reports.items() if name]
    return counted(rows, "row") + (f" ({', '.join(names)})" if names else "")


def _memory(plan: Plan, disk: RunDisk) -> str:
    job, memory = plan.job, plan.chosen.memory
    parts = []
    if not job.hardware.unified_memory:
        each = "each GPU" if job.hardware.num_devices > 1 else "GPU"
        parts.append(f"{each} {_of(memory.device_bytes, job.device_budget_bytes)}")
    parts.append(f"host {_of(memory.host_bytes, job.host_budget_bytes)}")
    if disk.use.total_bytes and disk.free_bytes is not None:
        parts.append(f"disk {_of(disk.use.total_bytes, disk.free_bytes)} free")
    elif disk.use.total_bytes:
        parts.append(f"disk {_gib(disk.use.total_bytes)} GiB")
    return ", ".join(parts)


def _of(need_bytes: float, have_bytes: float) -> str:
    return f"{_gib(need_bytes)} of {_gib(have_bytes)} GiB"


def _gib(num_bytes: float) -> str:
    gib = num_bytes / GIB
    return f"{gib:,.1f}" if gib >= 0.05 else f"{gib:.2g}"


def _time(args: TrainArguments, inputs: RunInputs, plan: Plan, disk: RunDisk) -> str:
    num_steps = inputs.num_steps - inputs.first_step
    if num_steps < 1:
        return "no step is left to take"
    step_s = step_seconds(plan, inputs)
    steps = f"{counted(num_steps, 'step')}{' left' if inputs.first_step else ''}"
    saving = "" if disk.saving is None else f"; {disk.saving}"
    guessed = plan.job.hardware.unified_memory and args.hardware_profile is None
    how = "a guess: presets know no CPU machine's speed" if guessed else "predicted"
    return (
        f"{steps} of {duration(step_s)}, about {duration(num_steps * step_s)}, plus loading and "
        f"saving ({how}){saving}{_waiting(plan)}"
    )


def step_seconds(plan: Plan, inputs: RunInputs) -> float:
    """Predicted seconds of a step, over the widths that the steps' rows will have."""
    shares = inputs.source.width_shares()
    if list(shares) == [plan.job.batch.seq_length]:
        return plan.chosen.time.step_s
    seconds = 0.0
    for width, share in shares.items():
        narrower = replace(plan.job, batch=replace(plan.job.batch, seq_length=width))
        seconds += share * narrower.time(plan.strategy).step_s
    return seconds


def _waiting(plan: Plan) -> str:
    """What a step waits for, if it does for long."""
    time = plan.chosen.time
    waits = {lane: seconds for lane, seconds in time.exposed_s.items() if lane != "compute"}
    share = sum(waits.values()) / time.step_s
    if share < LONG_WAIT:
        return ""
    longest = max(waits, key=lambda lane: waits[lane])
    who = "CPU" if plan.job.hardware.unified_memory else "GPU"
    return f"; the {who} waits for {share:.0%} of it, mostly for {LANE_WORDS[longest]}"


def _output(args: TrainArguments) -> str:
    saves = [f"every {counted(args.save_steps, 'step')}"] if args.save_steps is not None else []
    saves += [f"every {args.save_minutes:g} minutes"] if args.save_minutes is not None else []
    saves += ["at the end"] if args.save_at_end else []
    what = f"checkpoint {' and '.join(saves)}" if saves else "no checkpoints"
    return f"{args.output_dir}: {what}, {'then export/' if args.export else 'no export'}"

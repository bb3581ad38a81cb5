"""The main job: `python -m slidedp_jax.train --model_name_or_path DIR --train_file F ...`.

Trains every parameter of a Hugging Face model folder on jsonl or text files, resumes by the same
command, and writes a Hugging Face folder at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import slidedp_jax
from slidedp_jax.errors import UserError
from slidedp_jax.host_watch import end_with
from slidedp_jax.interrupts import StopAtSignal
from slidedp_jax.wording import columns_of, say_error

if TYPE_CHECKING:
    from slidedp_jax.process import ProcessSetup
    from slidedp_jax.run.arguments import TrainArguments
    from slidedp_jax.run.folder import RunFolder

EXIT_FAILED, EXIT_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0: done; 1: failed; 2: wrong command; 75: stopped by SIGTERM or SIGUSR1 and saved, to be started
    again; 130: stopped by Ctrl-C and saved; 128 and the signal: ended at once.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or "--help" in argv or "-h" in argv:
        from slidedp_jax.run.settings_help import help_text

        print(help_text(columns_of(sys.stdout) or 80))
        return 0 if argv else EXIT_USAGE
    with StopAtSignal() as stop:
        return _run(argv, stop)


def _run(argv: Sequence[str], stop: StopAtSignal) -> int:
    from slidedp_jax.run.arguments import parse_arguments

    try:
        args = parse_arguments(argv)
    except UserError as error:
        say_error(error)
        return EXIT_USAGE
    try:
        return train(args, stop)
    except (UserError, OSError) as error:
        say_error(error)
        if error.__cause__ is not None and not isinstance(error, UserError):
            raise
        end_with(error, EXIT_FAILED)
        return EXIT_FAILED


def train(args: TrainArguments, stop: StopAtSignal) -> int:
    """Run a training job; returns the exit code.

    Args:
      args: its settings.
      stop: takes the signals of this process.
    """
    from slidedp_jax.run.many_hosts import (
        check_settings,
        follow_quietly,
        open_folder,
        tell_when_stopped,
        together_of,
    )

    setup = _configure(args)
    together = together_of(setup.hosts)
    if together is not None:
        print(setup.hosts.describe(), flush=True)
        check_settings(args, setup.hosts)
        num_devices = len(setup.devices()[0])
    elif args.hardware is not None:
        num_devices = (args.num_devices or 1) * (args.num_hosts or 1)
    else:
        num_devices = args.num_devices or len(setup.devices()[0])
    follow_quietly(together)
    folder = open_folder(args, together)
    if not args.dry_run:
        stop.last_words, stop.tidy = folder.last_checkpoint, folder.abandon
        stop.within_s = args.stop_within
        tell_when_stopped(stop, together)
    try:
        return _train_in(folder, args, num_devices, stop)
    finally:
        folder.close()


def _train_in(folder: RunFolder, args: TrainArguments, num_devices: int, stop: StopAtSignal) -> int:
    from slidedp_jax.planner.whole_updates import whole_update_note
    from slidedp_jax.run.batch_size import batch_notes, with_batch_size
    from slidedp_jax.run.changes import data_may_change
    from slidedp_jax.run.checks import (
        attention_notes,
        check_attention,
        choices_note,
        load_inputs,
        setting_notes,
    )
    from slidedp_jax.run.compiled import checked_parts, is_checked, make_parts
    from slidedp_jax.run.disk import disk_of_run
    from slidedp_jax.run.expert_products import changed_products, check_expert_products
    from slidedp_jax.run.folder import BEGINS_ANEW
    from slidedp_jax.run.hardware_profile import profile_notes
    from slidedp_jax.run.loop import Run
    from slidedp_jax.run.many_hosts import check_alike, check_same_weights
    from slidedp_jax.run.out_of_memory import explained
    from slidedp_jax.run.overview import data_details, opening
    from slidedp_jax.run.record import IN_CHECKPOINT
    from slidedp_jax.run.resume import recorded_strategy, resumption
    from slidedp_jax.run.same_inputs import check_same, differ
    from slidedp_jax.run.saving import save_notes
    from slidedp_jax.run.trackers import check_trackers
    from slidedp_jax.run.ways_out import plan_or_ways_out

    check_trackers(args)
    started = folder.started
    inputs = load_inputs(args, num_devices, started)
    resumed, notes = resumption(folder.resume_from), list(folder.notes)
    before = folder.previous if resumed is None else resumed.extra.get(IN_CHECKPOINT)
    before = before or folder.previous
    if before is not None and folder.left_nothing and differ(before["fingerprints"] or {}, inputs):
        before = None
        notes.append(f"{BEGINS_ANEW}, with other rows or another tokenizer")
    args, inputs, size_notes = with_batch_size(args, inputs, num_devices, before)
    notes += size_notes
    other_data = resumed is not None and resumed.other_data(inputs)
    if resumed is not None:
        inputs = resumed.continued(inputs, args)
        notes += resumed.notes(args, inputs)
    check_same(before, inputs, other_rows=data_may_change(args))
    strategy, plan_notes = recorded_strategy(before, args)
    if other_data and strategy is not None and args.plan_from is None:
        strategy, plan_notes = None, ["planned anew for other data: the last bits may change"]
    check_attention(args, inputs)
    check_expert_products(args, inputs.pretrained.config, inputs.source.widths[-1])
    notes += [*setting_notes(inputs, args), *attention_notes(inputs, args), *plan_notes]
    if (note := whole_update_note(args.optim)) is not None:
        notes.append(note)
    whole = args.dry_run or args.verbose
    if whole:
        print(data_details(inputs))
    plan = plan_or_ways_out(args, inputs, num_devices, strategy)
    check_alike(plan, inputs)
    if is_checked(args, inputs, plan):
        parts, compiled_notes = checked_parts(args, inputs, num_devices, plan, strategy)
        plan, notes = parts.plan, [*notes, *compiled_notes]
    else:
        parts = make_parts(args, inputs, plan)
    notes += profile_notes(args)
    if strategy is None:
        notes += choices_note(args, inputs, num_devices, plan, parts.held_back_bytes)
    check_alike(plan, inputs)  # one of the hosts may have planned anew
    notes += batch_notes(args, inputs, plan, num_devices, held_back_bytes=parts.held_back_bytes)
    at_once = plan.strategy.rows_per_microbatch * inputs.source.widths[-1]
    notes += changed_products(before, args, inputs.pretrained.config, at_once)
    steps = {"num_steps": inputs.num_steps, "first_step": inputs.first_step}
    disk = disk_of_run(args, folder, plan, **steps)
    notes += [*disk.check(), *save_notes(args, plan, disk.use.checkpoint_bytes, disk.bytes_per_s)]
    print(opening(args, inputs, plan, disk, notes, whole=whole), flush=True)
    if args.dry_run:
        return 0
    if inputs.pretrained.hub_name is not None:
        inputs.pretrained.fetch_weights()
    if resumed is None:
        check_same_weights(inputs)
    try:
        return Run(args, folder, inputs, parts, disk, stop, started).run(resumed)
    except BaseException as error:
        if folder.failed():
            print("the run that was to be replaced is left as it was", file=sys.stderr)
        reason = explained(error, plan) if isinstance(error, Exception) else None
        if reason is not None:
            raise reason from error
        raise


def _configure(args: TrainArguments) -> ProcessSetup:
    elsewhere = args.hardware is not None  # what is planned for is another machine
    try:
        return slidedp_jax.configure(
            platform="cpu" if args.hardware is not None else args.platform,
            num_devices=args.num_devices if args.device_ids is None else None,
            device_ids=args.device_ids,
            num_host_devices=args.num_host_devices,
            compilation_cache=args.compilation_cache,
            num_hosts=1 if elsewhere else args.num_hosts,
            host_index=None if elsewhere else args.host_index,
            coordinator=None if elsewhere else args.coordinator,
            profiled=args.profiled is not None,
        )
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())

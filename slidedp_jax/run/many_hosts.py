"""A run of several hosts: the first one owns the folder and the console, the others follow it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from slidedp_jax import host_watch
from slidedp_jax.checkpoint.save_together import Together, check_one_folder
from slidedp_jax.errors import UserError
from slidedp_jax.hosts import Hosts
from slidedp_jax.interrupts import StopAtSignal
from slidedp_jax.planner.search import Plan
from slidedp_jax.run.arguments import WHOLE_PARAMETER_OPTIMIZERS, TrainArguments
from slidedp_jax.run.changes import PATHS
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.run.folder import RunFolder, open_run_folder
from slidedp_jax.run.held_out import row_fingerprints
from slidedp_jax.run.lock import RunLock
from slidedp_jax.run.same_inputs import fingerprints, weights_fingerprint


def together_of(hosts: Hosts) -> Together | None:
    """What hosts of a run do together; None for a single one."""
    watch = host_watch.watch()
    if hosts.num_hosts == 1 or watch is None:
        return None
    return Together(watch=watch, is_first=hosts.is_first)


OF_EACH_HOST = frozenset(
    {
        *PATHS,
        "output_dir",
        "validation_file",
        "plan_from",
        "hardware_profile",
        "num_hosts",
        "host_index",
        "coordinator",
        "platform",
        "devices",
        "num_devices",
        "num_host_devices",
        "compilation_cache",
        "data_cache",
        "dataset_num_proc",
        "device_memory_budget",
        "host_memory_budget",
        "report_to",
        "run_name",
        "logging_dir",
        "profile_steps",
        "disable_tqdm",
        "verbose",
    }
)
"""Settings that hosts may have otherwise than each other: what they name is compared by what is
found there or what becomes of it, the first host alone does it, or it changes no result."""


def check_settings(args: TrainArguments, hosts: Hosts) -> None:
    """Whether several hosts can do what is asked for, and are asked for the same.

    Raises:
      UserError: they cannot, as yet, or are not.
    """
    if hosts.num_hosts == 1:
        return
    wrong = {
        "sample_prompts": bool(args.sample_prompts) and "generation runs on one host",
        "optim": args.optim in WHOLE_PARAMETER_OPTIMIZERS
        and f"{args.optim} updates whole matrices, of which each host has a share",
    }
    for name, why in wrong.items():
        if why:
            raise UserError(f"{name} is not for {hosts.num_hosts} hosts: {why}")
    settings = dataclasses.asdict(args)
    host_watch.agree_on({name: repr(settings[name]) for name in settings.keys() - OF_EACH_HOST})


def open_folder(args: TrainArguments, together: Together | None) -> RunFolder:
    """The run's folder: the first host opens it, and the others are told what it found.

    Raises:
      UserError: as `open_run_folder`; or the hosts do not see one folder.
    """
    if together is None:
        return open_run_folder(args)
    opened: list[RunFolder] = []

    def open_it() -> str:
        folder = open_run_folder(args)
        opened.append(folder)
        return json.dumps(
            {
                "resume_from": folder.resume_from and str(folder.resume_from),
                "previous": folder.previous,
                "replaces": folder.replaces,
                "left_nothing": folder.left_nothing,
                "started": folder.started.isoformat(),
            }
        )

    told: dict[str, Any] = json.loads(together.first(open_it))
    started = datetime.datetime.fromisoformat(told["started"])
    try:
        if not args.dry_run:
            check_one_folder(pathlib.Path(args.output_dir), together)
    except BaseException:
        for folder in opened:
            folder.close()
        raise
    if opened:
        return opened[0].begun(started)
    resume_from = told["resume_from"]
    root = pathlib.Path(args.output_dir)
    return RunFolder(
        root=root,
        resume_from=None if resume_from is None else pathlib.Path(resume_from),
        lock=RunLock(root),
        previous=told["previous"],
        replaces=told["replaces"],
        is_owner=False,
        found_nothing=told["left_nothing"],
        begun_at=started,
    )


def follow_quietly(together: Together | None) -> None:
    """What all hosts would print is the first one's to say; errors are everybody's."""
    if together is not None and not together.is_first:
        sys.stdout.flush()
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open to the end


def tell_when_stopped(stop: StopAtSignal, together: Together | None) -> None:
    """A signal that ends this host at once ends all, with that for a cause."""
    if together is None:
        return
    tidy = stop.tidy

    def tidy_and_tell() -> None:
        try:
            tidy()
        finally:
            together.watch.fail("a signal")

    stop.tidy = tidy_and_tell
    together.watch.tidy = tidy


def check_alike(plan: Plan, inputs: RunInputs) -> None:
    """Whether all hosts are about to do the same.

    Raises:
      UserError: they are not, on every host.
    """
    if host_watch.watch() is None:
        return
    found = {
        "the plan": plan.strategy,
        "steps": (inputs.first_step, inputs.num_steps),
        "rows and tokenizer": fingerprints(inputs),
        "held-out rows": row_fingerprints(inputs.evaluation),
        "the model's configuration": inputs.pretrained.config,
    }
    host_watch.agree_on({name: repr(value) for name, value in found.items()}, advice=SAME_FILES)


def check_same_weights(inputs: RunInputs) -> None:
    """Whether all hosts are about to read the same starting weights.

    Raises:
      UserError: they are not, on every host.
    """
    if host_watch.watch() is not None:
        found = weights_fingerprint(inputs.pretrained.folder)
        host_watch.agree_on(found, advice=SAME_FILES)


SAME_FILES = "Give all hosts the same files of the model and of the data, and the same command"


def all_say(together: Together | None, value: bool) -> bool:
    """What the first host says."""
    return bool(all_told(together, lambda: "yes" if value else ""))


def all_told(together: Together | None, text: Callable[[], str]) -> str:
    """What the first host says, where only it can know; asked of it alone."""
    return text() if together is None else together.first(text)

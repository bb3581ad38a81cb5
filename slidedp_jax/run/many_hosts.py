"""A run of several hosts: the first one owns the folder and the console, the others follow it."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
from typing import Any

from slidedp_jax import host_watch
from slidedp_jax.checkpoint.save_together import Together, check_one_folder
from slidedp_jax.errors import UserError
from slidedp_jax.hosts import Hosts
from slidedp_jax.interrupts import StopAtSignal
from slidedp_jax.planner.search import Plan
from slidedp_jax.run.arguments import WHOLE_PARAMETER_OPTIMIZERS, TrainArguments
from slidedp_jax.run.checks import RunInputs
from slidedp_jax.run.folder import RunFolder, open_run_folder
from slidedp_jax.run.lock import RunLock
from slidedp_jax.run.same_inputs import fingerprints


def together_of(hosts: Hosts) -> Together | None:
    """What hosts of a run do together; None for a single one."""
    watch = host_watch.watch()
    if hosts.num_hosts == 1 or watch is None:
        return None
    return Together(watch=watch, is_first=hosts.is_first)


def check_settings(args: TrainArguments, hosts: Hosts) -> None:
    """Whether several hosts can do what is asked for.

    Raises:
      UserError: they cannot, as yet.
    """
    if hosts.num_hosts == 1:
        return
    wrong = {
        "sample_prompts": bool(args.sample_prompts) and "generation runs on one host",
        "save_minutes": args.save_minutes is not None and "clocks differ; use save_steps",
        "early_stopping_patience": args.early_stopping_patience is not None
        and "metrics.jsonl, by which it is judged, is the first one's",
        "optim": args.optim in WHOLE_PARAMETER_OPTIMIZERS
        and f"{args.optim} updates whole matrices, of which each host has a share",
    }
    for name, why in wrong.items():
        if why:
            raise UserError(f"{name} is not for {hosts.num_hosts} hosts: {why}")


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
    host_watch.agree("the plan", repr(plan.strategy))
    host_watch.agree("rows, tokenizer and model", repr(fingerprints(inputs)))


def all_say(together: Together | None, value: bool) -> bool:
    """What the first host says."""
    if together is None:
        return value
    return together.first(lambda: "yes" if value else "") == "yes"

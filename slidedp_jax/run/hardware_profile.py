"""The measured profile that a run plans with: what is said of it, and what is written down."""

from __future__ import annotations

from typing import Any

from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.this_machine import measured_profile, profile_differences, profile_path


def profile_notes(args: TrainArguments) -> list[str]:
    """Of a named profile, what differs here; else that there is one."""
    if args.hardware is not None:
        return []
    if args.hardware_profile is not None:
        profile = measured_profile(args.hardware_profile)
        differing = profile_differences(profile)
        assumed = sorted(profile.assumed)
        notes = [f"planned with rates measured on {profile.date[:10]} ({profile.source})"]
        if assumed:
            notes[0] += f"; not measured, but assumed: {', '.join(assumed)}"
        if differing:
            notes.append(
                f"the hardware profile {profile.source} is of another machine or set-up: "
                f"{'; '.join(differing)}. `slidedp measure` makes one of this"
            )
        return notes
    if (path := profile_path()).exists():
        return [f"this machine has been measured ({path}); --hardware_profile auto plans with it"]
    return []


def profile_record(args: TrainArguments) -> dict[str, Any] | None:
    """For run.json: the named profile, and in what this machine differs; None without one."""
    if args.hardware_profile is None:
        return None
    profile = measured_profile(args.hardware_profile)
    return profile.identity() | {"differences": profile_differences(profile)}

"""What the planner raises."""

from __future__ import annotations


class PlanError(ValueError):
    """The job cannot be planned; the message is one paragraph per limit, for the user."""

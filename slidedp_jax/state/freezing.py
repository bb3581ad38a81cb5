"""Which parameters stay as they are, as a setting of the user's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slidedp_jax.errors import UserError
from slidedp_jax.models import frozen_names as patterns_of_names


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """As `models.frozen_names`.

    Raises:
      UserError: a pattern fits no name, or all names are frozen.
    """
    try:
        return patterns_of_names.frozen_names(names, patterns)
    except ValueError as error:
        raise UserError(str(error)) from None

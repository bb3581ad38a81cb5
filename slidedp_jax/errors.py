"""Errors meant for the person at the keyboard."""


class UserError(Exception):
    """Something that the user can mend: one paragraph says what, where and what to change."""


class TrainingStopped(UserError):
    """Training cannot go on (non-finite gradients, a failed lane); it says how the state is."""

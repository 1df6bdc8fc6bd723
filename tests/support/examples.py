"""How many examples a property is tried with: a part of them by default, all with `--hypothesis-profile=deep`."""

from __future__ import annotations

from hypothesis import settings

QUICK, DEEP = 25, 100
"""Examples of a property that says nothing of its own."""


def register() -> None:
    """Make the two profiles known, and choose the quick one. How long an example takes says how busy a machine is."""
    settings.register_profile("quick", deadline=None, max_examples=QUICK)
    settings.register_profile("deep", deadline=None, max_examples=DEEP)
    settings.load_profile("quick")


def examples(deep: int) -> int:
    """The share of these examples that the profile tries.

    Args:
        deep: how many examples the deep profile tries.
    """
    return max(3, deep * settings().max_examples // DEEP)


def seeds(deep: int) -> range:
    """The share of these random courses of events that the profile tries, the first ones.

    Args:
        deep: how many of them the deep profile tries.
    """
    return range(examples(deep))

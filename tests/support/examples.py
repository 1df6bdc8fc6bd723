"""How many examples a property is tried with: a part of them by default, all with `--hypothesis-profile=deep`."""

from __future__ import annotations

from hypothesis import settings

QUICK, DEEP = 25, 100
"""Examples of a property without a number of its own."""


def register() -> None:
    """Register the two profiles, and load the quick one."""
    settings.register_profile("quick", deadline=None, max_examples=QUICK)
    settings.register_profile("deep", deadline=None, max_examples=DEEP)
    settings.load_profile("quick")


def examples(deep: int) -> int:
    """Return the share of these examples of the deep profile that the present profile tries."""
    return max(3, deep * settings().max_examples // DEEP)


def seeds(deep: int) -> range:
    """Return the share of these seeds of random courses of events that the profile tries, the first ones."""
    return range(examples(deep))

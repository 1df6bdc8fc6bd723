"""For all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("any machine")

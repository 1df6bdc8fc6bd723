"""The closed world of the trained tiny model: the words that it knows, its voices, and the sizes of its sound."""

from __future__ import annotations

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "pink")
DIRECTIONS = ("left", "right", "down", "north", "south")
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
SHAPES = ("circle", "square", "triangle")
OTHERS = ("yes", "no", "water", "house", "window", "table", "summer", "winter", "music", "morning")
WORDS = (*DIGITS, *COLOURS, *DIRECTIONS, *WEEKDAYS, *SHAPES, *OTHERS)

VOICES = ("chelsie", "ethan")
RATE = 24_000
FRAME = 1920
PAUSE = 2
"""Silent frames after each word."""
LEAD = 1
"""Silent frames before the first word."""

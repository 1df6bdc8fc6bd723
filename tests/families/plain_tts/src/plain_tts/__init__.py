"""A model family of one stage that turns text into sound."""

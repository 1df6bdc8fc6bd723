"""A model family of one stage that makes pictures."""

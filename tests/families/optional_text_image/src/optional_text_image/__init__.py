"""A model family of two stages: text, which a request may leave out, and pictures."""

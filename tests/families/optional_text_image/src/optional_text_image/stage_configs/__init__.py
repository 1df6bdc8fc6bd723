"""Stage configs of the family."""

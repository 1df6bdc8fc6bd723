"""Kinds of output: how an answer of each kind is assembled, streamed, counted and returned offline."""

"""Batches: the requests of a JSONL file, sent to a server's routes; each answer is one line of another file."""

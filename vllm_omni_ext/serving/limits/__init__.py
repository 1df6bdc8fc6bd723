"""Limits of what a client may make the HTTP server read, hold, fetch, decode and tokenize."""

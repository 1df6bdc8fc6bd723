"""Limits the bytes, media, fetches and tokens that a client's request makes the HTTP server process."""

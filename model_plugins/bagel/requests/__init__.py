"""Handles BAGEL's requests in API servers: fields, flows, HTTP, and messages to and from the stages."""

"""Implements OpenAI's Realtime API, `/v1/realtime`."""

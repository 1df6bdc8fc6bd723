"""The Realtime API."""

"""Sends requests for spoken answers to a server with OpenAI's APIs, and measures the times at the client."""

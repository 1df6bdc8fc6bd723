"""Sends suites (requests with expected answers) to servers, scores the answers, and compares them with earlier runs."""

"""Accuracy suites: requests with right answers, sent to running servers, scored and compared with an earlier run."""

"""Accuracy suites: requests with right answers, asked of running servers, scored and compared with an earlier run."""

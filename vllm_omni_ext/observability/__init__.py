"""Records the times of requests, and exports them as metrics, in responses, and as OpenTelemetry spans."""

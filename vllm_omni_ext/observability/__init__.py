"""Records of requests, and their exports: metrics, the response, a trace file, OpenTelemetry."""

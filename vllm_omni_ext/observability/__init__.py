"""What happened to a request, and where it is shown: metrics, the response, a trace file, OpenTelemetry."""

"""Ready-made APIs that a model's `HttpSurface` switches on."""

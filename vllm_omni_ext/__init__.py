"""Multi-stage (omni-modal) models on stock vLLM."""

__version__ = "0.1.0"

"""OpenTelemetry spans for all stages but the frontend, which vLLM's own `llm_request` covers."""

from __future__ import annotations

from vllm.tracing import SpanAttributes, SpanKind, extract_trace_context, instrument_manual

from vllm_omni_ext.observability.request_trace import RequestTrace, StageTiming

_NS = 1_000_000_000


def emit_spans(record: RequestTrace, frontend: str) -> None:
    """Emit one span for each stage but the frontend, as children of the span in the client's trace headers."""
    context = extract_trace_context(record.trace_headers)
    for stage, timing in record.stages.items():
        if stage != frontend and timing.last is not None:
            instrument_manual(
                span_name=f"omni_{stage}",
                start_time=_unix_ns(record, timing.sent),
                end_time=_unix_ns(record, timing.last),
                attributes=_attributes(record, stage, timing),
                context=context,
                kind=SpanKind.INTERNAL,
            )


def _unix_ns(record: RequestTrace, seconds: float) -> int:
    return int((record.arrival + seconds) * _NS)


def _attributes(record: RequestTrace, stage: str, timing: StageTiming) -> dict[str, str | int | float]:
    facts: dict[str, str | int | float] = {
        SpanAttributes.GEN_AI_REQUEST_ID: record.request_id,
        SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: timing.tokens,
        "omni.stage": stage,
        "omni.replica": str(timing.replica),
        "omni.outcome": record.outcome or "",
    }
    if timing.waited is not None:
        facts[SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE] = timing.waited
    if timing.first is not None:
        facts[SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN] = timing.first - timing.sent
    for modality, trace in record.outputs.items():
        if trace.stage == stage:
            facts |= {f"omni.{modality}_{name}": fact for name, fact in trace.facts.items()}
    return facts

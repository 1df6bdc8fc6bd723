"""OpenTelemetry spans for the stages after the text stage, beside vLLM's own `llm_request`."""

from __future__ import annotations

from vllm.tracing import SpanAttributes, SpanKind, extract_trace_context, instrument_manual

from vllm_omni_ext.observability.record import Record, StageCourse

_NS = 1_000_000_000


def emit_spans(record: Record, text_stage: str) -> None:
    """One span for each stage but the text stage, children of the span the client named in its trace headers."""
    context = extract_trace_context(record.trace_headers)
    for stage, course in record.stages.items():
        if stage != text_stage and course.last is not None:
            instrument_manual(
                span_name=f"omni_{stage}",
                start_time=_unix_ns(record, course.sent),
                end_time=_unix_ns(record, course.last),
                attributes=_attributes(record, stage, course),
                context=context,
                kind=SpanKind.INTERNAL,
            )


def _unix_ns(record: Record, seconds: float) -> int:
    return int((record.arrival + seconds) * _NS)


def _attributes(record: Record, stage: str, course: StageCourse) -> dict[str, str | int | float]:
    facts: dict[str, str | int | float] = {
        SpanAttributes.GEN_AI_REQUEST_ID: record.request_id,
        SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: course.tokens,
        "omni.stage": stage,
        "omni.replica": str(course.replica),
        "omni.outcome": record.outcome or "",
    }
    if course.waited is not None:
        facts[SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE] = course.waited
    if course.first is not None:
        facts[SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN] = course.first - course.sent
    if record.heard is not None and record.heard.stage == stage:
        facts["omni.audio_seconds"] = record.heard.seconds
    return facts

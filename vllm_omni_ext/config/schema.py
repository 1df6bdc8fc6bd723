"""The configuration: every key with its default, its unit and its meaning. No default lives anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from vllm_omni_ext.config.checks import (
    AUTO,
    BOOLEAN,
    CHUNKS,
    CONNECTORS,
    COUNTS,
    DEVICES,
    ENVIRONMENT,
    HOSTS,
    KV_CONNECTORS,
    LB_POLICIES,
    LB_POLICY,
    MAPPING,
    PORT,
    SHORTEST_HEARTBEAT_TIMEOUT_S,
    TEXT,
    Check,
    integer,
    one_of,
    seconds,
)

STREAM_IDLE_S = "stream_idle_s"
"""The key that reaches the engines of streaming stages, in vLLM's `additional_config`."""

SENDS, TAKES = "sends", "takes"
"""The keys there with the connectors of edges that leave a stage and that lead to it, by the edge's name."""


ALL_ROUTES, VLLM_ROUTES = "all", "vllm"
"""Which routes need the API key: all but a few, or those of vLLM's own rule."""


@dataclass(frozen=True)
class Key:
    """What is known about one key: the rule for its value, its unit and what it means."""

    check: Check
    unit: str
    text: str


def _key(default: Any, check: Check, text: str, unit: str = "") -> Any:
    return field(default=default, metadata={"key": Key(check, unit, text)})


def _map(check: Check, text: str) -> Any:
    return field(default_factory=dict, metadata={"key": Key(check, "", text)})


def _counts(default: Mapping[str, int], text: str, unit: str) -> Any:
    return field(default_factory=lambda: dict(default), metadata={"key": Key(COUNTS, unit, text)})


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """What a user may say about replicas that are all alike."""

    replicas: int = _key(
        1,
        integer(at_least=0),
        "How many replicas of the stage are started here. 0: all of them come from other hosts.",
        "processes",
    )
    devices: str | None = _key(
        None,
        DEVICES.or_none(),
        "CUDA devices: all of them in order (replicas x devices a replica), or those of the first replica, after which "
        "the others follow: 0,1 makes 0,1 and 2,3. Null: placed automatically.",
        "device numbers",
    )
    lb_policy: str | None = _key(
        None,
        LB_POLICY.or_none(),
        "Which replica of the stage a new request goes to. Null: the top level's `lb_policy`.",
    )
    kv_cache_bytes: int | None = _key(
        None,
        integer(at_least=1).or_none(),
        "KV cache of each replica. Null: what is left of its part of a CUDA device; on CPU the pipeline's default.",
        "bytes",
    )
    cpu_threads: int | None = _key(
        None,
        integer(at_least=1).or_none(),
        "OpenMP threads of each replica on a CPU machine. Null: cores divided by all replicas.",
        "threads",
    )
    engine: Mapping[str, Any] = _map(MAPPING, "vLLM `EngineArgs` fields of this stage, by their Python name.")
    env: Mapping[str, str] = _map(ENVIRONMENT, "Environment variables of the stage's replica processes.")
    engine_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Engine fields from `--stage-overrides`: not a key of the file, stronger than stock command line flags."""


@dataclass(frozen=True, kw_only=True)
class PrefillDecode:
    """A stage whose prompts are computed by other replicas than its answers."""

    connector: str = _key(KV_CONNECTORS[0], one_of(*KV_CONNECTORS), "What moves the KV cache: `mooncake` or `nixl`.")
    protocol: str | None = _key(
        None, TEXT.or_none(), "The connector's transport: `tcp` or `rdma` for mooncake. Null: its default."
    )
    device: str | None = _key(None, TEXT.or_none(), "The connector's network devices. Null: it chooses.")
    senders: int = _key(16, integer(at_least=1), "Transfers that a prefill replica has under way at once.", "transfers")
    transfer_timeout_s: float = _key(
        5.0, seconds(), "A KV cache that has not come by then is given up; see `on_failure`.", "seconds"
    )
    hold_s: float = _key(
        120.0, seconds(), "A prefill replica keeps a KV cache that nobody fetches for so long.", "seconds"
    )
    on_failure: str = _key(
        "recompute",
        one_of("recompute", "fail"),
        "What a decode replica does without the KV cache: `recompute` computes it, `fail` ends the request.",
    )
    prefill: ReplicasConfig = field(default_factory=ReplicasConfig)
    decode: ReplicasConfig = field(default_factory=ReplicasConfig)


@dataclass(frozen=True, kw_only=True)
class StageConfig(ReplicasConfig):
    """What a user may say about one stage."""

    sampling: Mapping[str, Any] = _map(MAPPING, "Default `SamplingParams` fields of this stage.")
    prefill_decode: PrefillDecode | None = None
    """Below `stages.<name>.prefill_decode`; None: every replica does both."""


@dataclass(frozen=True, kw_only=True)
class OmniConfig:
    """The whole configuration."""

    pipeline: str | None = _key(
        None, TEXT.or_none(), "Name of the pipeline the file is for. Null: taken from the model's architecture."
    )
    async_chunk: bool = _key(
        True, BOOLEAN, "Hand results to the next stage while they are made; false: once, when a stage has finished."
    )
    chunks: Mapping[str, Any] = _map(
        CHUNKS,
        "Sizes of successive chunks by hand-over, the last one repeats; `all`: everything once it is complete. "
        "`adaptive: false`: only the sizes count, not what the client still has to play.",
    )
    chunk_deadline_s: float = _key(
        30.0,
        seconds(),
        "A request fails if a stage that has begun it gets nothing more from the stage before for so long.",
        "seconds",
    )
    connectors: Mapping[str, Any] = _map(
        CONNECTORS,
        "How tensors travel from stage to stage, by hand-over. What is not said: `shared_memory`, or `tcp` with a "
        "`master_address`.",
    )
    stream_idle_s: float = _key(
        120.0,
        seconds(),
        "A streaming stage forgets a stream for which nothing has come for so long; more than `chunk_deadline_s`.",
        "seconds",
    )
    api_servers: int | str = _key(
        1,
        integer(at_least=1).or_word(AUTO),
        "How many API server processes are started. `auto`: one for every two cores, at most 8.",
        "processes",
    )
    startup_timeout_s: float = _key(
        1800.0,
        seconds(),
        "A replica must be ready within this time of its own start: download, loading, compilation. Replicas that "
        "share a CUDA device start one after the other, each with its own time.",
        "seconds",
    )
    shutdown_timeout_s: float = _key(5.0, seconds(), "A process that has not ended by then is killed.", "seconds")
    request_deadline_s: float | None = _key(
        None, seconds().or_none(), "A request that takes longer fails. Null: no limit.", "seconds"
    )
    lb_policy: str = _key(
        LB_POLICIES[0],
        LB_POLICY,
        "Which replica a new request goes to: `least-queue-length`, `round-robin` or `random`.",
    )
    heartbeat_timeout_s: float = _key(
        30.0,
        seconds(at_least=SHORTEST_HEARTBEAT_TIMEOUT_S),
        "A replica that is silent for so long is down; at least 1.",
        "seconds",
    )
    drain_timeout_s: float = _key(
        30.0, seconds(), "A replica that leaves is given so long to finish its requests.", "seconds"
    )
    replica_wait_s: float = _key(
        60.0,
        seconds(),
        "Requests wait so long for a replica of a stage that has none, while one may come back; "
        "then they fail with 503.",
        "seconds",
    )
    restart_limit: int = _key(
        5,
        integer(at_least=0),
        "How often a replica that ended is started again within `restart_window_s`; 0: never.",
        "times",
    )
    restart_window_s: float = _key(600.0, seconds(), "The time in which `restart_limit` counts.", "seconds")
    restart_backoff_s: float = _key(
        1.0,
        seconds(),
        "Pause before a replica is started again; doubles with every failure in the window, up to 30 s.",
        "seconds",
    )
    master_address: str | None = _key(
        None,
        TEXT.or_none(),
        "Address of the head, where replicas from other hosts register. Null: the head's loopback only.",
    )
    master_port: int | None = _key(
        None, PORT.or_none(), "TCP port of the head, where replicas from other hosts register. Null: none can."
    )
    cluster_secret_file: str | None = _key(
        None,
        TEXT.or_none(),
        "File with a secret of at least 16 bytes, without which nobody can join, report, read or send anything. Null: "
        "with a `master_address` one is made for this user and used again, see operations.md.",
    )
    no_cluster_secret: bool = _key(
        False, BOOLEAN, "Do without a secret: whoever reaches the ports can join, read and send. Said on all hosts."
    )
    max_body_mib: int = _key(
        256, integer(at_least=1), "A request whose body is longer is refused with status 413.", "MiB"
    )
    api_key_routes: str = _key(
        ALL_ROUTES,
        one_of(ALL_ROUTES, VLLM_ROUTES),
        "Which routes need the API key, if there is one. `all`: all but `/health`, `/ping` and `/metrics`. `vllm`: "
        "those below `/v1`, `/v2`, `/inference` and `/cohere`, which is vLLM's own rule.",
    )
    allow_private_media: str | None = _key(
        None,
        HOSTS.or_none(),
        "Hosts and networks that are not public and that `image_url`, `audio_url` and `video_url` may nevertheless be "
        "fetched from, comma-separated, or `all`. Null: none.",
    )
    max_body_values: int = _key(
        100_000,
        integer(at_least=1),
        "A JSON body with more objects, arrays, texts, numbers and keys is refused with status 413.",
        "values",
    )
    max_body_ids: int = _key(
        2_000_000,
        integer(at_least=1),
        "A JSON body with more numbers in fields that may be token ids (`prompt`, `input`, `tokens`, ...) is refused "
        "with status 413.",
        "numbers",
    )
    max_body_depth: int = _key(
        100,
        integer(at_least=1),
        "A JSON body with more objects and arrays inside of one another is refused with status 413.",
        "levels",
    )
    max_field_elements: Mapping[str, int] = _counts(
        {"messages": 5_000, "messages.*": 5_000, "messages[]": 1_024, "input": 3_000, "tools": 1_000, "items": 1_024},
        "A body with more objects, arrays and texts directly in one of these fields is refused with status 413. "
        "`messages.*`: content parts, tool calls and what is in them, of all messages together; `messages[]`: arrays "
        "in `messages`, which are conversations. What a file says replaces all of it.",
        "elements",
    )
    max_field_values: Mapping[str, int] = _counts(
        {"structured_outputs": 10_000, "response_format": 10_000},
        "A body with more values and keys anywhere in one of these fields is refused with status 413.",
        "values",
    )
    max_field_bytes: Mapping[str, int] = _counts(
        {
            "*": 1 << 20,
            "tools": 8 << 20,
            "response_format": 256 << 10,
            "structured_outputs": 64 << 10,
            "model": 4096,
            "request_id": 4096,
        },
        "A body in which one of these fields is longer is refused with status 413. `*`: every other field but "
        "those that hold prompts and media.",
        "bytes",
    )
    max_image_pixels: int = _key(
        64_000_000,
        integer(at_least=1),
        "An image with more pixels is refused before it is decoded. The environment variable VLLM_MAX_IMAGE_PIXELS "
        "comes before it.",
        "pixels",
    )
    max_request_pixels: int = _key(
        256_000_000,
        integer(at_least=1),
        "A request whose images have more pixels together is refused; decoded they take three bytes each.",
        "pixels",
    )
    log_dir: str | None = _key(
        None,
        TEXT.or_none(),
        "Directory for one log file a replica, which stay there. Null: a temporary one, removed at the end.",
    )
    verbose: bool = _key(False, BOOLEAN, "Replicas log to the terminal instead of to files.")
    kept_traces: int = _key(
        64,
        integer(at_least=1),
        "How many requests with `return_stage_metrics` each API server keeps for `/v1/omni/trace`.",
        "requests",
    )
    stages: Mapping[str, StageConfig] = field(default_factory=dict)
    """Settings by stage name; a stage that is not named has the defaults of `StageConfig`."""

    def stage(self, name: str) -> StageConfig:
        """The settings of a stage, or the defaults if nothing was said about it."""
        return self.stages.get(name, StageConfig())

    def policy(self, name: str) -> str:
        """The load balancing policy of a stage: its own, or the one of all."""
        return self.stage(name).lb_policy or self.lb_policy


Schema: TypeAlias = type[OmniConfig] | type[ReplicasConfig] | type[PrefillDecode]


def keys(schema: Schema) -> dict[str, Key]:
    """The keys with plain values that a file may hold at that level; the levels below are not among them."""
    return {f.name: f.metadata["key"] for f in fields(schema) if "key" in f.metadata}

"""The classes of the configuration: each key of a stage config with its type, default, unit and description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict

from vllm_omni_ext.config.checks import (
    AUTO,
    KV_CONNECTORS,
    LB_POLICIES,
    Boolean,
    Chunks,
    Connectors,
    Count,
    Devices,
    Environment,
    HeartbeatSeconds,
    Host,
    Hosts,
    KvConnector,
    LbPolicy,
    Names,
    NoKey,
    NullIsEmpty,
    Port,
    PortRange,
    Positive,
    PositiveOrAuto,
    Seconds,
    SecondsOrAuto,
    Settings,
    Text,
)
from vllm_omni_ext.ports import port_range

STREAM_IDLE_TIMEOUT_S = "stream_idle_timeout_s"
"""Key of vLLM's `additional_config` that passes `Timeouts.stream_idle_timeout_s` to engines.

Only stages that keep state between the requests of one stream (`StageSpec.accepts` is "parts") use it.
"""

STREAM_IDLE_TIMEOUTS = 4
"""Factor of `chunk_timeout_s` in `Timeouts.stream_idle_timeout_s`. It is above 1, so that a request without input has
failed before a stage drops the state of the request's stream."""

MAX_MEDIA_TOKENS = "max_media_tokens"
"""Key of vLLM's `additional_config` that passes `Limits.max_media_tokens` to engines of the stage that writes text."""

OUTGOING, INCOMING = "outgoing", "incoming"
"""Keys of vLLM's `additional_config`: connector settings of the edges over which a stage sends and receives tensors.

The value of each key is a mapping from the edge's name to the settings.
"""


ALL_ROUTES, VLLM_ROUTES = "all", "vllm"
"""Values of `api_key_routes`: the API key is needed for nearly all routes, or for those of vLLM's own rule."""


@dataclass(frozen=True)
class Key:
    """Unit, description and command line flag of one configuration key.

    Attributes:
        unit: unit of the value, such as "seconds"; "" if it has none.
        text: description for the documentation and the flag's help.
        metavar: placeholder for the value in the help of the key's flag; "": the flag has no value. None: no flag.
    """

    unit: str
    text: str
    metavar: str | None = None


def _key(default: Any, text: str, unit: str = "", flag: str | None = None) -> Any:
    return field(default=default, metadata={"key": Key(unit, text, flag)})


def _map(text: str) -> Any:
    return field(default_factory=dict, metadata={"key": Key("", text)})


_FORBID = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """Settings shared by all replicas of a stage, or by the prefill or the decode replicas of a stage that has both."""

    __pydantic_config__ = _FORBID
    replicas: Count = _key(
        1, "How many replicas of the stage are started here. 0: all of them come from other hosts.", "processes"
    )
    devices: Devices | None = _key(
        None,
        "CUDA devices: all of them in order (replicas x devices a replica), or those of the first replica, after which "
        "the others follow: 0,1 makes 0,1 and 2,3. Null: placed automatically.",
        "device numbers",
    )
    lb_policy: LbPolicy | None = _key(
        None, "Which replica of the stage a new request goes to. Null: the top level's `lb_policy`."
    )
    kv_cache_bytes: Positive | None = _key(
        None,
        "KV cache of each replica. Null: the rest of its part of a CUDA device; on CPU the pipeline's default.",
        "bytes",
    )
    cpu_threads: Positive | None = _key(
        None, "OpenMP threads of each replica on a CPU machine. Null: cores divided by all replicas.", "threads"
    )
    engine: Settings = _map("vLLM `EngineArgs` fields of this stage, by their Python name.")
    env: Environment = _map("Environment variables of the stage's replica processes.")
    engine_overrides: Annotated[Settings, NoKey] = field(default_factory=dict)
    """`EngineArgs` fields from `--stage-overrides`, which override stock flags. A file cannot contain this key."""


@dataclass(frozen=True, kw_only=True)
class PrefillDecode:
    """Settings of a stage with separate prefill and decode replicas."""

    __pydantic_config__ = _FORBID
    connector: KvConnector = _key(KV_CONNECTORS[0], "Connector that transfers the KV cache: `mooncake` or `nixl`.")
    protocol: Text | None = _key(None, "The connector's transport: `tcp` or `rdma` for mooncake. Null: its default.")
    device: Text | None = _key(None, "The connector's network devices. Null: it chooses.")
    transfer_workers: Positive = _key(16, "Transfers that a prefill replica has under way at once.", "transfers")
    transfer_timeout_s: Seconds = _key(
        5.0, "A decode replica waits this long for the KV cache of a prompt; see `on_failure`.", "seconds"
    )
    kv_retention_s: Seconds = _key(
        120.0, "A prefill replica keeps a KV cache that no decode replica fetches for this time.", "seconds"
    )
    on_failure: Literal["recompute", "fail"] = _key(
        "recompute",
        "After a failed transfer, the decode replica computes the prompt (`recompute`) or ends the request (`fail`).",
    )
    prefill: Annotated[ReplicasConfig, NullIsEmpty] = field(default_factory=ReplicasConfig)
    decode: Annotated[ReplicasConfig, NullIsEmpty] = field(default_factory=ReplicasConfig)


@dataclass(frozen=True, kw_only=True)
class StageConfig(ReplicasConfig):
    """Settings of one stage: the key `stages.<name>`."""

    __pydantic_config__ = _FORBID
    params: Settings = _map(
        "Default parameters of this stage: fields of `SamplingParams`, or of the type that the stage declares. For the "
        "frontend, endpoints other than chat read those that a generation config has, without `max_tokens`. A server "
        "refuses `logprobs`, `structured_outputs` and fields that a chat request does not have."
    )
    step_timeout_s: Seconds | None = _key(
        60.0,
        "A replica whose engine loop has work and does not turn within this time is unresponsive: a step, or anything "
        "between steps, does not return. After 1.5 times this time it is killed and started again. The first step "
        "may take ten times as long, a call such as a LoRA load or a sleep ten minutes. Null: no limit.",
        "seconds",
    )
    min_replicas: Positive = _key(
        1,
        "How many replicas of the stage, of this host and others, must be up before `/health` and its probes return "
        "status 200. Requests are served while one is up.",
        "replicas",
    )
    prefill_decode: Annotated[PrefillDecode | None, NullIsEmpty] = None
    """Settings of separate prefill and decode replicas; None: every replica of the stage does both."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the size of one request, and of realtime sessions."""

    __pydantic_config__ = _FORBID
    max_body_mib: Positive = _key(256, "A request with a longer body is refused with status 413.", "MiB", "MIB")
    max_body_values: Positive = _key(
        200_000,
        "A JSON body with more opening brackets, texts and commas is refused with status 413. Those in `messages` and "
        "`tools`, and those of grammars, count several times; a comma in a list of token ids counts a fifth.",
        "values",
    )
    max_request_pixels: Positive = _key(
        256_000_000,
        "A request whose images have more pixels together is refused; decoded they take three bytes each.",
        "pixels",
    )
    max_media_tokens: Positive | None = _key(
        None,
        "A request with an image, a video or a sound of more tokens in its prompt is refused with status 400. The plan "
        "reserves the encoder's memory for so many, and an engine encodes no more of them in one step. Null: as many "
        "as a sequence may have.",
        "tokens",
        "N",
    )
    realtime_sessions: Positive = _key(
        100, "Open sessions of `/v1/realtime` in an API server; more are refused with status 503.", "sessions", "N"
    )
    realtime_length_s: Seconds = _key(3600.0, "A session of `/v1/realtime` ends after this time.", "seconds", "SECONDS")
    realtime_idle_s: Seconds = _key(
        900.0, "A session of `/v1/realtime` without an event of its client for this time ends.", "seconds", "SECONDS"
    )
    realtime_events: Positive = _key(
        200,
        "Events that a client of `/v1/realtime` may send, and ten times as many at once; the session of one that sends "
        "more ends. An event of more than 64 KiB or 1000 values counts as several.",
        "events a second",
        "N",
    )
    realtime_buffer_mib: Positive = _key(
        16, "Sound in a session's input buffer; more is refused. 1 MiB has 22 s of PCM.", "MiB", "MIB"
    )
    realtime_sound_mib: Positive = _key(
        64, "Sound in the items of a session's conversation; at least `realtime_buffer_mib`.", "MiB", "MIB"
    )
    max_batch_files_mib: Positive = _key(
        16_384,
        "A file or a batch is refused with status 413 if the files in `batch_dir` have more bytes together.",
        "MiB",
        "MIB",
    )


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of requests and replicas."""

    __pydantic_config__ = _FORBID
    request_timeout_s: SecondsOrAuto | None = _key(
        AUTO,
        "A request that takes longer fails. `auto`: 3600 in a server, no limit with `LLM(...)`, where requests may "
        "wait for hours for their turn. Null: no limit.",
        "seconds",
        "SECONDS",
    )
    chunk_timeout_s: Seconds = _key(
        30.0,
        "A request fails if a stage that has begun it gets no input from the stage before within this time. A "
        "streaming stage drops a stream without input after four times this time.",
        "seconds",
    )
    startup_timeout_s: Seconds = _key(
        1800.0,
        "A replica must be ready within this time of its own start: download, loading, compilation. Replicas that "
        "share a CUDA device start one after the other, each with its own time.",
        "seconds",
        "SECONDS",
    )
    drain_timeout_s: Seconds = _key(
        30.0, "Time that a replica that leaves has to finish its requests.", "seconds", "SECONDS"
    )
    replica_wait_timeout_s: Seconds = _key(
        60.0,
        "Requests of a stage without a replica wait this long while one may come back; then they fail with status 503.",
        "seconds",
        "SECONDS",
    )

    @property
    def request_limit_s(self) -> float | None:
        """Return the seconds that a request may take; None: no limit.

        `auto` gives None as well. In a server, `cli.settings.from_cli` has replaced `auto` with a number.
        """
        limit = self.request_timeout_s
        return None if isinstance(limit, str) else limit

    @property
    def stream_idle_timeout_s(self) -> float:
        """Return the seconds without input after which a stage drops the state that it keeps for a stream.

        Used by stages that accept separate requests of one stream (`StageSpec.accepts` is "parts").
        """
        return STREAM_IDLE_TIMEOUTS * self.chunk_timeout_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Settings for replicas that join from other hosts and processes."""

    __pydantic_config__ = _FORBID
    master_address: Host | None = _key(
        None,
        "Address of the head, where replicas from other hosts register. Null: the head's loopback only.",
        flag="HOST",
    )
    master_port: Port | None = _key(
        None, "TCP port of the head, where replicas from other hosts register. Null: none can.", flag="PORT"
    )
    port_range: PortRange | None = _key(
        None,
        "TCP ports on which this host's processes listen for other hosts, such as `20000-20099`; `master_port` and the "
        "two after it are further ones. Null: ports that the system chooses.",
        flag="FIRST-LAST",
    )
    cluster_auth: Boolean = _key(
        True,
        "Whether joining, requests and outputs need the cluster secret; the same on all hosts. False: any process that "
        "reaches the ports can join, read and send.",
        flag="",
    )
    cluster_secret_file: Text | None = _key(
        None,
        "File with the cluster secret, at least 16 bytes. Null: with a `master_address` the file of this user, which "
        "the first start creates, see operations.md.",
        flag="FILE",
    )
    heartbeat_timeout_s: HeartbeatSeconds = _key(
        30.0, "A replica without a heartbeat for this time is down; at least 1.", "seconds", "SECONDS"
    )

    @property
    def ports(self) -> tuple[int, int] | None:
        """Return the first and the last port of `port_range`; None if it is not set."""
        return None if self.port_range is None else port_range(self.port_range)


@dataclass(frozen=True, kw_only=True)
class OmniConfig:
    """The configuration of a deployment: all keys of a stage config."""

    __pydantic_config__ = _FORBID
    pipeline: Text | None = _key(None, "Which pipeline of the model's family is run. Null: the first one.")
    async_chunk: Boolean = _key(
        True, "Hand results to the next stage while they are made; false: once, when a stage has finished.", flag=""
    )
    chunks: Chunks = _map(
        "Sizes of successive chunks by hand-over, the last one repeats; `all`: everything once it is complete. "
        "`adaptive: false`: only the sizes count, not the sound that the client has left to play."
    )
    connectors: Connectors = _map(
        "Connector that transfers tensors from stage to stage, by hand-over. Default: `shared_memory`, or `tcp` with a "
        "`master_address`."
    )
    api_servers: PositiveOrAuto = _key(
        1, "How many API server processes are started. `auto`: one for every two cores, at most 8.", "processes"
    )
    lb_policy: LbPolicy = _key(
        LB_POLICIES[0],
        "Which replica a new request goes to: `least-queue-length`, `round-robin` or `random`.",
        flag="NAME",
    )
    restart_limit: Count = _key(
        5,
        "How often a replica that ended is started again within ten minutes; 0: never. The pause before a restart is "
        "1 s and doubles with every further one, up to 30 s.",
        "times",
        "N",
    )
    api_key_routes: Literal["all", "vllm"] = _key(
        ALL_ROUTES,
        "Which routes need the API key, if there is one. `all`: all but `/health`, its probes, `/ping` and `/metrics`. "
        "`vllm`: those below `/v1`, `/v2`, `/inference` and `/cohere`, which is vLLM's own rule.",
        flag="all|vllm",
    )
    playground: Boolean = _key(
        False,
        "Whether the server has `/playground`, a page to try the model in a browser. The page itself needs no API key.",
        flag="",
    )
    allow_private_media: Hosts | None = _key(
        None,
        "Hosts and networks that are not public and that `image_url`, `audio_url` and `video_url` may nevertheless be "
        "fetched from, comma-separated, or `all`. Null: none.",
        flag="HOST,NETWORK",
    )
    default_modalities: Names | None = _key(
        None,
        "Modalities of a chat request that names none, comma-separated, such as `text`. Null: the model's own default.",
        flag="NAME,NAME",
    )
    streaming_input: Boolean = _key(
        True,
        "Compute the sound of a realtime session while its user speaks, in whole blocks of the model's sound encoder, "
        "if it has blocks and the frontend has a prefix cache. False: all of it when the turn ends.",
        flag="",
    )
    batch_dir: Text | None = _key(
        None,
        "Directory for the files of `/v1/files` and `/v1/batches`, which continue after a restart; one deployment at a "
        "time may use it. Every stage then schedules by priority. Null: there are no such routes.",
        flag="DIR",
    )
    log_dir: Text | None = _key(
        None,
        "Directory for one log file a replica, which stay there. Null: a temporary one, kept if a replica has ended.",
        flag="DIR",
    )
    verbose: Boolean = _key(False, "Replicas log to the terminal instead of to files.", flag="")
    limits: Annotated[Limits, NullIsEmpty] = Limits()
    timeouts: Annotated[Timeouts, NullIsEmpty] = Timeouts()
    cluster: Annotated[Cluster, NullIsEmpty] = Cluster()
    stages: Annotated[Mapping[str, Annotated[StageConfig, NullIsEmpty]], NullIsEmpty] = field(default_factory=dict)
    """Settings by stage name; a missing stage has the defaults of `StageConfig`."""

    def stage(self, name: str) -> StageConfig:
        """Return the settings of a stage, or the defaults if the configuration has none for it."""
        return self.stages.get(name, StageConfig())

    def policy(self, name: str) -> str:
        """Return the load balancing policy of a stage: its own, or the top level's."""
        return self.stage(name).lb_policy or self.lb_policy


Schema: TypeAlias = (
    type[OmniConfig] | type[Limits] | type[Timeouts] | type[Cluster] | type[ReplicasConfig] | type[PrefillDecode]
)

GROUPS: Mapping[str, Schema] = {"limits": Limits, "timeouts": Timeouts, "cluster": Cluster}
"""Classes of the groups of keys below the top level, by the name of the group."""


def keys(schema: Schema) -> dict[str, Key]:
    """Return the keys of one class of the configuration by name, without keys whose value is a nested class."""
    return {f.name: f.metadata["key"] for f in fields(schema) if "key" in f.metadata}


SETTINGS: Mapping[str, tuple[str, Key]] = {
    name: (group, key) for group, schema in {"": OmniConfig, **GROUPS}.items() for name, key in keys(schema).items()
}
"""All keys outside of `stages`, by name: (name of the group, `Key`). The group "" is the top level of the stage config.

No two groups share a key name.
"""


def setting_path(name: str) -> str:
    """Return the path of a key of `SETTINGS` in the configuration, e.g. `limits.max_body_mib`."""
    group, _ = SETTINGS[name]
    return f"{group}.{name}" if group else name

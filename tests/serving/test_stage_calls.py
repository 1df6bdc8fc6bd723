"""The operator endpoints of vLLM's server, with `targets`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.dev.cache.api_router import attach_router as attach_cache
from vllm.entrypoints.serve.dev.rpc.api_router import attach_router as attach_rpc
from vllm.entrypoints.serve.dev.sleep.api_router import attach_router as attach_sleep
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.profile.api_router import router as profile

from tests.runtime.test_calls import Bench, targeted
from tests.serving.conftest import asking
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.runtime.control import NOTHING_CHANGED, Change, OperatorState
from vllm_omni_ext.serving.adapters import Adapters, router
from vllm_omni_ext.serving.operator_calls import add_routes
from vllm_omni_ext.serving.responses import omni_error_handler

JSON = {"content-type": "application/json"}
ADAPTER = {"lora_name": "tune", "lora_path": "/adapters/tune"}


class Rig:
    """The endpoints over replicas with prepared answers."""

    def __init__(self, client_index: int = 0, client_count: int = 1, state: OperatorState = NOTHING_CHANGED) -> None:
        self.bench = Bench()
        self.omni = targeted(self.bench)
        self.omni._follow_operators(state, SimpleNamespace(slept=lambda replicas, asleep: None))
        self.omni.engine_core.__dict__.update(
            {f"{name}_async": self._everywhere(name) for name in ("sleep", "wake_up", "is_sleeping", "collective_rpc")},
            add_lora_async=self._everywhere("add_lora"),
            profile_async=self._everywhere("profile"),
        )
        self.omni.model_config = SimpleNamespace(model="tiny", max_model_len=8)
        self.omni.vllm_config = SimpleNamespace(lora_config=SimpleNamespace())
        self.omni.input_processor = None
        self.omni.connections = SimpleNamespace(client_count=client_count, client_index=client_index)
        self.app = FastAPI()
        self.models: Any = OpenAIServingModels(self.omni, [SimpleNamespace(name="tiny", model_path="tiny")])
        self.app.state.engine_client = self.omni
        self.app.state.openai_serving_models = self.models
        self.app.state.omni_adapters = Adapters(self.omni, self.models)
        for attach in (attach_cache, attach_rpc, attach_sleep):
            attach(self.app)
        self.app.include_router(profile)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            self.app.add_api_route(path, lambda: "stock", methods=["POST"])
        add_routes(self.app, router)
        self.app.state.args = SimpleNamespace(log_error_stack=False)
        init_exception_handler(self.app)
        self.app.add_exception_handler(OmniError, omni_error_handler)

    def _everywhere(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            return await self.bench.calls.everywhere(f"{name}_async", *args)

        return call

    async def ask(self, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        async with asking(self.app) as client:
            answer = await client.request(method, path, **fields)
        return answer.status_code, answer.json() if answer.content[:1] in (b"{", b"[") else answer.text

    async def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        return await self.ask("POST", path, **fields)


CALLS = [
    ("POST", "/sleep?level=2&mode=keep", "sleep", (2, "keep")),
    ("GET", "/is_sleeping?", "is_sleeping", ()),
    ("POST", "/release_kv_cache_memory?", "release_kv_cache_memory", ()),
    ("POST", "/reset_prefix_cache?reset_external=true", "reset_prefix_cache", (False, True)),
    ("POST", "/reset_mm_cache?", "reset_mm_cache", ()),
    ("POST", "/reset_encoder_cache?", "reset_encoder_cache", ()),
    ("POST", "/start_profile?", "profile", (True, "talker-1", None, None)),
    ("POST", "/stop_profile?", "profile", (False,)),
]


@pytest.mark.parametrize(("method", "path", "utility", "args"), CALLS, ids=[row[1] for row in CALLS])
async def test_a_call_reaches_only_its_targets(method: str, path: str, utility: str, args: tuple[Any, ...]) -> None:
    rig = Rig()
    rig.bench.answer(utility, True)
    rig.bench.answer(utility, ValueError("broken"), "code2wav/0")
    assert await rig.ask(method, f"{path}&targets=talker/1") == (200, {"replicas": {"talker/1": {"value": True}}})
    [(replica, name, passed)] = rig.bench.log
    assert (replica, name, passed[: len(args)]) == ("talker/1", utility, args)
    assert not any(passed[len(args) :])  # vLLM 0.33: further arguments of a profile
    status, body = await rig.ask(method, f"{path}&targets=code2wav&targets=talker/1")
    assert (status, body) == (500, {"replicas": {"talker/1": {"value": True}, "code2wav/0": {"error": "broken"}}})
    rig.bench.log.clear()
    status, body = await rig.ask(method, f"{path}&targets=talker/1&targets=vocoder")
    assert status == 404 and body["error"]["param"] == "targets" and "'vocoder'" in body["error"]["message"]
    for name in ("talker/0", "talker/1"):
        rig.bench.lose(name)
    status, body = await rig.ask(method, f"{path}&targets=talker")
    assert status == 503 and "'talker' has no live replica" in body["error"]["message"]
    assert rig.bench.log == []


async def test_vllms_handler_answers_without_targets() -> None:
    rig = Rig()
    rig.bench.answer("wake_up", True)
    rig.bench.answer("is_sleeping", False)
    assert await rig.post("/sleep?level=1") == (200, {"status": "sleeping", "level": 1})
    assert await rig.post("/wake_up?tags=weights") == (200, {"status": "awake", "tags": ["weights"]})
    assert await rig.ask("GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert rig.bench.called() == [str(n) for n in rig.bench.replicas] * 3
    rig.bench.answer("collective_rpc", [1])
    assert await rig.post("/collective_rpc", json={"method": "f"}) == (200, {"results": ["1", "1"]})


async def test_a_remote_call_takes_targets_in_the_query_or_the_body() -> None:
    rig = Rig()
    rig.bench.answer("collective_rpc", [{"a": {1}}])
    report = {"replicas": {"talker/0": {"value": [{"a": [1]}]}}}
    body = {"method": "f", "args": ["x"], "kwargs": {"y": "z"}}
    assert await rig.post("/collective_rpc?targets=talker/0", json=body) == (200, report)
    assert await rig.post("/collective_rpc", json=body | {"targets": ["talker/0"]}) == (200, report)
    assert rig.bench.log == [("talker/0", "collective_rpc", ("f", None, ("x",), {"y": "z"}))] * 2


@pytest.mark.parametrize(
    ("path", "body", "status", "parameter"),
    [
        ("?targets=talker", {"targets": ["talker"]}, 400, "targets"),
        ("", {"targets": [1]}, 400, "targets"),
        ("", {"targets": {"talker": 1}}, 400, "targets"),
        ("", {"targets": []}, 404, "targets"),
        ("", {"targets": ["\ud800"]}, 404, "targets"),
        *(
            ("?targets=talker", wrong, 400, next(iter(wrong)))
            for wrong in ({"method": 5}, {"args": "x"}, {"kwargs": []}, {"timeout": "1"}, {"timeout": float("nan")})
        ),
        ("?targets=talker", {"timeout": 0}, 400, "timeout"),
    ],
    ids=str,
)
async def test_a_wrong_remote_call_reaches_no_replica(path: str, body: Any, status: int, parameter: str) -> None:
    rig, content = Rig(), json.dumps({"method": "f"} | body).encode()
    got, answer = await rig.post(f"/collective_rpc{path}", content=content, headers=JSON)
    assert (got, answer["error"]["param"]) == (status, parameter)
    assert rig.bench.log == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"targets": ["talker"]}', b"\xff"])
async def test_a_remote_call_without_a_method_is_refused(body: bytes) -> None:
    rig = Rig()
    assert (await rig.post("/collective_rpc", content=body, headers=JSON))[0] == 400
    assert rig.bench.log == []


async def test_an_adapter_is_loaded_only_in_its_targets() -> None:
    rig = Rig()
    rig.bench.answer("add_lora", True)
    status, body = await rig.post("/v1/load_lora_adapter", json=ADAPTER | {"targets": ["thinker/1"]})
    assert (status, body) == (200, {"replicas": {"thinker/1": {"value": True}}})
    [(_, _, (adapter,))] = rig.bench.log
    assert (adapter.lora_name, adapter.lora_path) == ("tune", "/adapters/tune")
    assert rig.models.lora_requests["tune"].lora_int_id == adapter.lora_int_id
    status, body = await rig.post("/v1/load_lora_adapter?targets=thinker", json=ADAPTER)
    assert status == 400 and "already been" in str(body)
    rig.bench.log.clear()
    rig.bench.answer("remove_lora", True)
    for target, status in [("thinker/1", 200), ("thinker", 200), ("thinker", 404)]:
        assert (await rig.post(f"/v1/unload_lora_adapter?targets={target}", json=ADAPTER))[0] == status
    assert rig.bench.log == [(f"thinker/{i}", "remove_lora", (adapter.lora_int_id,)) for i in (1, 0, 1)]
    assert not rig.models.lora_requests


async def test_an_adapter_is_refused_without_lora() -> None:
    rig = Rig()
    rig.omni.vllm_config.lora_config = None
    status, body = await rig.post("/v1/load_lora_adapter", json=ADAPTER)
    assert (status, body["error"]["param"]) == (400, "lora_name")
    assert body["error"]["message"] == "lora_name: this server has no LoRA; start it with --enable-lora"
    assert rig.bench.log == []


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
@pytest.mark.parametrize(
    ("targets", "status", "said"),
    [
        (["talker"], 400, "cannot use adapters of 'talker'"),
        (["thinker", "talker"], 400, "cannot use adapters of 'talker'"),
        (["vocoder"], 404, "vocoder"),
        (5, 400, "targets"),
    ],
    ids=str,
)
async def test_an_adapter_of_a_later_stage_is_refused(path: str, targets: Any, status: int, said: str) -> None:
    rig = Rig()
    rig.models.lora_requests["tune"] = SimpleNamespace(lora_int_id=1)
    got, answer = await rig.post(path, json=ADAPTER | {"load_inplace": True, "targets": targets})
    assert (got, answer["error"]["param"]) == (status, "targets") and said in answer["error"]["message"]
    assert rig.bench.log == []


async def test_all_api_servers_share_the_names_of_adapters() -> None:
    state, shared = NOTHING_CHANGED, []
    rigs = [Rig(client, 2) for client in (0, 1)]

    async def to_all(change: Change) -> None:
        shared.append(change)
        for rig in rigs:
            rig.omni.apply(change)

    for rig in rigs:
        rig.omni.submit = to_all
        rig.bench.answer("add_lora", True)
    assert (await rigs[0].post("/v1/load_lora_adapter", json=ADAPTER))[0] == 200
    assert (await rigs[1].post("/v1/load_lora_adapter", json=ADAPTER | {"lora_name": "more"}))[0] == 200
    known = [
        {name: (each.lora_int_id, each.lora_path) for name, each in rig.models.lora_requests.items()} for rig in rigs
    ]
    assert known[0] == known[1] and known[0].keys() == {"tune", "more"}
    assert known[0]["tune"][0] % 2 == 0 and known[0]["more"][0] % 2 == 1, "no two servers give the same number"
    assert (await rigs[1].post("/v1/load_lora_adapter", json=ADAPTER))[0] == 400, "it is loaded already"
    assert (await rigs[1].post("/v1/unload_lora_adapter", json=ADAPTER))[0] == 200
    assert [set(rig.models.lora_requests) for rig in rigs] == [{"more"}, {"more"}]
    for change in shared:
        state = state.after(change)
    again = Rig(0, 2, state)
    assert set(again.models.lora_requests) == {"more"}, "an API server that is started again has the name"
    again.bench.answer("add_lora", True)
    assert (await again.post("/v1/load_lora_adapter", json=ADAPTER))[0] == 200
    assert again.models.lora_requests["tune"].lora_int_id > max(number for number, _ in known[0].values())


async def test_an_adapter_that_one_replica_cannot_load_is_not_shared_and_has_no_name() -> None:
    rig, shared = Rig(), []
    rig.omni.submit = shared.append
    rig.bench.answer("add_lora", True)
    rig.bench.answer("add_lora", ValueError("LoRA is not enabled"), "thinker/1")
    assert (await rig.post("/v1/load_lora_adapter", json=ADAPTER))[0] == 500
    status, body = await rig.post("/v1/load_lora_adapter?targets=thinker", json=ADAPTER)
    assert status == 500
    assert body["replicas"] == {"thinker/0": {"value": True}, "thinker/1": {"error": "LoRA is not enabled"}}
    assert (await rig.post("/v1/unload_lora_adapter", json=ADAPTER))[0] == 404
    assert shared == [] and not rig.models.lora_requests


def test_endpoints_that_vllm_does_not_offer_are_not_added() -> None:
    app = FastAPI()
    attach_sleep(app)
    before = [route.path for route in app.routes]
    add_routes(app, router)
    assert sorted(route.path for route in app.routes) == sorted(before)
    assert len(app.openapi()["paths"]) == len({"/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory"})


UNKNOWN: list[tuple[str, str, Any, str, str]] = [
    ("POST", "/sleep?target=talker", None, "target", "did you mean 'targets'? query parameters: level, mode, targets"),
    ("POST", "/sleep", {"targets": ["talker"]}, "targets", "fields of the body: none"),
    ("POST", "/sleep", ["talker"], "body", "is not read here; query parameters: level, mode, targets"),
    ("GET", "/is_sleeping?Targets=talker", None, "Targets", "did you mean 'targets'?"),
    ("POST", "/start_profile", {"target": "talker"}, "target", "fields of the body: delay_iterations, max_iterations"),
    ("POST", "/collective_rpc", {"method": "f", "target": "x"}, "target", "did you mean 'targets'? fields of the body"),
    ("POST", "/collective_rpc?method=f", {"method": "f"}, "method", "query parameters: targets"),
    ("POST", "/v1/unload_lora_adapter?target=x", ADAPTER, "target", "did you mean 'targets'?"),
]


@pytest.mark.parametrize(("method", "path", "body", "name", "advice"), UNKNOWN)
async def test_an_unknown_parameter_is_refused(method: str, path: str, body: Any, name: str, advice: str) -> None:
    rig = Rig()
    status, answer = await rig.ask(method, path, **({} if body is None else {"json": body}))
    assert (status, answer["error"]["param"]) == (400, name), answer
    assert advice in answer["error"]["message"]
    assert rig.bench.log == []

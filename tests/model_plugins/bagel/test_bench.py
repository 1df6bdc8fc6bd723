"""`benchmarks/bagel_steps.py`: it compares the same work, and says what it measured."""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser


def test_one_round(benchmark: Callable[[str], ModuleType], checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark("bagel_steps")
    rows: list[int] = []
    step = Denoiser.step

    def counted(self: Denoiser, running: list) -> object:
        rows.append(len(running))
        return step(self, running)

    monkeypatch.setattr(Denoiser, "step", counted)
    options = {"height": 32, "width": 48, "steps": 2, "rounds": 1, "device": "cpu", "dtype": "float32"}
    args = argparse.Namespace(model=checkpoint, released_shape=False, wide=False, **options)
    made = bench.made(args, "unused")
    assert made.packed(4) > 0
    assert made.one_by_one(4) > 0
    assert rows == [4, 4] + [1] * 8
    ways, parts = bench.measure(made)
    assert {len(values) for values in (*ways.values(), *parts.values())} == {1}
    lines = bench.table(ways, parts, args.steps)
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["1", "2", "4"]
    assert [line.split("|")[1].strip() for line in lines[-3:]] == ["prefill", "steps", "VAE"]


def test_the_table(benchmark: Callable[[str], ModuleType]) -> None:
    bench = benchmark("bagel_steps")
    ways = {
        f"{name} {count}": [seconds]
        for name, seconds in (("packed", 1.0), ("one by one", 2.0), ("plain loop", 4.0))
        for count in (1, 2, 4)
    }
    lines = bench.table(ways, {"prefill": [0.001, 0.003, 0.002]}, 10)
    assert [cell.strip() for cell in lines[0].split("|")[2:5]] == [
        f"{name}, image-steps/s" for name in ("packed", "one by one", "plain loop")
    ]
    assert lines[4] == "| 4 | 40.0 (40.0 to 40.0) | 20.0 (20.0 to 20.0) | 10.0 (10.0 to 10.0) | 0.50 | 0.25 |"
    assert lines[-1] == "| prefill | 2.0 (1.0 to 3.0) |"


async def test_pictures_from_a_server(benchmark: Callable[[str], ModuleType]) -> None:
    """The time by part is that of the measured pictures alone; the rest of what the client waits is transfer."""
    bench, asked, bodies = benchmark("bagel_http"), benchmark("bagel_http").Asked(48, 64, 3), []

    async def answer(request: web.Request) -> web.Response:
        edit = request.path.endswith("edits")
        bodies.append({**(await request.post())} if edit else await request.json())
        return web.json_response({"data": [{"b64_json": base64.b64encode(bench.png(48, 64)).decode()}]})

    async def metrics(request: web.Request) -> web.Response:
        name, seconds = "vllm_omni_ext:stage_part_seconds", len(bodies) * 1e-6
        lines = [f'{name}_sum{{model_name="m",part="{part}",stage="dit"}} {seconds}' for part in ("steps", "vae")]
        return web.Response(text="\n".join([f"# TYPE {name} histogram", *lines, f'{name}_count{{part="vae"}} 7.0']))

    app = web.Application()
    app.router.add_post("/v1/images/generations", answer)
    app.router.add_post("/v1/images/edits", answer)
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, bench.Client(str(server.make_url("/v1")), asked) as client:
        image = await bench.measured(client, asked, "image", 2, 3)
        edit = await bench.measured(client, asked, "edit", 1, 2)
    assert len(bodies) == 2 * 4 + 3
    assert bodies[0] | {"seed": 0} == bodies[1] | {"seed": 0}
    assert (bodies[0]["size"], bodies[0]["num_inference_steps"]) == ("64x48", 3)
    assert "size" not in bodies[-1] and bodies[-1]["image"].content_type == "image/png"
    assert len({("image" in body, int(body["seed"])) for body in bodies}) == len(bodies), "every picture is another one"
    for found in (image, edit):
        assert found.parts["steps"] == found.parts["vae"] == pytest.approx(1e-6)
        assert found.parts["queue"] == 0
        assert found.parts["transfer"] > 0 and 0 < found.image_min_s <= found.image_s <= found.image_max_s
    lines = list(bench.table([image, edit]))
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["image", "edit"]


def test_an_answer_that_is_not_the_picture_asked_for(benchmark: Callable[[str], ModuleType]) -> None:
    bench = benchmark("bagel_http")
    other = json.dumps({"data": [{"b64_json": base64.b64encode(bench.png(32, 64)).decode()}]})
    with pytest.raises(RuntimeError, match="64x32 pixels instead of 64x48"):
        bench.check(other, bench.Asked(48, 64, 3))

"""Writes the top of `docs/gpu.md` from the results of `make gpu`: device, versions, figures, failures, goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts import FAILED, LATE, OK, Part, Results

END = "<!-- The report ends here; what follows is written by hand. -->"
NOT_YET = "# On a GPU: nothing has run on a GPU yet"
TAIL_LINES = 12
PICTURE_PARTS = ("queue", "prefill", "steps", "vae", "transfer")

LEVELS = {
    "levels-few": "",
    "levels-many": "",
    "levels-talkers": ", two talkers",
    "levels-http": " over HTTP",
    "levels-http-2": " over HTTP, 2 API servers",
    "levels-http-4": " over HTTP, 4 API servers",
}
"""Parts that run `speech_levels.py` -> remark for their rows in the table."""

GIB = 1 << 30

MET, MISSED, UNKNOWN = "met", "**missed**", "not measured"


@dataclass(frozen=True)
class Goal:
    """A figure with a required limit.

    Attributes:
        figure: reads the figure from the results; raises LookupError if it is missing.
        limit: the largest allowed figure, or the smallest if `at_least`.
        devices: fewest CUDA devices for which the goal is set.
    """

    what: str
    figure: Callable[[Results], float]
    limit: float
    at_least: bool = False
    devices: int = 1

    def verdict(self, results: Results, devices: int) -> tuple[str, str]:
        """Return (figure, verdict) as text; the verdict is e.g. `MET`, and the figure "" if there is none."""
        if devices < self.devices:
            return "", f"needs {self.devices} devices"
        try:
            figure = self.figure(results)
        except LookupError:
            return "", UNKNOWN
        good = figure >= self.limit if self.at_least else figure <= self.limit
        return f"{figure:.3g}", MET if good else MISSED


def level(name: str, at_once: int) -> Callable[[Results], float]:
    """Return a function that reads a figure of `speech_levels.py` (without HTTP) with `at_once` concurrent answers.

    Args:
        name: key of the figure.
    """

    def figure(results: Results) -> float:
        for part in ("levels-few", "levels-many"):
            for found in _figures(results, part) or ():
                if found["concurrency"] == at_once:
                    return float(found[name])
        raise LookupError(name)

    return figure


def milliseconds(figure: Callable[[Results], float]) -> Callable[[Results], float]:
    """Return a function that reads a figure with `figure`, and converts it from seconds to milliseconds."""
    return lambda results: 1e3 * figure(results)


def text_ratio(results: Results) -> float:
    """Return our text-only answers a second divided by those of stock vLLM."""
    for part in ("text", "text-fp8"):
        if (found := _figures(results, part)) is not None:
            return float(found["ratio"])
    raise LookupError("text")


def picture(task: str) -> Callable[[Results], float]:
    """Return a function that reads the seconds of one image or edit (`task`) of 512x512 over HTTP, one at a time."""

    def figure(results: Results) -> float:
        for found in _figures(results, "pictures-512") or ():
            if (found["task"], found["at_once"]) == (task, 1):
                return float(found["image_s"])
        raise LookupError(task)

    return figure


def packed(results: Results) -> float:
    """Return the time of denoise steps of four images in one batch divided by that of single images, 512x512."""
    for found in _figures(results, "picture-steps-512") or ():
        if found["images"] == 4:
            return float(found["packed_beside"]["one by one"])
    raise LookupError("picture-steps-512")


GOALS = (
    Goal("first sound, 1 answer, ms", milliseconds(level("first_p50_s", 1)), 100),
    Goal("first sound, 32 answers at once, ms", milliseconds(level("first_p50_s", 32)), 400),
    Goal("real-time factor, 1 answer", level("real_time_factor_p50", 1), 0.11),
    Goal("spoken answers a second, 32 at once", level("requests_per_s", 32), 7.5, at_least=True, devices=2),
    Goal("text-only answers a second, ours / stock vLLM", text_ratio, 0.98, at_least=True),
    Goal("an image of 512x512, 20 steps, s", picture("image"), 2.2),
    Goal("an edit of 512x512, 20 steps, s", picture("edit"), 2.6),
    Goal("denoise steps of 4 images of 512x512, packed / one by one", packed, 0.6),
)


def _figures(results: Results, part: str) -> Any:
    result = results.parts.get(part)
    return result.figures if result is not None and result.state == OK else None


def render(results: Results, known: Sequence[Part], *, devices: int, released: bool = True) -> str:
    """Return the generated top of docs/gpu.md, with the line `END`.

    Args:
        known: all parts, in their order.
        devices: CUDA devices of the machine; 0: it has none, and no result is about a GPU.
        released: whether the results are of the released shape; the goals are only for it.
    """
    if not results.parts or not devices:
        lines = [
            NOT_YET,
            "",
            "`make gpu` on a machine with a CUDA device runs all that is below and writes its results here.",
        ]
        if not results.parts:
            return "\n".join([*lines, "", *_goals(results, 0), "", END, ""])
    else:
        failed = sum(r.state in (FAILED, LATE) for r in results.parts.values())
        lines = [f"# On a GPU: {len(results.parts)} of {len(known)} parts have run, {failed} failed"]
    lines += [
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in results.machine.items()),
        "",
    ]
    lines += [
        *_goals(results, devices if released else 0),
        "",
        *_parts(results, known),
        "",
        *_levels(results),
        *_starts(results),
        *_api_servers(results),
        *_videos(results),
        *_pictures(results),
        *_steps(results),
    ]
    return "\n".join([*lines, *_failures(results), END, ""])


def _goals(results: Results, devices: int) -> Iterator[str]:
    yield from ("| goal (released shape, random weights) | wanted | measured | |", "|---|---|---|---|")
    for goal in GOALS:
        measured, verdict = goal.verdict(results, devices) if devices else ("", UNKNOWN)
        yield f"| {goal.what} | {'at least' if goal.at_least else 'at most'} {goal.limit:g} | {measured} | {verdict} |"


def _parts(results: Results, known: Sequence[Part]) -> Iterator[str]:
    yield from ("| part | what | result | seconds | commit |", "|---|---|---|---|---|")
    for part in known:
        if (result := results.parts.get(part.name)) is not None:
            why = f": {_last(result.said)}" if result.state not in (OK, FAILED, LATE) else ""
            yield f"| `{part.name}` | {part.what} | {result.state}{why} | {result.seconds:.0f} | {result.commit} |"
    if missing := [f"`{part.name}`" for part in known if part.name not in results.parts]:
        yield f"\nNot run: {', '.join(missing)}. `python benchmarks/gpu.py --list` describes them."


def _levels(results: Results) -> Iterator[str]:
    rows = [(part, found) for part in LEVELS for found in _figures(results, part) or ()]
    if not rows:
        return
    yield (
        "| spoken answers at once | first sound p50 / longest, ms | answer p50, s | real-time factor | answers/s "
        "| answers/s and device |"
    )
    yield "|---|---|---|---|---|---|"
    for part, f in rows:
        where = LEVELS[part]
        yield (
            f"| {f['concurrency']}{where} | {f['first_p50_s'] * 1e3:.0f} / {f['first_max_s'] * 1e3:.0f} "
            f"| {f['whole_p50_s']:.2f} | {f['real_time_factor_p50']:.3f} | {f['requests_per_s']:.2f} "
            f"| {f['requests_per_s'] / (f['devices'] or 1):.2f} |"
        )
    yield ""


def _starts(results: Results) -> Iterator[str]:
    for part in results.parts:
        found = _figures(results, part)
        if isinstance(found, dict) and "ready_s" in found:
            first, *_, tenth = (1e3 * seconds for seconds in found["first_sound_s"])
            ready = f"ready after {found['ready_s']:.0f} s"
            yield f"- `{part}`: {ready}; first sound {first:.0f} ms, of the tenth answer {tenth:.0f} ms."
        elif isinstance(found, dict) and "ratio" in found:
            ours, stock = found["ours_per_s"], found["stock_per_s"]
            beside = f"stock vLLM {stock:.2f}, ratio {found['ratio']:.3f}"
            yield f"- `{part}`: {ours:.2f} text-only answers a second, {beside}."
    yield ""


def _api_servers(results: Results) -> Iterator[str]:
    rows = [
        found for part in results.parts if part.startswith("api-servers") for found in _figures(results, part) or ()
    ]
    if not rows:
        return
    yield "| text, device time simulated | API servers | requests/s | first token mean / p99, ms | CPU ms a request |"
    yield "|---|---|---|---|---|"
    for f in rows:
        cpu = ", ".join(f"{kind} {ms:.1f}" for kind, ms in f["cpu_ms_per_request"].items())
        first = f"{f['ttft_mean_s'] * 1e3:.0f} / {f['ttft_p99_s'] * 1e3:.0f}"
        yield f"| {f['who']} | {f['servers']} | {f['requests_per_s']:.1f} | {first} | {cpu} |"
    yield ""


def _videos(results: Results) -> Iterator[str]:
    rows = _figures(results, "video")
    if not rows:
        return
    yield "| frames | prompt tokens | answer, s | thinker, GiB | device 0, GiB |"
    yield "|---|---|---|---|---|"
    for f in rows:
        thinker = sum(size for name, size in f["replicas_bytes"].items() if name.startswith("thinker")) / GIB
        device = f["devices_bytes"][0] / GIB if f["devices_bytes"] else 0.0
        answer = f"{f['prompt_tokens']} | {f['answer_s']:.1f}" if f["frames"] else " | "
        yield f"| {f['frames']} | {answer} | {thinker:.1f} | {device:.1f} |"
    yield ""


def _pictures(results: Results) -> Iterator[str]:
    rows = [found for part in ("pictures-512", "pictures-1024") for found in _figures(results, part) or ()]
    if not rows:
        return
    yield f"| pictures over HTTP | at once | s/picture | answer p50, s | {', '.join(PICTURE_PARTS)}, s |"
    yield "|---|---|---|---|---|"
    for f in rows:
        parts = ", ".join(f"{f['parts'].get(name, 0.0):.3f}" for name in PICTURE_PARTS)
        what = f"{f['task']}, {f['width']}x{f['height']}, {f['steps']} steps"
        yield f"| {what} | {f['at_once']} | {f['image_s']:.3f} | {f['answer_p50_s']:.3f} | {parts} |"
    yield ""


def _steps(results: Results) -> Iterator[str]:
    rows = [found for part in ("picture-steps-512", "picture-steps-1024") for found in _figures(results, part) or ()]
    if not rows:
        return
    yield "| denoise steps, no server | images | packed, image-steps/s | one by one | packed / one by one, time |"
    yield "|---|---|---|---|---|"
    for f in rows:
        rates = (f["images"] * f["steps"] / f["seconds"][name] for name in ("packed", "one by one"))
        ratio = f"{f['packed_beside']['one by one']:.2f}"
        yield f"| {f['width']}x{f['height']} | {f['images']} | {' | '.join(f'{r:.1f}' for r in rates)} | {ratio} |"
    yield ""


def _failures(results: Results) -> Iterator[str]:
    for name, result in results.parts.items():
        if result.state in (FAILED, LATE):
            yield from (f"`{name}`, {result.state}; the end of what it printed:", "", "```")
            yield from (*result.said.splitlines()[-TAIL_LINES:], "```", "")


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def write(page: Path, top: str) -> None:
    """Replace the text of the page above the line `END`; the text below that line stays.

    Args:
        top: the text of `render`.
    """
    text = page.read_text() if page.exists() else END
    below = text.partition(END)[2].lstrip("\n")
    page.write_text(f"{top}\n{below}" if below else top)

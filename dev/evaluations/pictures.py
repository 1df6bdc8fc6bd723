"""Draws the pictures of GenEval and GEdit-Bench with a server, into the folders that their own scorers read.

    python -m dev.evaluations.pictures geneval evaluation_metadata.jsonl OUT --url http://127.0.0.1:8000/v1
    python -m dev.evaluations.pictures gedit FOLDER OUT --url http://127.0.0.1:8000/v1

Existing pictures are not drawn again, so an interrupted run can continue.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES = 4
"""Pictures of each prompt in GenEval."""


@dataclass(frozen=True)
class Picture:
    """A picture to draw.

    Attributes:
        file: the PNG file to write.
        source: the picture to edit, as PNG; None: a picture from text.
    """

    file: Path
    prompt: str
    seed: int
    source: bytes | None = None


def geneval(listing: Path, out: Path) -> list[Picture]:
    """Return the pictures to draw for GenEval (github.com/djghosh13/geneval): OUT/00000/samples/0000.png, ...

    Writes OUT/00000/metadata.jsonl, which GenEval's scorer reads, for each prompt.

    Args:
        listing: GenEval's file `prompts/evaluation_metadata.jsonl`, one prompt a line.
        out: the folder OUT.
    """
    wanted = []
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines()):
        folder = out / f"{number:05}"
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        (folder / "metadata.jsonl").write_text(line)
        prompt = json.loads(line)["prompt"]
        wanted += [Picture(folder / "samples" / f"{seed:04}.png", prompt, seed) for seed in range(SAMPLES)]
    return wanted


def gedit(folder: Path, out: Path) -> list[Picture]:
    """Return the pictures to draw for GEdit-Bench (huggingface.co/datasets/stepfun-ai/GEdit-Bench).

    Their files are OUT/TASK/LANGUAGE/KEY.png. Needs `pip install pyarrow`.

    Args:
        folder: contains the data set's `*.parquet` files.
        out: the folder OUT.
    """
    import pyarrow.parquet

    tables = map(pyarrow.parquet.read_table, sorted(folder.rglob("*.parquet")))
    return gedit_rows((row for table in tables for row in table.to_pylist()), out)


def gedit_rows(rows: Iterable[Mapping[str, Any]], out: Path) -> list[Picture]:
    """Return the pictures to draw for rows of GEdit-Bench; see `gedit`."""
    wanted = []
    for row in rows:
        file = out / row["task_type"] / row["instruction_language"] / f"{row['key']}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        wanted.append(Picture(file, row["instruction"], 0, row["input_image"]["bytes"]))
    return wanted


async def draw(wanted: Iterable[Picture], url: str, model: str, at_once: int) -> int:
    """Draw the pictures whose files do not exist; return their number.

    Args:
        url: base URL of the server's OpenAI API.
        at_once: number of concurrent requests.
    """
    import openai

    missing, turn = [each for each in wanted if not each.file.exists()], asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def one(picture: Picture) -> None:
            async with turn:
                options: dict[str, Any] = {"prompt": picture.prompt, "extra_body": {"seed": picture.seed}}
                if picture.source is None:
                    reply = await client.images.generate(model=model, **options)
                else:
                    source = io.BytesIO(picture.source)
                    source.name = "source.png"
                    reply = await client.images.edit(model=model, image=source, **options)
            part = picture.file.with_suffix(".part")  # an interrupted run leaves no incomplete picture
            part.write_bytes(base64.b64decode(reply.data[0].b64_json))
            part.rename(picture.file)

        await asyncio.gather(*map(one, missing))
    return len(missing)


MAKERS = {"geneval": geneval, "gedit": gedit}


def main(argv: list[str] | None = None) -> None:
    """Draw the pictures of a benchmark."""
    parser = argparse.ArgumentParser(prog="python -m dev.evaluations.pictures", description=main.__doc__)
    parser.add_argument("benchmark", choices=MAKERS)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="ByteDance-Seed/BAGEL-7B-MoT")
    parser.add_argument("--at-once", type=int, default=4, metavar="N")
    args = parser.parse_args(argv)
    wanted = MAKERS[args.benchmark](args.source, args.out)
    drawn = asyncio.run(draw(wanted, args.url, args.model, args.at_once))
    print(f"{drawn} pictures were drawn, {len(wanted) - drawn} were there")


if __name__ == "__main__":
    main()

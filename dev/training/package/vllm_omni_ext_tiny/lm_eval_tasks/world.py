"""Data of the tasks in this folder: rows from JSON lines next to the tasks, so that nothing is downloaded."""

import base64
import io
import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from PIL import Image

FOLDER = Path(__file__).parent


def rows(file: str, **_: Any) -> DatasetDict:
    """Return the rows of a JSON-lines file in this folder as the split `test`; lm-eval calls this for a task."""
    lines = (FOLDER / file).read_text().splitlines()
    return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})


def pictures(doc: dict[str, Any]) -> list[Image.Image]:
    """Return a list with the picture of a row; lm-eval passes it to the model."""
    return [Image.open(io.BytesIO(base64.b64decode(doc["image"]))).convert("RGB")]

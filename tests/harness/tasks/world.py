"""Data of the tasks in this folder: rows from JSON lines next to the tasks, so that nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict


def rows(file: str, **_: Any) -> DatasetDict:
    """Return the rows of a file as the split `test`."""
    lines = Path(__file__).with_name(file).read_text().splitlines()
    return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})

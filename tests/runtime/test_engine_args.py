"""What vLLM does not accept of a stage's engine arguments is one line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, field_validator
from vllm.usage.usage_lib import UsageContext

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.runtime.launch.engine_args import engine_config


class Checked(BaseModel):
    """Refuses every value, as a config of vLLM does."""

    field: int

    @field_validator("field")
    @classmethod
    def _never(cls, value: int) -> int:
        raise ValueError("Not on this\nplatform.")


class Args:
    """Engine arguments of which vLLM makes no config."""

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def create_engine_config(self, usage: Any) -> Any:
        if self._plain:
            raise ValueError("Not on this\nplatform.")
        return Checked(field=1)


@pytest.mark.parametrize("plain", [True, False])
def test_what_vllm_refuses_names_the_stage(plain: bool) -> None:
    args: Any = Args(plain)
    with pytest.raises(ConfigError) as caught:
        engine_config("ar", args, UsageContext.LLM_CLASS)
    assert str(caught.value) == "stage 'ar': vLLM refuses its engine arguments: Not on this platform."

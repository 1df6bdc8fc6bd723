"""The output of one layer next to the result of a step: compiled in, or for one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode

from vllm_omni_ext.engine import exported_layer
from vllm_omni_ext.engine.exported_layer import ExportedLayer, without_cuda_graphs

LAYER = 24
HIDDEN = [[LAYER, LAYER]] * 3


class Model(torch.nn.Module):
    """A model with vLLM's interface for EAGLE-3; its output for layer n is n."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleNamespace(aux_hidden_state_layers=())
        self.pictures_forgotten = 0
        self.skipped: list[bool] = []

    def get_language_model(self) -> Any:
        return self

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.aux_hidden_state_layers = tuple(sorted(set(layers)))

    def _clear_deepstack_input_embeds(self, tokens: int) -> None:
        self.pictures_forgotten += 1

    def forward(self) -> list[torch.Tensor]:
        return [torch.full((3, 2), float(layer)) for layer in self.model.aux_hidden_state_layers]


class State(NamedTuple):
    aux_hidden_states: list[torch.Tensor] | None
    other: str


class Runner:
    """Runs a step as both of vLLM's runners do."""

    def __init__(self, drafted: tuple[int, ...] = ()) -> None:
        self.model = Model()
        self.use_aux_hidden_state_outputs = bool(drafted)
        self.model.set_aux_hidden_state_layers(drafted)
        self.cudagraph_manager = SimpleNamespace(_graphs_captured=True)
        self.execute_model_state: Any = None

    def get_model(self) -> Model:
        return self.model

    def step(self) -> None:
        outputs = self.model()
        assert bool(outputs) == self.use_aux_hidden_state_outputs
        self.execute_model_state = State(outputs or None, "kept")

    def drafters(self) -> list[float]:
        """Return the outputs of the last step that a drafter receives."""
        return [float(found[0, 0]) for found in self.execute_model_state.aux_hidden_states or []]


def config(compiled: bool = False, captured: bool = False, drafter: object = None) -> Any:
    mode = CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE
    graphs = CUDAGraphMode.FULL if captured else CUDAGraphMode.NONE
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=graphs), speculative_config=drafter
    )


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The forward context of all steps."""
    found = SimpleNamespace(skip_compiled=False)
    monkeypatch.setattr(exported_layer, "get_forward_context", lambda: found)
    return found


def exported(runner: Runner, layer: ExportedLayer) -> list[list[float]]:
    """Return the layer's output of an exporting step."""
    with layer.exposed():
        runner.step()
    return layer.take().tolist()


@pytest.mark.parametrize(("compiled", "captured"), [(True, False), (False, True), (True, True)])
def test_every_compiled_step_has_the_layer(compiled: bool, captured: bool, context: SimpleNamespace) -> None:
    runner = Runner()
    layer = ExportedLayer(runner, config(compiled, captured), LAYER)
    for _ in range(2):
        runner.step()
        assert runner.drafters() == [LAYER] and runner.cudagraph_manager._graphs_captured
    assert exported(runner, layer) == HIDDEN and runner.execute_model_state.other == "kept"
    assert runner.model.pictures_forgotten == 1, "a graph would add the features of a picture to the next step"
    assert not context.skip_compiled and runner.cudagraph_manager._graphs_captured


def test_without_compilation_only_steps_that_export_have_the_layer() -> None:
    runner = Runner()
    layer = ExportedLayer(runner, config(), LAYER)
    for _ in range(2):
        runner.step()
        assert runner.execute_model_state.aux_hidden_states is None
        assert exported(runner, layer) == HIDDEN and runner.drafters() == []


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("drafted", [(), (2, 30), (LAYER, 30), (LAYER,)], ids=str)
def test_a_drafter_receives_its_layers(drafted: tuple[int, ...], compiled: bool, context: SimpleNamespace) -> None:
    """Such a step runs uncompiled and outside CUDA graphs, whose outputs are the drafter's."""
    runner = Runner(drafted)
    layer = ExportedLayer(runner, config(compiled, drafter="eagle3"), LAYER)
    for _ in range(2):
        runner.step()
        assert runner.drafters() == [*drafted] and not context.skip_compiled
        assert exported(runner, layer) == HIDDEN and runner.drafters() == [*drafted]
        assert context.skip_compiled and runner.cudagraph_manager._graphs_captured
        context.skip_compiled = False


def test_a_failed_step_restores_the_layers_of_the_drafter() -> None:
    runner = Runner((2, 30))
    layer = ExportedLayer(runner, config(drafter="eagle3"), LAYER)
    with pytest.raises(ZeroDivisionError), layer.exposed():
        assert runner.model.model.aux_hidden_state_layers == (2, LAYER, 30)
        raise ZeroDivisionError
    runner.step()
    assert runner.drafters() == [2, 30]


@pytest.mark.parametrize("v2", [True, False])
def test_cuda_graphs_are_off_inside_the_block_only(v2: bool) -> None:
    flag = "_graphs_captured" if v2 else "keys_initialized"
    dispatcher = SimpleNamespace(**{flag: True})
    runner = SimpleNamespace(**{"cudagraph_manager" if v2 else "cudagraph_dispatcher": dispatcher})
    with pytest.raises(ZeroDivisionError), without_cuda_graphs(runner):
        assert vars(dispatcher) == {flag: False}
        raise ZeroDivisionError
    assert vars(dispatcher) == {flag: True}

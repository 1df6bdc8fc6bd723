"""Token2wav over parts of utterances equals Transformers' over whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.examples import examples
from tests.support.qwen2_5_oracle import Oracle
from tests.support.tape import TapeRecorder
from vllm_omni_ext.model_plugins.qwen2_5_omni import dit, dit_graphs
from vllm_omni_ext.model_plugins.qwen2_5_omni.dit import MOST_TIMES, StreamingDiT
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import Token2WavParams, Utterance
from vllm_omni_ext.model_plugins.qwen2_5_omni.solver import Solver
from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny.qwen2_5_omni import write_qwen2_5_omni
from vllm_omni_ext.model_plugins.qwen2_5_omni.token2wav import Token2Wav
from vllm_omni_ext.model_plugins.qwen2_5_omni.token2wav_model import Qwen2_5OmniToken2Wav
from vllm_omni_ext.model_plugins.qwen_omni.part_streams import Answer
from vllm_omni_ext.wire.envelope import StageError
from vllm_omni_ext.wire.stage_input import PartHeader

TOLERANCE = 1e-4
CODES = 64
MOST_RECORDED = 8
PER_BLOCK = 4
DELAY = 36
"""Blocks that must follow: four evaluations of nine steps, one layer that looks ahead."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(write_qwen2_5_omni(tmp_path_factory.mktemp("model") / "model"))


def made_of(oracle: Oracle) -> Token2Wav:
    made = Token2Wav(oracle.model.config.token2wav_config)
    made.load_state_dict(oracle.model.token2wav.state_dict())
    made.set_speakers(oracle.model.speaker_map)
    return made


@pytest.fixture(scope="module")
def token2wav(oracle: Oracle) -> Token2Wav:
    return made_of(oracle)


@pytest.fixture(scope="module")
def recorded(oracle: Oracle) -> tuple[Token2Wav, TapeRecorder]:
    """Of some passes; larger ones have no graph."""
    made, tape = made_of(oracle), TapeRecorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dit_graphs, "MOST_BLOCKS", MOST_RECORDED)
        made.record(tape)
    return made, tape


def codes_of(count: int, seed: int) -> Tensor:
    return torch.randint(CODES, (count,), generator=torch.Generator().manual_seed(seed))


def parts(codes: Tensor, rng: np.random.Generator, most: int) -> Iterator[tuple[Tensor, bool]]:
    start = 0
    while start < len(codes):
        stop = min(len(codes), start + int(rng.integers(0, most + 1)))
        yield codes[start:stop], stop == len(codes)
        start = stop


def decoded(token2wav: Token2Wav, codes: Tensor, *, part: int, solver: Solver) -> list[Tensor]:
    state = token2wav.new_state("Ethan", 5, solver)
    pieces = codes.split(part)
    return [token2wav.decode([piece], [state], [i == len(pieces) - 1])[0] for i, piece in enumerate(pieces)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 4, 37])
def test_short_utterances_in_one_part(count: int, token2wav: Token2Wav, oracle: Oracle) -> None:
    codes = codes_of(count, seed=count)
    (wave,) = decoded(token2wav, codes, part=count, solver=Solver())
    whole = oracle.spoken(codes.tolist(), "Ethan", 5)
    assert wave.shape == whole.shape and np.abs(wave.numpy() - whole).max() <= TOLERANCE


@pytest.mark.slow
def test_sound_is_final_as_soon_as_the_equation_allows(token2wav: Token2Wav, oracle: Oracle) -> None:
    codes = codes_of(4 * PER_BLOCK * (DELAY // 4 + 4), seed=1)
    waves = decoded(token2wav, codes, part=PER_BLOCK, solver=Solver())
    begins = next(i for i, wave in enumerate(waves) if len(wave))
    frames = (begins + 1 - DELAY) * 2 * PER_BLOCK  # final mel frames, two a code
    assert frames - 2 * PER_BLOCK <= token2wav.margin < frames
    whole = oracle.spoken(codes.tolist(), "Ethan", 5)
    assert np.abs(torch.cat(waves).numpy() - whole).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [Solver(num_steps=4), Solver(num_steps=3, guidance_scale=0.0), Solver(num_steps=5, sway_coefficient=0.4)]
)
def test_options_of_transformers(solver: Solver, token2wav: Token2Wav, oracle: Oracle) -> None:
    codes, speaker = codes_of(120, seed=2), oracle.model.speaker_map["Ethan"]
    torch.manual_seed(5)
    with torch.no_grad():
        whole = oracle.model.token2wav(
            codes[None],
            conditioning=speaker["cond"],
            reference_mel=speaker["ref_mel"],
            num_steps=solver.num_steps,
            guidance_scale=solver.guidance_scale,
            sway_coefficient=solver.sway_coefficient,
        )
    waves = decoded(token2wav, codes, part=17, solver=solver)
    assert sum(bool(len(wave)) for wave in waves) > 1
    assert (torch.cat(waves) - whole).abs().max() <= TOLERANCE


@pytest.mark.slow
def test_times_of_any_number_of_requests_keep_a_bounded_memory(token2wav: Token2Wav) -> None:
    dit = token2wav._dit
    solvers = [Solver(num_steps=steps, guidance_scale=scale) for steps in (2, 3, 4) for scale in (0.0, 0.1, 0.2)]
    found = [dit._modulated(solver) for solver in solvers]
    assert len({id(each) for each in found}) == 3, "the guidance has no influence"
    assert len(dit._modulations) == MOST_TIMES
    assert dit._modulated(solvers[-1]) is found[-1]
    for before, after in zip(found[0], dit._modulated(solvers[0]), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(3)))
def test_several_utterances_in_one_call_equal_each_alone(seed: int, token2wav: Token2Wav, oracle: Oracle) -> None:
    """Of different lengths, voices, seeds and options, in parts of any size, also without codes."""
    check_several(seed, token2wav, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(2)))
def test_recorded_passes_equal_transformers(
    seed: int, recorded: tuple[Token2Wav, TapeRecorder], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    token2wav, tape = recorded
    through, computed, before = StreamingDiT._through, [], tape.repeated

    def noted(self: StreamingDiT, run: range, hidden: Tensor, *others: Any) -> Tensor:
        computed.append(len(hidden))
        return through(self, run, hidden, *others)

    monkeypatch.setattr(StreamingDiT, "_through", noted)
    check_several(seed, token2wav, oracle)
    assert tape.repeated > before
    assert computed and min(computed) > MOST_RECORDED


def check_several(seed: int, token2wav: Token2Wav, oracle: Oracle) -> None:
    rng = np.random.default_rng(seed)
    utterances = [
        (codes_of(int(rng.integers(1, 200)), seed=int(rng.integers(100))), voice, int(rng.integers(1 << 40)))
        for voice in ("Ethan", "Chelsie", "Ethan")
    ]
    states = [token2wav.new_state(voice, noise, Solver()) for _, voice, noise in utterances]
    waiting = [parts(codes, rng, most=60) for codes, _, _ in utterances]
    waves: list[list[Tensor]] = [[] for _ in utterances]
    open_ones = set(range(len(utterances)))
    while open_ones:
        some = [i for i in open_ones if rng.random() < 0.7]
        step = [(i, *next(waiting[i])) for i in some]
        made = token2wav.decode([p for _, p, _ in step], [states[i] for i, *_ in step], [last for *_, last in step])
        for (i, _, last), wave in zip(step, made, strict=True):
            waves[i].append(wave)
            open_ones -= {i} if last else set()
    for (codes, voice, noise), pieces in zip(utterances, waves, strict=True):
        whole = oracle.spoken(codes.tolist(), voice, noise)
        assert np.abs(torch.cat(pieces).numpy() - whole).max() <= TOLERANCE


def test_the_model_names_what_it_cannot_decode(oracle: Oracle, tmp_path: Path) -> None:
    torch.save(oracle.model.speaker_map, tmp_path / "spk_dict.pt")
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=oracle.model.config.token2wav_config, model=str(tmp_path), revision=None
        ),
        additional_config={},
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )
    model = Qwen2_5OmniToken2Wav(vllm_config=config)  # type: ignore[arg-type]
    tensors = {f"token2wav.{name}": tensor for name, tensor in oracle.model.token2wav.state_dict().items()}
    assert model.load_weights(tensors.items()) == {name for name, _ in model.named_parameters()}
    streams = model.pooler.streams

    def answer(utterance: Utterance | None, stream: str = "") -> Answer:
        payload = None if utterance is None else ["utterance", utterance.speaker, _plain(utterance.params)]
        header = PartHeader(stream=stream, part=0, last=not stream, payload=payload)
        return streams.decode([header], [codes_of(4, seed=0)[:, None]])[0]

    spoken = answer(Utterance(speaker="Ethan", params=Token2WavParams(seed=5)))
    assert isinstance(spoken, Tensor) and len(spoken) == 4 * 2 * 24
    assert answer(Utterance(speaker="Nobody", params=Token2WavParams(seed=5))) == StageError(
        "the checkpoint has no speaker 'Nobody'"
    )
    assert answer(Utterance(speaker="Ethan", params=Token2WavParams())) == StageError(
        "payload: the first part of an utterance has a seed"
    )
    unread = answer(None)
    assert isinstance(unread, StageError) and unread.reason.startswith("payload: ")
    assert len(streams) == 0
    utterances = [Utterance(speaker="Ethan", params=Token2WavParams(seed=5, num_steps=n)) for n in (20, 19, 10, 10, 10)]
    answers = [answer(each, stream=str(number)) for number, each in enumerate(utterances)]
    assert [each for each in answers if isinstance(each, StageError)] == [
        StageError("num_steps: 19 need memory that other answers have; use 10, or wait", retry=True)
    ]
    assert len(streams) == 4, "any number with the default is accepted"


def _plain(params: Token2WavParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


@pytest.mark.slow
def test_a_pass_has_the_planned_size_if_all_utterances_end_at_once(
    token2wav: Token2Wav, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end, an utterance has a waiting block for each evaluation. One part may be longer than a pass."""
    most = 50
    monkeypatch.setattr(dit, "FRAMES_IN_FLIGHT", most * token2wav._dit.block)
    projected, sizes = StreamingDiT._projected, []

    def noted(self: StreamingDiT, layer: Any, modulation: Tensor, hidden: Tensor, *others: Any) -> Any:
        sizes.append(len(hidden))
        return projected(self, layer, modulation, hidden, *others)

    monkeypatch.setattr(StreamingDiT, "_projected", noted)
    lengths = [42 * PER_BLOCK, 42 * PER_BLOCK + 1, 5, 1, 90 * PER_BLOCK + 2]
    solvers = [Solver(), Solver(), Solver(), Solver(num_steps=3), Solver()]
    states = [token2wav.new_state("Ethan", 5, solver) for solver in solvers]
    codes = [codes_of(length, seed=length) for length in lengths]
    first = token2wav.decode([each[:-1] for each in codes], states, [False] * len(codes))
    rest = token2wav.decode([each[-1:] for each in codes], states, [True] * len(codes))
    assert 40 <= max(sizes) <= most
    for i in (0, 1, 2, 4):
        whole = oracle.spoken(codes[i].tolist(), "Ethan", 5)
        assert np.abs(torch.cat([first[i], rest[i]]).numpy() - whole).max() <= TOLERANCE
    assert len(rest[3]) == 2 * 24


def test_all_tensors_of_an_utterance_move(token2wav: Token2Wav) -> None:
    def tensors(value: Any) -> Iterator[Tensor]:
        """Yield the tensors of a state but those that utterances share, and the codes on the host."""
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for each in value:
                yield from tensors(each)
        elif hasattr(value, "__dict__") and not isinstance(value, torch.Generator):
            for name, each in vars(value).items():
                if name not in ("voice", "solver", "codes"):
                    yield from tensors(list(each.values()) if isinstance(each, dict) else each)

    state = token2wav.new_state("Ethan", 5, Solver(num_steps=3))
    token2wav.decode([codes_of(11 * PER_BLOCK + 1, seed=1)], [state], [False])
    assert len(list(tensors(state.dit))) > 8 * 4
    state.dit.move(torch.device("meta"))
    assert {each.device.type for each in tensors(state.dit)} == {"meta"}

"""Training examples of the talker, whose inputs are the same as at inference.

`model_plugins.qwen3_omni.prompt` makes the prompts, for requests to a server too. `input_rows` computes the same input
embeddings as `model_plugins.qwen3_omni.talker_feed.TalkerInputProvider`, but with gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dev.training.tiny_omni.turns import IGNORE, Preprocessors, Turn, tensors
from dev.training.tiny_omni.vocoder import Lexicon, phrase
from dev.training.tiny_omni.words import chat, ids_of, world_vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import MULTIMODAL, NO_CODEC, SpecialIds, find_parts, talker_prompt


@dataclass(frozen=True)
class Asked:
    """A request with a spoken reply.

    Attributes:
        reply: the reply's words.
        media: the thinker's hidden states [positions, hidden] of the sound or picture in the request; None without.
        grid: numbers of a picture's patches [1, 3] (time, height, width); None without a picture.
    """

    request: str
    reply: list[str]
    media: Tensor | None = None
    grid: Tensor | None = None


@dataclass(frozen=True)
class Line:
    """One training example.

    Attributes:
        text: text ids of all positions; MULTIMODAL where the input is a hidden state.
        codec: codec ids of the prompt's positions, NO_CODEC where there is none.
        frames: codes [frames, groups]; frame t is in the input of position len(codec) + t.
        positions: M-RoPE positions [3, length].
        media: see `Asked.media`.
    """

    text: list[int]
    codec: list[int]
    frames: np.ndarray
    positions: Tensor
    media: Tensor | None = None


def line(asked: Asked, voice: str, world: Lexicon, ids: SpecialIds, talker: Any) -> Line:
    """Return the training example of a request whose reply is spoken in a voice.

    Args:
        world: codes of each word in each voice.
        ids: ids of the special tokens.
        talker: Transformers' talker, which computes M-RoPE positions.
    """
    prompt = ids_of(chat(asked.request), world_vocabulary())
    parts = find_parts(prompt, ids)
    assert parts is not None
    text, codec = talker_prompt(prompt, parts, voice, ids)
    said = ids_of(" ".join(asked.reply), world_vocabulary())
    frames, _ = phrase(world, voice, asked.reply)
    track = [*said[1:], ids.tts_eos, *[ids.tts_pad] * len(frames)][: len(frames)]
    shown = [token for start, stop in parts.user for token in prompt[start:stop]]
    shown += [ids.tts_pad] * (len(codec) - len(shown))
    positions = _positions(shown, len(frames), asked.grid, talker)
    return Line([*text, said[0], *track], codec, frames, positions, asked.media)


def _positions(shown: list[int], frames: int, grid: Tensor | None, talker: Any) -> Tensor:
    """Return M-RoPE positions [3, prompt + frames]: 0, 1, 2, ... without a picture, else computed from `grid`.

    Args:
        shown: token ids of the prompt.
    """
    if grid is None:
        return torch.arange(len(shown) + frames).expand(3, -1)
    prompt = torch.tensor([shown])
    prompt = talker.get_rope_index(prompt, grid, None, torch.ones_like(prompt))[0][:, 0].long()
    after = int(prompt.max()) + 1
    return torch.cat([prompt, torch.arange(after, after + frames).expand(3, -1)], dim=1)


@dataclass(frozen=True)
class Batch:
    """Training examples (`Line`) padded at their ends to one length; n is their number.

    Attributes:
        text: [n, length].
        codes: codec ids of all groups [n, length, groups], negative where there is none.
        wanted: codes to predict [n, length, groups], IGNORE where there is none; only a first code can be the end.
        positions: [3, n, length].
        media: hidden states of all lines [positions, thinker hidden].
    """

    text: Tensor
    codes: Tensor
    wanted: Tensor
    positions: Tensor
    media: Tensor | None


def batch_of(lines: list[Line], end: int) -> Batch:
    """Pad training examples to a batch; `end` is the codec id that ends speech."""
    count, length, groups = len(lines), max(len(one.text) for one in lines), lines[0].frames.shape[1]
    text = torch.zeros(count, length, dtype=torch.long)
    codes = torch.full((count, length, groups), NO_CODEC)
    wanted = torch.full((count, length, groups), IGNORE)
    positions = torch.zeros(3, count, length, dtype=torch.long)
    for row, one in enumerate(lines):
        prompt, stop, frames = len(one.codec), len(one.text), torch.from_numpy(one.frames)
        text[row, :stop] = torch.tensor(one.text)
        codes[row, :prompt, 0] = torch.tensor(one.codec)
        codes[row, prompt:stop] = frames
        wanted[row, prompt - 1 : stop - 1] = frames
        wanted[row, stop - 1, 0] = end
        positions[:, row, :stop] = one.positions
    media = [one.media for one in lines if one.media is not None]
    return Batch(text, codes, wanted, positions, torch.cat(media) if media else None)


def input_rows(talker: Any, embeddings: Tensor, batch: Batch) -> Tensor:
    """Return the talker's input embeddings [n, length, hidden].

    Args:
        embeddings: the thinker's token embeddings [ids, thinker hidden].
    """
    rows = talker.text_projection(embeddings[batch.text.clamp(min=0)])
    if batch.media is not None:
        there = (batch.text == MULTIMODAL).unsqueeze(-1)
        rows = rows.masked_scatter(there, talker.hidden_projection(batch.media))
    tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
    for group, table in enumerate(tables):
        there = (batch.codes[..., group] >= 0).unsqueeze(-1)
        rows = rows + table(batch.codes[..., group].clamp(min=0)) * there
    return rows


@torch.no_grad()
def with_media(turns: list[Turn], thinker: Any, preprocessors: Preprocessors, layer: int) -> list[Asked]:
    """Return turns as requests for the talker, with the thinker's hidden states of their sounds or pictures.

    Args:
        turns: all with a sound, or all with a picture.
        layer: number of the thinker's layers that compute the hidden states.
    """
    inputs, _ = tensors(turns, preprocessors)
    hidden = thinker(**inputs, use_cache=False, output_hidden_states=True).hidden_states[layer]
    config = thinker.config
    there = torch.isin(inputs["input_ids"], torch.tensor([config.audio_token_id, config.image_token_id]))
    grids = inputs.get("image_grid_thw")
    return [
        Asked(turn.request, turn.reply, hidden[i][there[i]], None if grids is None else grids[i : i + 1])
        for i, turn in enumerate(turns)
    ]

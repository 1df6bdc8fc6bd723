"""The backbone as a vLLM model: Llama makes the first code of a frame, Transformers' depth decoder the other codes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CsmDepthDecoderForCausalLM, DynamicCache
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from csm.payloads import FRAME, Prompt
from vllm_omni_ext.engine.input_provider import Ended, Span
from vllm_omni_ext.engine.streaming_model import StreamingInputBase

AUDIO, DEPTH = "embed_audio_tokens.weight", "depth_decoder.model.embed_tokens.weight"
"""Names of two parameters that are equal; a released checkpoint may contain only one of them."""


class CsmBackbone(StreamingInputBase, nn.Module):
    """One token of vLLM is one frame: vLLM samples its first code, the input provider makes the others."""

    mapper = WeightsMapper(
        orig_to_new_prefix={
            "backbone_model.embed_tokens.": "",
            "backbone_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "codec_model.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.language_model = LlamaForCausalLM(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "language_model"))
        self.language_model.model.embed_tokens = None  # all inputs are rows of the input provider
        self.embed_text_tokens = nn.Embedding(self.config.text_vocab_size, self.config.hidden_size)
        self.embed_audio_tokens = nn.Embedding(
            self.config.num_codebooks * self.config.vocab_size, self.config.hidden_size
        )
        self.depth_decoder = CsmDepthDecoderForCausalLM(self.config.depth_decoder_config)
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
        self.input_provider = Frames(self)

    def embed_input_ids(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the step's input rows [tokens, hidden]; zeros in vLLM's own warm-up steps."""
        if self.in_step:
            return self.input_rows(None)
        return self.embed_text_tokens.weight.new_zeros(len(input_ids), self.config.hidden_size)

    def forward(self, input_ids: Any, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None):
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits [requests, codes]; keep the hidden states for the depth decoder."""
        self.sampled_hidden = hidden_states
        return self.language_model.compute_logits(hidden_states)

    def audio_rows(self, frames: Tensor) -> Tensor:
        """Return the input embeddings [n, hidden] of frames [n, codebooks]: the sum of their codes' embeddings."""
        offsets = torch.arange(frames.shape[-1], device=frames.device) * self.config.vocab_size
        return self.embed_audio_tokens(frames + offsets).sum(-2)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.mapper)
        for missing, other in ((AUDIO, DEPTH), (DEPTH, AUDIO)):
            if missing not in loaded and other in loaded:
                self.get_parameter(missing).data.copy_(self.get_parameter(other).data)
                loaded.add(missing)
        return loaded


@dataclass
class Utterance:
    """A request: input rows [prompt, hidden] of its prompt, its frames [codebooks], and its sampling parameters."""

    prompt: Tensor
    frames: list[Tensor]
    params: Any

    def noise(self, steps: int, codes: int) -> Tensor:
        """Return exponential random numbers [steps, codes] for the next frame; a seed and its number determine them."""
        if self.params.seed is None:
            return torch.empty(steps, codes).exponential_()
        generator = torch.Generator().manual_seed((self.params.seed + 1000003 * len(self.frames)) % 2**63)
        return torch.empty(steps, codes).exponential_(generator=generator)


class Frames:
    """The `InputProvider`: computes input rows from ids and frames, and the other codes of a frame after sampling."""

    payloads = Prompt

    def __init__(self, model: CsmBackbone) -> None:
        self._model = model
        self._requests: dict[str, Utterance] = {}

    def open(self, req_id: str, payload: Prompt, hidden_spans: Sequence[tuple[int, int]], params: Any) -> None:
        if req_id in self._requests:  # preempted and added again
            return
        device = self._model.embed_text_tokens.weight.device
        text = torch.tensor(payload.text, device=device)
        rows = self._model.embed_text_tokens(text.clamp(min=0))
        if payload.audio:
            rows[text == FRAME] = self._model.audio_rows(torch.tensor(payload.audio, device=device))
        frames = [torch.tensor(frame, device=device) for frame in payload.frames]
        self._requests[req_id] = Utterance(rows, frames, params)

    def extend(self, req_id: str, payload: Any) -> None:
        raise NotImplementedError("the whole prompt comes with `Open`")

    add_hidden_states = blank = positions = extend  # no edge with tensors, no M-RoPE

    def close(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def rows(self, spans: Sequence[Span]) -> Tensor:
        return torch.cat([self._rows(self._requests[span.req_id], span.start, span.count) for span in spans])

    def _rows(self, request: Utterance, start: int, count: int) -> Tensor:
        prompt, after = request.prompt[start : start + count], max(0, start - len(request.prompt))
        if len(prompt) == count:
            return prompt
        made = torch.stack(request.frames[after : after + count - len(prompt)])
        return torch.cat([prompt, self._model.audio_rows(made)])

    def sampled(
        self, req_ids: Sequence[str], tokens: Sequence[Sequence[int]], hidden: Tensor
    ) -> list[Tensor | Ended | None]:
        live = [row for row, got in enumerate(tokens) if got]  # the others have a part of their prompt to compute
        made: list[Tensor | Ended | None] = [None] * len(req_ids)
        if not live:
            return made
        requests = [self._requests[req_ids[row]] for row in live]
        first = torch.tensor([tokens[row][0] for row in live], device=hidden.device)
        end = self._model.config.codebook_eos_token_id
        for row, request, frame in zip(live, requests, self._complete(hidden[live], first, requests), strict=True):
            request.frames.append(frame)
            output = frame[None].to("cpu", torch.int32)
            if (frame[:-1] == end).all():  # as Transformers: the last code does not count
                made[row] = Ended(None if frame[-1] == end else output)
            else:
                made[row] = output
        return made

    def _complete(self, hidden: Tensor, first: Tensor, requests: Sequence[Utterance]) -> Tensor:
        """Return frames [n, codebooks]: sample the other codes, given hidden states [n, hidden] and first codes [n]."""
        depth, steps = self._model.depth_decoder, self._model.config.num_codebooks - 1
        noise = torch.stack([each.noise(steps, self._model.config.vocab_size) for each in requests]).to(hidden.device)
        cache, codes = DynamicCache(config=depth.config), [first]
        ids, given = torch.stack([torch.zeros_like(first), first], dim=1), hidden
        for step in range(steps):
            out = depth(ids, given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            codes.append(choose(out.logits[:, -1].float(), noise[:, step], [each.params for each in requests]))
            ids, given = codes[-1][:, None], None
        return torch.stack(codes, dim=1)


def choose(logits: Tensor, noise: Tensor, params: Sequence[Any]) -> Tensor:
    """Sample a code for each row of logits [n, codes] with the temperature and top_k of its request; return [n]."""
    chosen = logits.argmax(-1)
    for row, each in enumerate(params):
        if each.temperature < 1e-5:
            continue
        scores = logits[row] / each.temperature
        if 0 < each.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(each.top_k).values[-1], float("-inf"))
        chosen[row] = (scores.softmax(-1) / noise[row]).argmax()
    return chosen

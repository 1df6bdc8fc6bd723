"""The oracle itself: what its results must satisfy whatever the model says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support import media
from tests.support.oracle import Golden, Oracle

pytestmark = pytest.mark.engine

QUESTIONS = ("hello", "say the red cat", "What is the moon?", "Why?", "1 2 3", "A much longer question, really.")
THINKER_TOKENS = 40
TALKER_TOKENS = 60


def ask(oracle: Oracle, content: object, **limits: int) -> Golden:
    limits = {"thinker_max_tokens": THINKER_TOKENS, "talker_max_tokens": TALKER_TOKENS} | limits
    return oracle.run([{"role": "user", "content": content}], voice="ethan", **limits)


@pytest.fixture(scope="module")
def answers(oracle: Oracle) -> list[Golden]:
    return [ask(oracle, question) for question in QUESTIONS]


def samples(oracle: Oracle, frames: int) -> int:
    """Length of a decode in one piece.

    A transposed convolution of kernel k and stride s makes s * (n - 1) + k samples of n, of which k - s are cut on both
    sides: s * n where k = s (the upsamplers), s * (n - 1) where k = 2 * s (the decoder).
    """
    config = oracle.model.config.code2wav_config
    count = frames * math.prod(config.upsampling_ratios)
    for rate in config.upsample_rates:
        count = rate * (count - 1)
    return count


def test_frames_are_one_fewer_than_talker_tokens(answers: list[Golden], oracle: Oracle) -> None:
    for golden in answers:
        assert golden.frames.shape == (len(golden.talker_ids) - 1, oracle.model.config.talker_config.num_code_groups)
        assert golden.frames.dtype == np.int64
        assert golden.frames[:, 0].tolist() == golden.talker_ids[:-1]


def test_sound_has_the_length_of_an_unchunked_decode(answers: list[Golden], oracle: Oracle) -> None:
    for golden in answers:
        assert golden.wav.dtype == np.float32
        assert golden.wav.shape == (samples(oracle, len(golden.frames)),)


def test_released_rates_lose_555_samples(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    config = oracle.model.config.code2wav_config
    monkeypatch.setattr(config, "upsample_rates", [8, 5, 4, 3])
    assert samples(oracle, 10) == 10 * 1920 - 555


def test_replies_and_sounds_end_in_both_ways(answers: list[Golden], oracle: Oracle) -> None:
    text_ends = {golden.thinker_ids[-1] == oracle.model.config.im_end_token_id for golden in answers}
    sound_ends = {golden.talker_ids[-1] == oracle.model.config.talker_config.codec_eos_token_id for golden in answers}
    assert text_ends == {True, False}
    assert sound_ends == {True, False}


def test_replies_vary(answers: list[Golden]) -> None:
    assert len({tuple(golden.thinker_ids) for golden in answers}) == len(answers)
    long = [golden for golden in answers if len(golden.thinker_ids) > 10]
    assert all(len(set(golden.thinker_ids)) > len(golden.thinker_ids) / 2 for golden in long)
    frames = [frame for golden in answers for frame in map(tuple, golden.frames.tolist())]
    assert len(set(frames)) > 0.9 * len(frames)


def test_sound_is_audible_and_not_clipped(answers: list[Golden]) -> None:
    sound = np.concatenate([golden.wav for golden in answers])
    assert 0.05 < np.sqrt(np.mean(sound**2)) < 0.5
    assert np.mean(np.abs(sound) >= 1) < 0.01
    assert abs(sound.mean()) < 0.01


def test_a_reply_of_one_token_has_no_sound(oracle: Oracle) -> None:
    golden = ask(oracle, "hello", thinker_max_tokens=1)
    assert len(golden.thinker_ids) == 1
    assert (golden.talker_ids, golden.frames.shape[0], golden.wav.size) == ([], 0, 0)


def test_a_talker_of_one_token_has_no_frames(oracle: Oracle) -> None:
    golden = ask(oracle, "hello", talker_max_tokens=1)
    assert (len(golden.talker_ids), golden.frames.shape, golden.wav.size) == (1, (0, 4), 0)


def test_voice_changes_the_sound_not_the_text(oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "hello"}]
    one, two = (
        oracle.run(messages, voice=voice, thinker_max_tokens=8, talker_max_tokens=12) for voice in ("chelsie", "aiden")
    )
    assert one.thinker_ids == two.thinker_ids
    assert one.frames.tolist() != two.frames.tolist()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio", "audio": media.audio(1.01, seed=1)},
        {"type": "image", "image": media.image(96, 64, seed=1)},
        {"type": "video", "video": media.video(2, 64, 64, seed=1)},
    ],
    ids=lambda part: part["type"],
)
def test_media_change_the_reply_and_the_sound(oracle: Oracle, part: dict[str, object]) -> None:
    kind = part["type"]
    ask_about = [part, {"type": "text", "text": "what"}]
    golden = ask(oracle, ask_about, thinker_max_tokens=12, talker_max_tokens=12)
    placeholder = vars(oracle.model.config.thinker_config)[f"{kind}_token_id"]
    assert golden.prompt_ids.count(placeholder) > 1
    other = {"audio": media.audio(1.01, 2), "image": media.image(96, 64, 2), "video": media.video(2, 64, 64, 2)}[kind]
    changed = ask(oracle, [{**part, kind: other}, ask_about[1]], thinker_max_tokens=12, talker_max_tokens=12)
    assert changed.prompt_ids == golden.prompt_ids
    assert changed.thinker_ids != golden.thinker_ids
    assert changed.frames.tolist() != golden.frames.tolist()


def test_audio_together_with_an_image_has_sound(oracle: Oracle) -> None:
    parts = [{"type": "audio", "audio": media.audio(0.5, 1)}, {"type": "image", "image": media.image(64, 64, 1)}]
    assert ask(oracle, parts, thinker_max_tokens=6, talker_max_tokens=6).thinker_ids


def test_media_are_exact_through_their_urls() -> None:
    from vllm.multimodal.media import MediaConnector

    connector = MediaConnector()
    sound, picture, frames = media.audio(0.3, 1), media.image(50, 40, 2), media.video(5, 48, 32, 3)
    decoded, rate = connector.fetch_audio(media.audio_url(sound))
    assert rate == media.AUDIO_RATE
    np.testing.assert_array_equal(decoded, sound)
    np.testing.assert_array_equal(np.asarray(connector.fetch_image(media.image_url(picture))), np.asarray(picture))
    video, _ = connector.fetch_video(media.video_url(frames)).media
    np.testing.assert_array_equal(video, frames)

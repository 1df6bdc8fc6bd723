"""Refuses media that FFmpeg would read from elsewhere: session descriptions (SDP), playlists, lists of files.

FFmpeg opens the sockets and files that such a text names, and waits for packets for 20 s or more. With an empty list of
protocols it opens none, and reads only containers that have all of their data.
"""

from __future__ import annotations

import io
import os

import av
from av.container import InputContainer

PROTOCOLS = "protocol_whitelist"
NONE = "none"
"""Value of FFmpeg's option `protocol_whitelist`: the name of no protocol."""

OPENCV_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
"""Environment variable with FFmpeg's options for OpenCV, as "name;value|name;value"; OpenCV reads it for each video."""


def opened(data: io.BytesIO) -> InputContainer:
    """Open a container that has all of its data.

    Raises:
        ValueError: FFmpeg cannot read the data, or needs other data.
    """
    try:
        return av.open(data, "r", options={PROTOCOLS: NONE})
    except (av.error.FFmpegError, OSError) as error:
        raise ValueError("Invalid or corrupted file, or one that refers to other files or to addresses") from error


def refuse_in_opencv() -> None:
    """Make OpenCV in this process read only containers that have all of their data."""
    given = os.environ.get(OPENCV_OPTIONS)
    os.environ[OPENCV_OPTIONS] = f"{given}|{PROTOCOLS};{NONE}" if given else f"{PROTOCOLS};{NONE}"

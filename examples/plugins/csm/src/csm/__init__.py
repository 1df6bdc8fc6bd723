"""CSM (`sesame/csm-1b`): a text is spoken by a backbone that makes codec frames, and a codec that makes the sound."""

"""Output modalities (text, audio, image): each one assembles, streams and counts its outputs in answers."""

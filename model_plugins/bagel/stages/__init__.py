"""Models, schedulers and configs of the replicas of BAGEL's stages."""

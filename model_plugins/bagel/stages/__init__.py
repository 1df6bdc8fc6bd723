"""What the replicas of BAGEL's stages run."""

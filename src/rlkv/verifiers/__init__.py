"""Text and answer in, Score out. One verifier is both the reward of training and the test score."""

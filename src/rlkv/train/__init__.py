"""Learning the gates: rollouts, loss, penalty, warm start, checkpoints and the training loop."""

"""Training: state, the pure step, optimizer and schedule, the loop, checkpoints and monitors."""

"""What a trained model knows and writes: likelihoods, generation and the benchmarks of lm-evaluation-harness (docs/evaluation.md)."""

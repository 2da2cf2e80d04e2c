"""What a model does, measured: pure functions over models and data that return dataclasses of arrays (docs/analysis.md)."""

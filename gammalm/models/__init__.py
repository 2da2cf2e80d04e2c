"""Flax NNX decoders in tree mode: modules are pytrees, layers are stacked on axis 0 and scanned."""

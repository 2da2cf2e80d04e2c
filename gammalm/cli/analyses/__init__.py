"""One module per kind of `gammalm analyze`: `add_options` and `run`, thin over gammalm.analysis; JAX is imported in `run` alone."""

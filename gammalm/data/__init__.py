"""Text in, token batches out: corpora, SentencePiece, token shards, mixtures, packing and random access by step."""

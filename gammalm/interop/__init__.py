"""Checkpoints of ours in the forms of others, and theirs in ours: Hugging Face folders, written and read without transformers."""

"""Checkpoints as GGUF files: read, checked, and loaded with their weights as they are."""

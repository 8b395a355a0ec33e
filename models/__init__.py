"""Checkpoints, the attention mechanism and what can be read from it. Knows torch; knows nothing of HTTP."""

"""Sweeps: many runs of one command, what they share, and what they say together."""

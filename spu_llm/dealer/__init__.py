"""Correlated randomness from a third party that sees no input, weight or opening: making, sending and keeping it."""

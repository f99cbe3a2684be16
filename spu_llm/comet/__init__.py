"""Comet: predict which neuron blocks and heads matter, compute only those, keep the cache coherent (S&P 2025)."""

"""The plugin: JAX primitives with three meanings each (plaintext, stock SPU, dealer-assisted), one protocol a file."""

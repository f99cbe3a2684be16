"""Non-linear functions narrowed to a known range, in plain JAX: stock SPU runs them on SEMI2K, ABY3 and CHEETAH without dealer."""

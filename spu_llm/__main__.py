"""`python -m spu_llm` is `spu-llm`."""

from .cli import main

main()

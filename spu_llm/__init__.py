"""Private LLM text generation on SecretFlow-SPU. See README.md; the parts are its subpackages."""

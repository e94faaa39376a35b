"""Sample completions with transformers or with vLLM."""

"""vLLM decodes what Cached RAG prefilled: a KV connector, and the prefill node before it.

`connector` runs inside vLLM, and nothing else here needs vLLM. docs/vllm.md has the deployment.
"""

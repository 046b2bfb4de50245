"""`/rerank` and `/score`: document relevance, in the formats of vLLM, Cohere and Jina.

* `schema` – the bodies.
* `endpoint` – runs the scorer and writes the answers.
"""

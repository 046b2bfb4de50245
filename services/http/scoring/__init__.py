"""`/rerank` and `/score`: relevance of documents, in the forms of vLLM, Cohere and Jina.

* `schema` – the bodies.
* `endpoint` – runs the scorer and writes the answers.
"""

"""Text and token ids of the served model.

* `chat` – checks a conversation; `chat_template` – renders it as prompt text with the model's template.
* `detokenizer` – token ids to text, incrementally.
* `tokenizer` – the model's tokenizer: text and conversations to token ids, and back.
* `judge` – the prompt that asks a reranker whether a document matches a query.
* `tokenizer_archive` – the tokenizer's files for clients that tokenise themselves.
* `stop_strings` – finds stop strings in text that arrives in pieces.
"""

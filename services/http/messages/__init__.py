"""Anthropic's Messages API: a request becomes a chat, and its output a list of content blocks.

`schema` is the body, `conversion` makes a chat of it, `answer` writes events and the message, and `endpoint` serves the
paths.
"""

"""OpenAI's Responses API: a request becomes a chat, and its output a list of items.

`schema` is the body, `conversion` makes a chat of it, and `answer` writes events and the response. `store` keeps
responses for `previous_response_id`, and `endpoint` serves the paths.
"""

"""Validation and encoding of one request, from the public message to a value with valid fields.

* `output` – rules for converting generated tokens to messages.
* `tools` – the functions that the model may call, and the parser for its output.
* `scheduling` – the scheduling options, and the permissions to use them.
* `validation` – all other fields; all violations are reported together.
* `defaults` – the checkpoint's defaults for sampling options that a request omits.
* `prompts` – prompts and bad words as token ids.
"""

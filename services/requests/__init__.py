"""One request: from the public message to a value whose fields are all valid.

* `output` – how generated tokens become messages.
* `tools` – the functions that the model may call, and how its output is read.
* `scheduling` – the scheduling options, and which of them a principal may use.
* `validation` – every other field; all violations are reported together.
* `defaults` – sampling options that a request does not give, from the checkpoint.
* `prompts` – prompts and bad words as token ids.
"""

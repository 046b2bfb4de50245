"""Prompt that asks whether a document matches a query, in the format for rerankers such as Qwen3-Reranker."""

from dataclasses import dataclass

from quire.v1 import generation_pb2 as v1
from services.text.tokenizer import TextTokenizer
from shared.config import ConfigError

# These words are from the models' training data. Other words yield worse scores.
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_VARIABLES = '{"enable_thinking": false}'
"""Disables reasoning, so that the output begins with the answer."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Builds prompts to which a model responds with one of two tokens."""

    yes: int
    """The token of a positive answer."""
    no: int
    """The token of a negative answer."""
    has_roles: bool
    """Whether the chat template itself writes the question, given messages with the roles query and document."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "Judge":
        """Return the judge of a model.

        Raises:
            ConfigError: the model has no chat template, or does not write an answer as one token.
        """
        if not tokenizer.has_chat_template:
            raise ConfigError("score_method: yes-no needs a model with a chat template; use --score-method embedding")
        answers = [tokenizer.single_token(word) for word in ("yes", "no")]
        yes, no = answers
        if yes is None or no is None:
            word = "yes" if yes is None else "no"
            raise ConfigError(
                f"score_method: yes-no needs a model with a token for {word!r}; use --score-method embedding"
            )
        source = tokenizer.chat_template_source
        has_roles = all(f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document"))
        return cls(yes, no, has_roles)

    def question(self, query: str, document: str, instruction: str) -> v1.ChatInput:
        """Return the conversation whose next token is the judgement. By default, use the models' usual instruction."""
        chat = v1.ChatInput(template_variables_json=_VARIABLES)
        if self.has_roles:
            turns = [("system", instruction)] if instruction else []
            turns += [("query", query), ("document", document)]
        else:
            text = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            turns = [("system", _SYSTEM), ("user", text)]
        for role, content in turns:
            chat.messages.add(role=role, content=content)
        return chat

"""Bodies of `/rerank` and `/score`, with the fields of vLLM, Cohere and Jina."""

from typing import Annotated, Literal

from pydantic import Field

from services.calls.scoring import MAX_DOCUMENTS
from services.http.schema import Ignored, OpenBody, QueuedBody, Uint32

_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class ScoringBody(QueuedBody):
    """Common fields of requests that compare texts."""

    instruction: str | None = Field(
        default=None, description="what makes a document relevant; only with the server's score method yes-no"
    )
    pooling: Literal["last", "mean"] | None = Field(
        default=None, description="as in embeddings; only with the server's score method embedding"
    )
    max_tokens_per_doc: Annotated[Uint32, Field(ge=1)] | None = Field(
        default=None, description="compare only this number of first tokens of each document"
    )


class Document(OpenBody):
    """A document as an object; fields other than its text have no effect."""

    text: str


class RerankBody(ScoringBody):
    """A query, and documents to sort by their relevance."""

    query: str
    documents: list[str | Document] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    top_n: Uint32 | None = Field(default=None, description="maximum number of results; 0 for all")
    return_documents: bool = Field(default=True, description="repeat the texts in the results")
    rank_fields: list[Literal["text"]] | None = Field(default=None, description="only the text can be compared")
    max_chunks_per_doc: Ignored = Field(
        default=None, description="accepted without effect: documents are not split into chunks"
    )

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the documents."""
        return tuple(each if isinstance(each, str) else each.text for each in self.documents)


class ScoreBody(ScoringBody):
    """Pairs of texts to compare."""

    text_1: str | _Texts = Field(description="one text, or one for each of text_2")
    text_2: str | _Texts = Field(description=f"one text, or up to {MAX_DOCUMENTS}")

"""Small tokenizers of both kinds, trained quickly, and model folders with them."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a story about a small bird, a tall tree and the sea",
    "näive café, Straße, über; здравствуй мир; 日本語の文章; שלום",
    "🙂🙃😀👩\u200d👩\u200d👧 🇩🇪 emoji come in several bytes",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 20 30 100",
)
SPECIAL = ("<pad>", "<bos>", "<eos>")
BOS, EOS = 1, 2
ADDED = "added→token"
"""A token that was added after training, and has the highest id."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'martian' %}{{ raise_exception('no martians') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """A byte-level BPE like GPT-2's, with a beginning-of-sequence token before plain text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken(ADDED, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


@cache
def sentencepiece_style() -> Tokenizer:
    """A BPE with ▁ for spaces and single bytes for unknown characters, like Llama 2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([CORPUS[0], CORPUS[1], CORPUS[4]], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """A BPE with ▁ for spaces and without byte tokens; U+FFFD is one of its tokens, as in Llama 2's vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([*CORPUS * 3, "\ufffd"], trainer)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """A vocabulary of words and their continuations, like BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A model folder without weights, as a front end needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    config: dict[str, object] = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

"""Text to token ids and back, and a chat as the model was trained to see it.

From what a GGUF file says about itself, by the library `tokenizers`, or from a folder's tokenizer.json.
"""

import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jinja2
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
# How text is cut before pairs are merged, by tokenizer.ggml.pre: llama.cpp's src/llama-vocab.cpp.
CUTS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
STOPS = "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|endoftext|>"


class Tokenizer(NamedTuple):
    tokenizer: tokenizers.Tokenizer
    template: str | None
    first: str  # before all text, or ""
    stops: frozenset[int]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the model answers."""
        if self.template is None:
            text = "".join(message["content"] + "\n" for message in messages)
        else:
            environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _refuse
            text = environment.from_string(self.template).render(
                messages=messages, add_generation_prompt=True, bos_token=self.first, eos_token=""
            )
        if self.first and not text.startswith(self.first):
            text = self.first + text
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Iterable[int]) -> Iterator[str]:
        """What is new with each id; characters of several tokens come with the last of these."""
        seen, done = [], ""
        for each in ids:
            seen.append(each)
            now = self.tokenizer.decode(seen)
            if not now.endswith("\ufffd"):
                yield now[len(done) :]
                done = now


def _refuse(message: str):
    raise ValueError(f"the model's chat template says: {message}")


def of_gguf(metadata: dict[str, Any]) -> Tokenizer:
    get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)  # noqa: E731
    vocabulary, kinds = get("tokens"), get("token_type")
    build = {"gpt2": _byte_level, "llama": _sentence_piece}.get(get("model"))
    if build is None:
        raise ValueError(f"tokenizer.ggml.model must be gpt2 or llama; got {get('model')}")
    tokenizer = build(vocabulary, get)
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(vocabulary, kinds)
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text, kind in zip(vocabulary, kinds) if kind == USER_DEFINED]
    )
    adds_first = get("add_bos_token", get("model") == "llama" or get("pre") == "llama-bpe")
    first = vocabulary[get("bos_token_id")] if adds_first and get("bos_token_id") is not None else ""
    stops = {get("eos_token_id"), get("eot_token_id"), *map(tokenizer.token_to_id, STOPS)} - {None}
    return Tokenizer(tokenizer, metadata.get("tokenizer.chat_template"), first, frozenset(stops))


def _byte_level(vocabulary: list[str], get) -> tokenizers.Tokenizer:
    merges = [tuple(pair.split(" ")) for pair in get("merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, merges))
    if get("pre") in ("smollm", "codeshell", "refact", "starcoder"):
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:
        parts = [
            pre_tokenizers.Split(Regex(CUTS.get(get("pre"), CUTS["qwen2"])), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: list[str], get) -> tokenizers.Tokenizer:
    """Merges in the order of the scores of what they make: SentencePiece's BPE."""
    ids, scores = {text: i for i, text in enumerate(vocabulary)}, get("scores")
    pairs = []
    for text, i in ids.items():
        for cut in range(1, len(text)):
            if text[:cut] in ids and text[cut:] in ids:
                pairs.append((-scores[i], ids[text[:cut]], ids[text[cut:]], text[:cut], text[cut:]))
    merges = [pair[3:] for pair in sorted(pairs)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    prefix = [normalizers.Prepend("\u2581")] if get("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def of_folder(path: pathlib.Path) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    config = path / "tokenizer_config.json"
    said = json.loads(config.read_text()) if config.exists() else {}
    text_of = lambda token: token["content"] if isinstance(token, dict) else token  # noqa: E731
    template = path / "chat_template.jinja"
    template = template.read_text() if template.exists() else said.get("chat_template")
    first = text_of(said.get("bos_token")) or "" if said.get("add_bos_token", False) else ""
    ends = (text_of(said.get("eos_token")), *STOPS)
    stops = {tokenizer.token_to_id(text) for text in ends if text} - {None}
    return Tokenizer(tokenizer, template, first, frozenset(stops))

"""Text to token ids and back, and a chat as the model was trained to see it.

From what a GGUF file says about itself, by the library `tokenizers`, or from a folder's tokenizer.json.
"""

import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import templates
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
    """special: what templates call the tokens that mean something, bos_token and others, and their texts."""

    tokenizer: tokenizers.Tokenizer
    template: str | None
    special: dict[str, str]
    first: str  # before all text, or ""
    stops: frozenset[int]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the model answers."""
        if self.template is None:
            text = "".join(message["content"] + "\n" for message in messages)
        else:
            text = templates.render(self.template, messages, self.special)
        return self.ids(text if text.startswith(self.first) else self.first + text)

    def text(self, ids: Iterable[int]) -> Iterator[str]:
        """What is new with each id; characters of several tokens come with the last of these."""
        seen, done, now = [], "", ""
        for each in ids:
            seen.append(each)
            now = self.tokenizer.decode(seen)
            if not now.endswith("\ufffd"):
                yield now[len(done) :]
                done = now
        if now != done:  # a character that was cut
            yield now[len(done) :]


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
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"{key}_token_id") for name, key in named.items()}
    special = {name: vocabulary[i] for name, i in ids.items() if i is not None and i < len(vocabulary)}
    adds_first = get("add_bos_token", get("model") == "llama" or get("pre") == "llama-bpe")
    first = special.get("bos_token", "") if adds_first else ""
    stops = {ids["eos_token"], get("eot_token_id"), *map(tokenizer.token_to_id, STOPS)} - {None}
    return Tokenizer(tokenizer, metadata.get("tokenizer.chat_template"), special, first, frozenset(stops))


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
    said, generation = (_read(path / f"{name}.json") for name in ("tokenizer_config", "generation_config"))
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in (_read(path / "special_tokens_map.json") | said).items()
        if name.endswith("_token") and isinstance(token, dict | str)
    }
    template = path / "chat_template.jinja"
    template = template.read_text() if template.exists() else templates.chosen(said.get("chat_template"))
    ends = generation.get("eos_token_id")
    stops = {tokenizer.token_to_id(text) for text in (special.get("eos_token", ""), *STOPS)} - {None}
    stops |= set(ends if isinstance(ends, list) else [ends] if ends is not None else [])
    first = special.get("bos_token", "") if _begins(tokenizer, special.get("bos_token"), said) else ""
    return Tokenizer(tokenizer, template, special, first, frozenset(stops))


def _begins(tokenizer: tokenizers.Tokenizer, first: str | None, said: dict[str, Any]) -> bool:
    """Whether text begins with the token `first`: as the config says, or else as the tokenizer does."""
    if "add_bos_token" in said:
        return bool(said["add_bos_token"])
    return first is not None and tokenizer.encode("a").ids[:1] == [tokenizer.token_to_id(first)]


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}

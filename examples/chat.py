"""Talk to a language model in the quantised file that its authors published; every matrix product is a jaxgemv call.

    python examples/chat.py "What is the capital of France?"
    python examples/chat.py --model FILE.gguf | FOLDER

Without a prompt it is a conversation. The first time, the default model is downloaded: 98 MB.
"""

import argparse
import functools
import pathlib
import sys
import time

import checkpoints
import jax
import jax.numpy as jnp
import model
from rich.console import Console

from jaxgemv import gemv

WEIGHTS = {
    "native": None,
    "int8": {"bits": 8, "group_size": 64},
    "int4": {"bits": 4, "group_size": 32},
    "nf4": {"format": "nf4"},
}

FIRST = 256  # tokens that the cache has room for: attention reads all of it for each token

console = Console(stderr=True)


@functools.partial(jax.jit, static_argnames=("config", "greedy"), donate_argnames="cache")
def step(params, tokens, count, position, cache, key, temperature, top_p, config, greedy):
    """Reads the first `count` of tokens (T,), which start at `position`; the next token and the cache."""
    logits, cache = model.forward(params, tokens, config, gemv, cache, position, last=count - 1)
    logits = logits[0]
    if greedy:
        return jnp.argmax(logits).astype(jnp.int32), cache
    # The most likely tokens, which together have the probability top_p.
    order = jnp.argsort(-logits)
    likely = jax.nn.softmax(logits[order] / temperature)
    likely = jnp.where(jnp.cumsum(likely) - likely < top_p, likely, 0)
    token = order[jax.random.categorical(jax.random.fold_in(key, position + count), jnp.log(likely))]
    return token.astype(jnp.int32), cache


class Conversation:
    """What has been said, of which the cache holds the keys and values."""

    def __init__(self, of: checkpoints.Model, args):
        self.model, self.args = of, args
        self.size = min(FIRST, of.config.context)
        self.cache = model.empty_cache(of.params, of.config, size=self.size)
        self.position, self.seen, self.messages = 0, [], []

    def next(self, tokens: list[int]) -> int:
        """The token behind these. Several are padded, so that few lengths are compiled."""
        size = 1 if len(tokens) == 1 else max(16, 1 << (len(tokens) - 1).bit_length())
        size = min(size, self.model.config.context - self.position)
        while self.position + size > self.size:  # twice as much, which compiles anew
            self.size = min(2 * self.size, self.model.config.context)
            self.cache = model.grown(self.cache, self.size)
        padded = jnp.asarray(tokens + [0] * (size - len(tokens)), jnp.int32)
        args = self.args
        key = jax.random.key(args.seed)
        where = jnp.int32(len(tokens)), jnp.int32(self.position)
        sampling = args.temperature or 1.0, args.top_p, self.model.config, args.temperature == 0
        token, self.cache = step(self.model.params, padded, *where, self.cache, key, *sampling)
        self.position += len(tokens)
        self.seen += tokens
        return int(token)

    def reply(self, text: str):
        """Yields the ids of the answer."""
        self.messages.append({"role": "user", "content": text})
        tokens = self.model.tokenizer.chat(self.messages)
        if tokens[: len(self.seen)] != self.seen:  # a template may say the past in other words
            self.position, self.seen = 0, []
        new = tokens[len(self.seen) :]
        if self.position + len(new) >= self.model.config.context:
            raise SystemExit(
                f"chat: the conversation must fit in --context {self.model.config.context} tokens"
            )
        start = time.perf_counter()
        token = self.next(new)
        self.prompt = len(new), time.perf_counter() - start
        self.times = [time.perf_counter()]
        for _ in range(self.args.tokens):
            if token in self.model.tokenizer.stops or self.position + 1 >= self.model.config.context:
                return
            yield token
            token = self.next([token])
            self.times.append(time.perf_counter())

    def answer(self, text: str) -> str:
        """Prints the answer as it comes."""
        parts = []
        for part in self.model.tokenizer.text(self.reply(text)):
            print(part, end="", flush=True)
            parts.append(part)
        print()
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        self.say_speed()
        return "".join(parts)

    def say_speed(self):
        count, seconds = self.prompt
        rest = self.times[2:]  # behind the first step, which compiles
        speed = f"; reply {(len(rest) - 1) / (rest[-1] - rest[0]):.0f} tokens/s" if len(rest) > 1 else ""
        console.print(f"[dim]prompt {count} tokens in {seconds:.2f} s{speed}[/dim]")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", help="one question; without it, a conversation")
    parser.add_argument("--model", help="a GGUF file, or a folder with config.json and safetensors files")
    parser.add_argument("--weights", choices=WEIGHTS, default="native", help="native: the codes of the file")
    parser.add_argument("--tokens", type=int, default=256, help="at most, of an answer")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token always")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    start = time.perf_counter()
    try:
        path = pathlib.Path(args.model) if args.model else checkpoints.default_model()
    except OSError as error:
        console.print(
            f"chat: {error}; here is the embedded model of the repository instead, which writes Python:"
        )
        import llama

        sys.argv = [sys.argv[0], "--size", "none"]
        return llama.main()
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    of = checkpoints.open_model(path, dtype, context=args.context, weights=WEIGHTS[args.weights])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(of.params)) / 1e6
    seconds = time.perf_counter() - start
    console.print(f"[dim]{path.name}: {size:.0f} MB of weights, opened in {seconds:.1f} s[/dim]")
    conversation = Conversation(of, args)
    if args.prompt:
        conversation.answer(args.prompt)
        return
    while text := console.input("[bold]> [/bold]"):
        conversation.answer(text)


if __name__ == "__main__":
    main()

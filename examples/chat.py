"""Talk to a language model in the quantised file that its authors published; every matrix product is a jaxgemv call.

    python examples/chat.py "What is the capital of France?"
    python examples/chat.py --model FILE.gguf | FOLDER

Without a prompt it is a conversation. The first time, the default model is downloaded: 98 MB.
"""

import argparse
import dataclasses
import pathlib
import time

import checkpoints
import decode
import jax
import jax.numpy as jnp
from rich.console import Console

console = Console(stderr=True)


class Conversation:
    """What has been said, and the model that has read it."""

    def __init__(self, of: checkpoints.Model, args):
        self.tokenizer, self.tokens, self.messages = of.tokenizer, args.tokens, []
        sampling = {"temperature": args.temperature or None, "top_p": args.top_p, "seed": args.seed}
        config = dataclasses.replace(of.config, activations=args.activations)
        self.decoder = decode.Decoder(of.params, config, steps=args.steps_per_call, **sampling)

    def reply(self, text: str):
        """Yields the ids of the answer."""
        self.messages.append({"role": "user", "content": text})
        tokens = self.tokenizer.chat(self.messages)
        new = tokens[self.decoder.keep(tokens) :]  # a template may say the past in other words
        if len(new) >= self.decoder.room:
            context = self.decoder.config.context
            raise SystemExit(f"chat: the conversation must fit in --context {context} tokens")
        self.read, self.times = len(new), [self.clock()]  # and when each token came
        for token in self.decoder.generate(new, self.tokens, self.tokenizer.stops):
            self.times.append(self.clock())
            yield token

    def clock(self) -> float:
        """Seconds, of which compiling takes none."""
        return time.perf_counter() - self.decoder.compiling

    def answer(self, text: str) -> str:
        """Prints the answer as it comes."""
        parts, compiled = [], self.decoder.compiling
        for part in self.tokenizer.text(self.reply(text)):
            print(part, end="", flush=True)
            parts.append(part)
        print()
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        begin, first, *rest = *self.times, self.clock()  # an answer may have no tokens
        speeds = [f"prompt {self.read} tokens, {self.read / (first - begin):.0f} tokens/s"]
        if len(rest) > 1:
            speeds.append(f"reply {(len(rest) - 1) / (rest[-2] - first):.0f} tokens/s")
        if self.decoder.compiling > compiled:
            speeds.append(f"compiled in {self.decoder.compiling - compiled:.1f} s")
        console.print(f"[dim]{'; '.join(speeds)}[/dim]")
        return "".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", help="one question; without it, a conversation")
    parser.add_argument("--model", help="a GGUF file, or a folder with config.json and safetensors files")
    parser.add_argument("--weights", choices=checkpoints.WEIGHTS, default="native")
    parser.add_argument("--activations", choices=decode.LINEAR, default="exact", help="int8: as llama.cpp")
    parser.add_argument("--tokens", type=int, default=256, help="at most, of an answer")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token always")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-per-call", type=int, default=1, metavar="N", help="tokens from one program")
    args = parser.parse_args()
    if min(args.tokens, args.steps_per_call) < 1:
        parser.error("--tokens and --steps-per-call must be at least 1")
    if not (args.temperature >= 0 and 0 < args.top_p <= 1):
        parser.error("--temperature must be at least 0, and --top-p above 0 and at most 1")

    start = time.perf_counter()
    try:
        path = pathlib.Path(args.model) if args.model else checkpoints.default_model()
    except OSError as error:
        console.print(f"chat: {error}; instead of it the model of this repository, which writes Python:")
        import llama

        return llama.write(b"def main(", seed=args.seed)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    weights = checkpoints.WEIGHTS[args.weights]
    try:
        of = checkpoints.open_model(path, dtype, context=args.context, weights=weights)
    except (OSError, ValueError, NotImplementedError) as error:
        raise SystemExit(f"chat: {error}") from None
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(of.params)) / 1e6
    seconds = time.perf_counter() - start
    console.print(f"[dim]{path.name}: {size:.0f} MB of weights, opened in {seconds:.1f} s[/dim]")
    conversation = Conversation(of, args)
    if args.prompt:
        conversation.answer(args.prompt)
        return
    try:
        while text := console.input("[bold]> [/bold]"):
            conversation.answer(text)
    except (EOFError, KeyboardInterrupt):
        console.print()


if __name__ == "__main__":
    main()

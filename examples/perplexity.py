"""How well a model predicts text it may not have seen: bits per byte, with its own codes and with others made of them.

    python examples/perplexity.py --model FILE.gguf --text FILE

The text is Python's own documentation unless another is given. Where `ik-llama-cpp-python` is installed, llama.cpp's
figure for the same file and tokens is beside ours; it rounds x to int8, and keys and values to float16.
"""

import argparse
import dataclasses
import pathlib
import pydoc_data.topics

import checkpoints
import decode
import jax
import jax.numpy as jnp
import model
import numpy as np
import tokens
from rich.console import Console
from rich.progress import track
from rich.table import Table

WINDOW, STRIDE = 512, 256  # tokens that are read, of which the last are scored

console = Console()


bits = jax.jit(model.bits, static_argnames=("config", "linear", "stride"))


def windows_of(tokenizer: tokens.Tokenizer, text: str, count: int) -> np.ndarray:
    """(windows, WINDOW + 1), of which each begins as the model's texts do."""
    ids, first = tokenizer.ids(text), tokenizer.ids(tokenizer.first)
    starts = range(0, len(ids) - WINDOW, STRIDE)[:count]
    if not starts:
        raise SystemExit(f"perplexity: the text must have more than {WINDOW} tokens; got {len(ids)}")
    return np.array([first + ids[i + len(first) : i + WINDOW + 1] for i in starts], np.int32)


def bits_per_byte(of: checkpoints.Model, windows: np.ndarray, title: str) -> float:
    """Of the last STRIDE tokens of each window, which no other has among its last."""
    linear = decode.LINEAR[of.config.activations]
    each = (
        bits(of.params, jnp.asarray(w), config=of.config, linear=linear, stride=STRIDE)
        for w in track(windows, title, console=console, transient=True)
    )
    return sum(map(float, each)) * STRIDE / scored_bytes(of, windows)


def scored_bytes(of: checkpoints.Model, windows: np.ndarray) -> int:
    return sum(len(of.tokenizer.tokenizer.decode(w[-STRIDE:]).encode()) for w in windows.tolist())


def llama_cpp(path: pathlib.Path, of: checkpoints.Model, windows: np.ndarray) -> float | None:
    """The same by llama.cpp, or None without it."""
    try:
        from ik_llama_cpp import IkLlama, _ctypes_api
    except ModuleNotFoundError:
        return None
    total = 0.0
    for window in track(windows.tolist(), "llama.cpp", console=console, transient=True):
        llama = IkLlama(str(path), n_ctx=WINDOW, n_threads=2, verbose=False)
        batch = _ctypes_api.llama_batch_init(1, 0, 1)
        for i, token in enumerate(window[:-1]):
            batch.n_tokens, batch.token[0], batch.pos[0], batch.logits[0] = 1, token, i, 1
            batch.n_seq_id[0], batch.seq_id[0][0] = 1, 0
            if _ctypes_api.llama_decode(llama.ctx, batch):
                raise RuntimeError("llama.cpp cannot decode")
            if i >= WINDOW - STRIDE:
                found = _ctypes_api.llama_get_logits_ith(llama.ctx, 0)
                logits = np.ctypeslib.as_array(found, shape=(vocabulary(of),)).astype(np.float64)
                total += np.logaddexp.reduce(logits) - logits[window[i + 1]]
        _ctypes_api.llama_batch_free(batch)
        llama.close()
    return total / np.log(2) / scored_bytes(of, windows)


def vocabulary(of: checkpoints.Model) -> int:
    return of.params["embedding"].shape[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a GGUF file, or a folder; the default model of chat.py otherwise")
    parser.add_argument("--text", type=pathlib.Path, help="a file of text")
    parser.add_argument("--windows", type=int, default=16, help=f"of {STRIDE} tokens each")
    kinds = {"nargs": "+", "choices": checkpoints.WEIGHTS}
    parser.add_argument("--weights", **kinds, default=["native", "int8", "int4", "nf4"])
    parser.add_argument("--activations", choices=decode.LINEAR, default="exact", help="int8: as llama.cpp")
    args = parser.parse_args()
    if args.windows < 1:
        parser.error("--windows must be at least 1")
    try:
        text = args.text.read_text() if args.text else "\n".join(pydoc_data.topics.topics.values())
    except (OSError, ValueError) as error:  # also of text that is not UTF-8
        parser.error(f"--text: {error}")

    path = pathlib.Path(args.model) if args.model else checkpoints.default_model()
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    table = Table("weights", "MB", "bits/byte", title=f"{path.name}, {args.activations} activations")
    windows = of = None
    for kind in args.weights:
        of = checkpoints.open_model(path, dtype, context=WINDOW, weights=checkpoints.WEIGHTS[kind])
        of = of._replace(config=dataclasses.replace(of.config, activations=args.activations))
        if windows is None:
            windows = windows_of(of.tokenizer, text, args.windows)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(of.params)) / 1e6
        table.add_row(kind, f"{size:.0f}", f"{bits_per_byte(of, windows, kind):.4f}")
    if path.is_file() and (theirs := llama_cpp(path, of, windows)) is not None:
        table.add_row("native, llama.cpp", "", f"{theirs:.4f}")
    console.print(table)


if __name__ == "__main__":
    main()

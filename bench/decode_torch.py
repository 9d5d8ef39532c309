"""What torch needs for tokens of a decoder of the same shape with random weights; run by decode_peers.py.

Compiled by torch.compile, with a static cache, and replayed as one CUDA graph a token. Weights are bfloat16, or int4 in
groups of 128 for `_weight_int4pack_mm`.
"""

import contextlib
import time

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import decode_peers, torch_systems

_WARM_UP = 3


def decode(cell: dict) -> dict:
    torch._dynamo.reset()
    torch.cuda.empty_cache()  # of what the cell before had
    torch.manual_seed(0)
    # Attention of few queries is fastest as products and a softmax, compiled, in 16 bits.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with torch.device("cuda"):
            decoder = Decoder(cell["config"], cell["weights"], cell["batch"], cell["size"])
        start = time.perf_counter()
        graph = _graph(decoder)
        compile_s = time.perf_counter() - start
        rounds = []
        for _ in range(1 + cell["rounds"]):
            decoder.position.fill_(cell["context"])
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(cell["tokens"]):
                graph.replay()
            torch.cuda.synchronize()
            rounds.append(1e6 * (time.perf_counter() - start) / cell["tokens"])
    return {"rounds_us": rounds[1:], "compile_s": compile_s}


def _graph(decoder):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):  # compiles
            decoder.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    return graph


class Decoder:
    """Weights, caches, and the last token of each sequence, all of which stay where they are."""

    def __init__(self, config: dict, kind: str, batch: int, size: int):
        self.config = config
        matrix = {"bf16": _dense, "int4": _int4}[kind]
        d, heads, kv_heads, width = (config[n] for n in ("d_model", "n_heads", "n_kv_heads", "head_dim"))
        self.layers = [
            {
                "attention_norm": torch.ones(d, dtype=torch.bfloat16),
                "qkv": matrix((heads + 2 * kv_heads) * width, d),
                "out": matrix(d, heads * width),
                "ffn_norm": torch.ones(d, dtype=torch.bfloat16),
                "gate_up": matrix(2 * config["d_ff"], d),
                "down": matrix(d, config["d_ff"]),
                "keys": torch.randn(batch, kv_heads, size, width, dtype=torch.bfloat16),
                "values": torch.randn(batch, kv_heads, size, width, dtype=torch.bfloat16),
            }
            for _ in range(config["n_layers"])
        ]
        self.embedding = _dense(config["vocab"], d)
        self.norm = torch.ones(d, dtype=torch.bfloat16)
        shared = config["tied"] and kind == "bf16"
        self.head = self.embedding if shared else matrix(config["vocab"], d)
        self.token = torch.zeros(batch, dtype=torch.int64)
        self.position = torch.zeros(1, dtype=torch.int64)
        # A part ends where the next product begins, so that nothing is left to fuse over its end; all layers share one.
        self._begin, self._layer, self._end = (
            torch.compile(f, fullgraph=True, dynamic=False) for f in (_begin, _layer, _end)
        )

    def step(self) -> None:
        config, first = self.config, self.layers[0]
        size = first["keys"].shape[2]
        x, turn, seen = self._begin(self.embedding, self.token, self.position, size, config)
        h = before = None
        for layer in self.layers:
            x, h = self._layer(x, h, before, layer, self.position, turn, seen, config)
            before = layer["down"]
        self.token.copy_(self._end(x, h, before, self.norm, self.head, config["eps"]))
        self.position.add_(1)


def _begin(embedding, token, position, size: int, config: dict):
    half = config["head_dim"] // 2
    frequency = config["rope_theta"] ** (-torch.arange(half, device=position.device) / half)
    angle = position * frequency
    seen = torch.arange(size, device=position.device) <= position
    return functional.embedding(token, embedding), (torch.cos(angle), torch.sin(angle)), seen


def _layer(x, h, before, layer: dict, position, turn, seen, config: dict):
    """From the h that the product `before` (of the layer before) is asked for, to that of its own."""
    if before is not None:
        x = x + _linear(h, before)
    batch, heads, kv_heads = len(x), config["n_heads"], config["n_kv_heads"]
    y = _linear(_rms_norm(x, layer["attention_norm"], config["eps"]), layer["qkv"])
    y = y.view(batch, heads + 2 * kv_heads, -1)
    qk, v = _rope(y[:, : heads + kv_heads], turn), y[:, heads + kv_heads :]
    q, k = qk[:, :heads], qk[:, heads:]
    keys, values = layer["keys"], layer["values"]
    keys.index_copy_(2, position, k[:, :, None])
    values.index_copy_(2, position, v[:, :, None])
    # Heads that share keys are rows of one matrix.
    q = q.reshape(batch, kv_heads, heads // kv_heads, -1)
    y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None])
    x = x + _linear(y.reshape(batch, -1), layer["out"])
    gate, up = _linear(_rms_norm(x, layer["ffn_norm"], config["eps"]), layer["gate_up"]).chunk(2, -1)
    return x, functional.silu(gate) * up


def _end(x, h, before, norm, head, eps: float):
    x = x + _linear(h, before)
    return _linear(_rms_norm(x, norm, eps), head).argmax(-1)


def _linear(x, w):
    if isinstance(w, tuple):
        return torch.ops.aten._weight_int4pack_mm(x, w[0], torch_systems._GROUP, w[1])
    return functional.linear(x, w)


def _rms_norm(x, weight, eps: float):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rope(x, turn):
    cos, sin = turn
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _dense(n: int, k: int):
    return torch.randn(n, k, dtype=torch.bfloat16) * k**-0.5


def _int4(n: int, k: int):
    tensors, _, _ = torch_systems._int4pack(n, k)
    return tuple(tensors)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        decode_peers.answer(decode)

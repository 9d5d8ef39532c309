"""What llama.cpp needs for tokens of a GGUF file, by one of its Python bindings; run by decode_peers.py.

The time is llama.cpp's own where the binding tells it, as a loop in Python over its logits would be slower.
"""

import contextlib

from bench import decode_peers


def decode(cell: dict) -> dict:
    made = {"xllamacpp": _xllamacpp, "ik_llama_cpp": _ik_llama_cpp, "llama_cpp": _llama_cpp}[cell["library"]]
    prompt = [1000 + i % 1000 for i in range(cell["context"])]  # any tokens will do
    one_round = made(cell, prompt)
    one_round()
    rounds = [one_round() for _ in range(cell["rounds"])]
    return {"rounds_us": [1e6 * seconds / tokens for tokens, seconds in rounds]}


def _xllamacpp(cell: dict, prompt: list[int]):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = cell["file"]
    params.n_ctx, params.n_parallel, params.fit_params, params.verbosity = cell["size"], 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = cell["threads"]
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    request = {
        "prompt": prompt,
        "n_predict": cell["tokens"],
        "ignore_eos": True,
        "cache_prompt": True,  # a round after the first reads it from there
        "temperature": 0,
    }

    def one_round():
        timings = server.handle_completions(request)["timings"]
        # The first token is the prompt's.
        return timings["predicted_n"] - 1, timings["predicted_ms"] / 1e3

    return one_round


def _ik_llama_cpp(cell: dict, prompt: list[int]):
    import ik_llama_cpp

    model = ik_llama_cpp.IkLlama(
        cell["file"], n_ctx=cell["size"], n_threads=cell["threads"], n_gpu_layers=0, verbose=False
    )

    def one_round():
        model.generate(prompt, max_tokens=cell["tokens"])
        timings = ik_llama_cpp._ctypes_api.llama_get_timings(model.ctx)
        if timings.n_eval < 2:
            raise RuntimeError("the model has ended its answer at once")
        return timings.n_eval, timings.t_eval_ms / 1e3

    return one_round


def _llama_cpp(cell: dict, prompt: list[int]):
    import time

    import llama_cpp

    model = llama_cpp.Llama(
        cell["file"], n_ctx=cell["size"], n_threads=cell["threads"], n_gpu_layers=0, verbose=False
    )

    def one_round():
        model.reset()
        model.eval(prompt)
        start = time.perf_counter()
        for _ in range(cell["tokens"]):
            model.eval([1000])
        return cell["tokens"], time.perf_counter() - start

    return one_round


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        decode_peers.answer(decode)

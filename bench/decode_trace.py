"""Where the time of a step goes, by a profile: in our kernels, in XLA's, or nowhere."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

_LONGEST = 8  # kernels by name


class Span(NamedTuple):
    name: str
    ours: bool
    begin: float  # ns
    end: float


class Split(NamedTuple):
    """Microseconds a step. None where the profile has no kernels."""

    ours_us: float | None
    xla_us: float | None
    idle_us: float | None
    kernels: dict[str, list[float]]  # the longest: how many, and their microseconds together


def profile(run: Callable[[], object], program: str | None) -> list[list[Span]]:
    """What each device did in run(). program: on a CPU, the text of what it runs."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
        if program is None:
            devices = [_of_gpu(plane) for plane in planes if plane.name.startswith("/device:GPU")]
        else:
            devices = [_of_cpu(planes, program)]
        return [spans for spans in devices if spans]


def _of_gpu(plane) -> list[Span]:
    """Kernels and copies; other lines of the plane say the same again, by module, say."""
    return [
        Span(_short(event.name), "jaxgemv" in event.name, event.start_ns, event.start_ns + event.duration_ns)
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def _short(name: str) -> str:
    """A kernel without what its template was given."""
    return re.sub(r"<.*|\(.*", "", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[:80]


def _of_cpu(planes, program: str) -> list[Span]:
    """Operations of the program, on the threads that begin them. Idle is also when these wait for others."""
    ours = set(re.findall(r'%?([\w.-]+) = [^\n]*custom_call_target="jaxgemv', program))
    all_names = set(re.findall(r"%?([\w.-]+) = (?![^\n]* while\()", program))  # a loop is what runs in it
    return [
        Span(event.name, event.name in ours, event.start_ns, event.start_ns + event.duration_ns)
        for plane in planes
        for line in plane.lines
        for event in line.events
        if event.name in all_names
    ]


def split(devices: list[list[Span]], steps: int, us: float) -> Split:
    """Of a step that takes so many microseconds when nothing looks; means over the devices."""
    if not devices:
        return Split(None, None, None, {})
    scale = 1e-3 / (steps * len(devices))
    busy = scale * sum(covered(spans) for spans in devices)
    ours = scale * sum(covered([s for s in spans if s.ours]) for spans in devices)
    counts, times = Counter(), Counter()
    for spans in devices:
        for s in spans:
            counts[s.name] += 1
            times[s.name] += s.end - s.begin
    kernels = {
        name: [round(counts[name] / (steps * len(devices)), 2), round(scale * ns, 2)]
        for name, ns in times.most_common(_LONGEST)
    }
    return Split(ours, busy - ours, max(0.0, us - busy), kernels)


def covered(spans: list[Span]) -> float:
    """Nanoseconds in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for s in sorted(spans, key=lambda s: s.begin):
        total += max(0.0, s.end - max(s.begin, until))
        until = max(until, s.end)
    return total

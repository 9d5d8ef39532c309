"""A few hundred combinations of values in which every two values of different dimensions meet."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence


def covering(
    dimensions: Mapping[str, Sequence],
    seed: int,
    fewest: int,
    vary: Sequence[str],
    base: Callable[[dict], bool],
) -> list[dict]:
    """At least `fewest` combinations where there are so many; each seed has its own, the same everywhere.

    All pairs take about as many as the two largest dimensions have. The others are some of these, for which `base`
    holds, with new values in the dimensions to `vary`.
    """
    from allpairspy import AllPairs  # here, since all else in bench does without

    rng = random.Random(seed)
    names = sorted(dimensions, key=lambda name: -len(dimensions[name]))  # the largest first takes the fewest
    shuffled = [rng.sample(list(dimensions[name]), len(dimensions[name])) for name in names]
    pairs = [dict(zip(names, values)) for values in AllPairs(shuffled)]
    _scatter(pairs, dimensions, rng)
    found = {tuple(each[name] for name in dimensions): None for each in pairs}
    bases = [each for each in pairs if base(each)] or pairs
    for _ in range(20 * fewest):  # enough to find nearly all that there are
        if len(found) >= fewest:
            break
        each = rng.choice(bases) | {name: rng.choice(dimensions[name]) for name in vary}
        found[tuple(each[name] for name in dimensions)] = None
    return [dict(zip(dimensions, values)) for values in found]


def _scatter(combinations: list[dict], dimensions: Mapping[str, Sequence], rng: random.Random) -> None:
    """Draws all values anew that no pair needs: AllPairs repeats one value wherever any would do."""

    def pairs_of(each: dict, name: str) -> list[frozenset]:
        return [frozenset({(name, each[name]), (other, each[other])}) for other in each if other != name]

    # Each pair counts once for either of its values.
    count = Counter(pair for each in combinations for name in each for pair in pairs_of(each, name))
    for each in rng.sample(combinations, len(combinations)):
        for name in rng.sample(list(each), len(each)):
            before = pairs_of(each, name)
            if all(count[pair] > 2 for pair in before):
                each[name] = rng.choice(dimensions[name])
                for pair in before:
                    count[pair] -= 2
                for pair in pairs_of(each, name):
                    count[pair] += 2

"""A few hundred combinations of values in which every two values of different dimensions meet."""

import random
from collections.abc import Callable, Mapping, Sequence


def covering(
    dimensions: Mapping[str, Sequence],
    seed: int,
    fewest: int,
    vary: Sequence[str],
    base: Callable[[dict], bool] = lambda combination: True,
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
    found = {tuple(each[name] for name in dimensions): None for each in pairs}
    bases = [each for each in pairs if base(each)] or pairs
    for _ in range(20 * fewest):  # enough to find nearly all that there are
        if len(found) >= fewest:
            break
        each = rng.choice(bases) | {name: rng.choice(dimensions[name]) for name in vary}
        found[tuple(each[name] for name in dimensions)] = None
    return [dict(zip(dimensions, values)) for values in found]

"""Fractions of all combinations of parameters."""

from itertools import combinations, product


def covering(*choices):
    """Few combinations of a value of each parameter, in which any two values of two parameters occur together.

    Each is the one of all combinations with the most pairs that none before it has.

    >>> covering("ab", "cd", "ef")
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    choices = [list(values) for values in choices]
    pairs_of = {
        places: set(combinations(enumerate(places), 2)) for places in product(*(range(len(some)) for some in choices))
    }
    chosen, missing = [], set().union(*pairs_of.values())
    while missing:
        best = max(pairs_of, key=lambda places: len(pairs_of[places] & missing))
        missing -= pairs_of[best]
        chosen.append(tuple(values[place] for values, place in zip(choices, best, strict=True)))
    return chosen

"""Fractions of all combinations of parameters."""

from itertools import combinations, product


def covering(*parameters):
    """Few combinations of a value of each parameter, in which any two values of two parameters occur together.

    >>> covering("ab", "cd", "ef")
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    pairs_of = {values: set(combinations(enumerate(values), 2)) for values in product(*parameters)}
    chosen, missing = [], set().union(*pairs_of.values())
    while missing:
        chosen.append(max(pairs_of, key=lambda values: len(pairs_of[values] & missing)))
        missing -= pairs_of[chosen[-1]]
    return chosen

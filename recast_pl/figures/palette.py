"""Colours of curves: one for each reward or strategy, in their order, the same in every figure.

Those of Okabe and Ito, "Color universal design", 2008, that stand out on white; black is a baseline's.
"""

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def reward_colour(place: int) -> str:
    """Of the reward at a place in the configuration.

    >>> reward_colour(0) == reward_colour(6)
    True
    """
    return COLOURS[1 + place % (len(COLOURS) - 1)]

"""What revealed block masks tell: attacks on the shuffle, each beside its chance (Comet, "Oblivious shuffle").

The observer is either party. It sees which positions are computed of every token and layer, under a secret shuffle of the
layer's blocks that is renewed every `period` tokens. It knows the masks of public text. The strongest observer is the model's
owner, who can compute the masks of any text that it guesses: what it lacks is the client's text, and the shuffle.

Counts, and overlaps between tokens of a period, are the same under every shuffle: attacks on them take masks in the model's order.
`identify` plays the shuffle. No attack here is the best there is: a leak that is measured is there, one that is not may be.
"""

from .counts import name_token
from .overlaps import Confirmed, confirm, confirm_against, name_after_known, same_token
from .places import identify
from .rate import Rate
from .shuffle import Masks, Renewal, View, renewed_share, watch

__all__ = [
    "Confirmed",
    "Masks",
    "Rate",
    "Renewal",
    "View",
    "confirm",
    "confirm_against",
    "identify",
    "name_after_known",
    "name_token",
    "renewed_share",
    "same_token",
    "watch",
]

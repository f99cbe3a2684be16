"""A third party for stock SPU: the server of SPU's TrustedThirdParty Beaver protocol, whose client is in the `spu` wheel.

Every party draws its shares of masks from a seed of its own, by AES, and sends the seed encrypted under this server's key. What
makes the shares a multiplication triple (and the like) is one array that only the server can compute, because only it can expand
all the seeds: the "adjustment", which one party, of the adjust rank, asks for and adds to its share.

Who learns what, if all follow the protocol:

- the server: the seeds, hence all masks, and which operations run on how many elements, when. No input, weight, opening or output.
- the adjusting party: the adjustments. Each has, added to it, the other parties' shares of a mask that is used for nothing else,
  so it is uniform to that party. The encrypted seeds tell it nothing.
- the other parties: nothing.

Together with any one party the server can unmask what the parties open, so it must collude with none. A party that deviates (asks
for other adjustments than the protocol has it ask for) learns masks of the others: the protocol, SPU's as it stands, is for
parties that follow it. One defect of SPU's client that leaks even so is refused here, see `checks.py`.
"""

"""A request that is not served: what the client is told."""

BAD_REQUEST = 1
BAD_SEED = 2


class Refusal(Exception):
    """The request cannot or must not be served; `code` is of the protocol's error codes, the text reaches SPU's user.

    Not a `UserError`: the one who can mend it is at the other end of the connection.
    """

    def __init__(self, text: str, code: int = BAD_REQUEST):
        super().__init__(text)
        self.code = code

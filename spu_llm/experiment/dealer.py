"""The dealer's process: deals for whatever generation both parties ask for, and serves what it dealt."""

from __future__ import annotations

import json
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..comet.terms import SparseTerms
from ..errors import UserError
from ..generation.material import AheadDealer, Facts, deal_generation
from ..models.published import Published
from ..network.certificates import Identity
from ..progress import Progress, silent
from ..runtime.service import Dealing, MaterialServer, Wanted
from ..runtime.supply import FIRST_RUN
from .files import write_whole
from .sparsity import blind_maker

_ABANDONED = 900.0  # seconds without a record fetched
_FAREWELL = 60.0
_RECORDS = "records"  # how many there are in all, once the last is dealt


def serve_material(
    address: str, identity: Identity, folder: Path, ahead: int | None = None, progress: Progress = silent
) -> MaterialServer:
    """A server of material at host:port, dealt to `folder` no more than `ahead` passes before parties have fetched it.

    The dealer learns the model's shape and table sizes and the number of tokens of each pass. Enter the server to start it.
    """
    return MaterialServer(address, identity, folder, _Dealer(folder, ahead, progress).open)


@dataclass(frozen=True)
class _Dealer:
    folder: Path
    ahead: int | None
    progress: Progress

    def open(self, wanted: Wanted) -> Dealing:
        """Start to deal for a session, or go on serving what an earlier life of this dealer left. UserError for no generation."""
        folder = self.folder / wanted.session
        if folder.exists():
            return _left(folder)
        try:
            asked = json.loads(wanted.description)
            model, facts = Published.from_json(asked["model"].encode()), Facts(**asked["facts"])
            terms = None if asked["sparsity"] is None else SparseTerms.from_json(asked["sparsity"].encode())
            if terms is not None:
                terms.check(model.config, terms.renew)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"session {wanted.session}: no generation is described; use the same version everywhere") from None
        dealer, dealing = AheadDealer(model, facts, folder, blind_maker(terms)), Dealing(folder)
        threading.Thread(target=self._deal, args=(dealer, facts, dealing), daemon=True, name="dealer").start()
        return dealing

    def _deal(self, dealer: AheadDealer, facts: Facts, dealing: Dealing) -> None:
        try:
            deal_generation(dealer, facts, self.ahead, self.progress, _ABANDONED)
            records = dealer.runs + FIRST_RUN
            write_whole(dealing.folder / _RECORDS, str(records))
            dealing.records = records
        except Exception as error:  # whatever it is, the parties must not wait for more
            dealing.error = str(error).splitlines()[0] if isinstance(error, UserError) else f"the dealer failed: {error!r}"
            if not isinstance(error, UserError):
                raise
        finally:
            self._forget(dealer)

    def _forget(self, dealer: AheadDealer) -> None:
        """Delete a session's keys and records when both parties have all of them, or have stopped to fetch any."""
        with suppress(UserError):
            dealer.wait(1, _ABANDONED)
        time.sleep(_FAREWELL)  # a party may still ask whether that was all
        shutil.rmtree(dealer.folder, ignore_errors=True)


def _left(folder: Path) -> Dealing:
    """What lies in a folder whose dealer has ended: all of it can be served, but masks that went with the dealer deal no more."""
    try:
        return Dealing(folder, records=int((folder / _RECORDS).read_text()))
    except (OSError, ValueError):
        return Dealing(folder, error="the dealer ended before all was dealt, and its masks with it; start the parties again")

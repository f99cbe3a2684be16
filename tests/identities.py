"""Certificates for tests: right ones, ones of another authority, and ones that have expired or are not valid yet."""

import shutil
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from spu_llm.network import certificates
from spu_llm.network.certificates import Identity, make_certificates


class Unchecked(Identity):
    """An identity that does not see its own faults, so that its peer has to."""

    def check(self):
        pass


@contextmanager
def shifted(days):
    """Certificates made inside are made so many days from now."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=days)

    before, certificates.datetime = certificates.datetime, Shifted
    try:
        yield
    finally:
        certificates.datetime = before


def make_all(folder: Path) -> Path:
    """Folders `right`, `other` (another authority's), `expired` and `early` (of right's authority), each with all roles."""
    with shifted(days=-100):
        make_certificates(folder / "right", roles=(), days=1000)
    for name in ("expired", "early"):
        shutil.copytree(folder / "right", folder / name)
    make_certificates(folder / "right")
    make_certificates(folder / "other")
    with shifted(days=-100):
        make_certificates(folder / "expired")
    with shifted(days=100):
        make_certificates(folder / "early")
    return folder

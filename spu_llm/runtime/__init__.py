"""Running programs between parties: sessions, protocols, traffic."""

from .program import Program, Slot
from .protocol import ROLES, ProtocolConfig
from .session import Phase, Session

__all__ = ["ROLES", "Phase", "Program", "ProtocolConfig", "Session", "Slot"]

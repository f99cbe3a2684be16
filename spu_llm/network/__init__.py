"""Network profiles and what they make of a program's traffic."""

from .profile import NetworkProfile

__all__ = ["NetworkProfile"]

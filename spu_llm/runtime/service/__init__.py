"""Dealt material on its way from the dealer's process to the parties' own folders, ahead of time, over mutual TLS."""

from .puller import Limits, MaterialPuller
from .server import Dealing, MaterialServer
from .wire import Wanted

__all__ = ["Dealing", "Limits", "MaterialPuller", "MaterialServer", "Wanted"]

"""AR-HE: a server decodes under CKKS on its own, with every bootstrap placed before the run (arXiv 2610.04912)."""

from .calibrate import calibrate
from .executor import Decoded, decode
from .graph import Options, Program, build_program
from .meaning import Meaning, Ranges
from .parameters import PAPER, CkksParameters
from .polynomials import Degrees
from .schedule import Schedule, place
from .simulator import Simulator

__all__ = [
    "PAPER",
    "CkksParameters",
    "Decoded",
    "Degrees",
    "Meaning",
    "Options",
    "Program",
    "Ranges",
    "Schedule",
    "Simulator",
    "build_program",
    "calibrate",
    "decode",
    "place",
]

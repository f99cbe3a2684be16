"""One core a party where cores are few.

SPU has Eigen multiply matrices in four OpenMP threads, whatever the machine has; they wait for each other in a busy loop. Where
the parties have fewer cores than that, the loop costs some 60 ms for every product of more than one row (on two cores a
product of 4 x 768 and 768 x 768 takes 60 ms instead of 1).
"""

from __future__ import annotations

import ctypes
import os

_EIGEN_THREADS = 4


def keep_to_one_core(parties: int) -> None:
    """Have OpenMP use this thread alone for whatever the calling thread starts, where `parties` have too few cores for more."""
    if len(os.sched_getaffinity(0)) >= _EIGEN_THREADS * parties:
        return
    try:
        openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return  # a build of SPU with another OpenMP is slower, not wrong
    openmp.omp_set_max_active_levels(0)

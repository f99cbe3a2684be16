"""What the owner measured of its model before a run."""

from __future__ import annotations

from ..models import Checkpoint
from ..models.calibration import Calibration
from ..models.calibration_file import calibration_for
from ..models.plan_check import RangeReport
from ..models.source import content_digest
from ..progress import Progress
from ..soal.prepared import Prepared, load_prepared
from .schema import Experiment


def measured(experiment: Experiment, checkpoint: Checkpoint, progress: Progress) -> tuple[Calibration, RangeReport]:
    """What the owner measured: from the prepared file if there is one."""
    if experiment.soal is None:
        return calibration_for(experiment.model, checkpoint, progress)
    found = prepared_file(experiment)
    return found.calibration, found.ranges


def prepared_file(experiment: Experiment) -> Prepared:
    assert experiment.soal is not None
    return load_prepared(experiment.soal, content_digest(experiment.model.locate()))

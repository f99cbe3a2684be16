"""Experiments described by YAML: run, measured, reported."""

from .report import render_report
from .runner import run_experiment
from .schema import Experiment, load_experiment

__all__ = ["Experiment", "load_experiment", "render_report", "run_experiment"]

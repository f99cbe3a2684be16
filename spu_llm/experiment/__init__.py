"""Experiments described by YAML: run, measured, reported."""

from .report import render_report
from .runner import run_experiment
from .schema import Experiment, Runs, load_experiment

__all__ = ["Experiment", "Runs", "load_experiment", "render_report", "run_experiment"]

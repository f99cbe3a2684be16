"""One page with every table and plot: experiments are run, or their committed results read, as their manifests say."""

from .manifest import EXPERIMENTS, SYSTEMS, Size, Study, choose, load_studies
from .page import Page, check_study, render_page
from .run import Runs, reproduce

__all__ = [
    "EXPERIMENTS", "SYSTEMS", "Page", "Runs", "Size", "Study", "check_study", "choose", "load_studies", "render_page",
    "reproduce",
]  # fmt: skip

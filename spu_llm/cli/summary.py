"""What a generation cost, in a few lines."""

from __future__ import annotations

from typing import Any

_SUSPECT = 0.02  # share of the largest logit; fixed point that fits errs by about 0.0005


def summary(metrics: dict[str, Any]) -> str:
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
    for name, run in metrics.get("variants", {}).items():
        times = f", {run['speedup']:.2f}x the baseline's decoding speed" if run.get("speedup") else ""
        lines.append(f"{name}: {run['decode']['seconds_per_token']:.1f} s a token{times}")
    if "comet" not in metrics and accuracy["max_logit_error"] > _SUSPECT * accuracy["max_logit"]:
        lines.append(
            f"warning: {metrics['ring']} with {metrics['fraction_bits']} fraction bits does not hold this model's values; "
            "use FM128 with 26 fraction bits, or a prefix that takes its outliers (docs/troubleshooting.md)"
        )
    return "\n".join([*lines, f"trust: {metrics['trust']}"])

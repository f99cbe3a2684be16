"""Configs: what is refused, and in which words."""

import pytest

from spu_llm.errors import UserError
from spu_llm.experiment.schema import CONFIGS, load_experiment

GOOD = """
model: smollm2
network: lan
generation: {prompt: hello, new_tokens: 2}
"""


def write(tmp_path, text):
    path = tmp_path / "experiment" / "x.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_experiments_load(path):
    load_experiment(path)


def test_overrides_and_baseline(tmp_path):
    path = write(tmp_path, GOOD + "baseline: {protocol: {ring: FM128}, network: wan}\n")
    runs = load_experiment(path, ("protocol.fraction_bits=16", "generation.sampling.top_k=5", "network=none"))
    protocol, baseline = runs.main.protocol, runs.baseline
    assert (protocol.ring, protocol.fraction_bits, runs.main.network.name) == ("FM64", 16, "none")
    assert runs.main.generation.sampling.top_k == 5
    assert (baseline.protocol.ring, baseline.protocol.fraction_bits, baseline.network.name) == ("FM128", 16, "wan")


def test_variants_differ_in_what_they_name(tmp_path):
    variants = "variants: {wide: {protocol: {ring: FM128}}, far: {network: wan, generation: {new_tokens: 3}}}\n"
    runs = load_experiment(write(tmp_path, GOOD + "baseline: {network: none}\n" + variants))
    assert [run.network.name for run in runs] == [runs.main.network.name, "none", runs.main.network.name, "wan"]
    assert runs.variants["wide"].protocol.ring == "FM128" and runs.variants["far"].generation.new_tokens == 3
    assert all(run.alone() == run for run in (runs.baseline, *runs.variants.values()))


def test_files_beside_the_config_come_first(tmp_path):
    (tmp_path / "network").mkdir()
    (tmp_path / "network" / "lan.yaml").write_text("{name: lan, mode: model, bandwidth_mbps: 7}")
    main = load_experiment(write(tmp_path, GOOD)).main
    assert main.network.bandwidth_mbps == 7


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (GOOD, ("generation.promt=x",), "unknown key generation.promt; known here: prompt, new_tokens, capacity"),
        (GOOD, ("protocol.ring=FM65",), "protocol.ring is 'FM65': input should be 'FM64' or 'FM128'"),
        (GOOD, ("protocol={name: ABY3, parties: 2}",), "ABY3 runs between 3 parties, not 2"),
        (GOOD, ("model=gpt5",), "unknown model 'gpt5'; known: kjv, kjv-draft"),
        (
            GOOD,
            ("network=moon",),
            "unknown network 'moon'; known: 100mbps, 100mbps_link, 5gbps, 5gbps_link, lan, lan_link, none, wan, wan_link",
        ),
        (GOOD, ("generation.new_tokens=0",), "generation.new_tokens is 0"),
        (GOOD, ("baseline=3",), "baseline is 3: give a mapping of settings"),
        (GOOD, ("variants={a: {network: moon}}",), "with variant a: unknown network 'moon'"),
        (GOOD, ("variants={main: {network: wan}}",), "variants.main"),
        (GOOD, ("variants={a: {variants: {b: {}}}}",), "with variant a: variants stands beside it, not in it"),
        (GOOD, ("generation",), "write it as key.key=value"),
        (GOOD, ("model.name=x",), "model is not a section"),
        (GOOD, ("generation.prompt={",), "not valid YAML; quote it"),
        ("model: smollm2\nnetwork: lan\n", (), "generation is missing; add it"),
        ("- a\n- b\n", (), "holds list, not a mapping"),
        ("a: [1\nb: }", (), "line 2: not valid YAML"),
        ("a: !!python/object/apply:os.system [id]", (), "not valid YAML"),
        (GOOD + "baseline: 3\n", (), "baseline is 3"),
        (GOOD, ("decoding.draft_model=gpt5",), "unknown model 'gpt5'"),
        (GOOD, ("decoding.draft_model={name: x, patch: y}",), "patch; known here: name, path"),
        (GOOD, ("decoding.draft_length=0",), "draft_length"),
        (GOOD, ("decoding={draft_lenght: 4}",), "unknown key decoding.draft_lenght; known here: mode, draft_model, draft_length"),
        (GOOD, ("decoding={disclosure: flags}", "processes=true"), "disclosure flags runs with the parties as threads only"),
        (GOOD, ("decoding={draft_length: 4}", "processes=true", "ops=plugin"), "draft with a model"),
        (GOOD, ("decoding={draft_model: smollm2}", "processes=true", "ops=plugin"), "set decoding.draft_length to a number"),
        (GOOD, ("decoding={}", "material=x", "ops=plugin"), "material dealt ahead is for passes of one token"),
        (GOOD + "baseline: {protocol: {ring: FM0}}\n", (), "with baseline: protocol.ring is 'FM0'"),
    ],
)
def test_refusals(tmp_path, text, overrides, message):
    with pytest.raises(UserError) as caught:
        load_experiment(write(tmp_path, text), overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="no such config"):
        load_experiment(tmp_path / "none.yaml")

"""What an experiment's YAML may say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import UserError
from ..generation import SamplingConfig
from ..models.source import ModelConfig
from ..network import NetworkProfile
from ..network.certificates import Identity
from ..post.draft_length import DRAFT_LENGTHS
from ..runtime import ProtocolConfig
from ..soal.prepared import read_prefix

_NARROW_BITS = 18
_LONGEST_DRAFT = 64  # at which no draft is accepted whole

Disclosure = Literal["distribution", "flags", "all-flags"]
DISCLOSURES = get_args(Disclosure)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""The configurations that come with the project; a config elsewhere may have folders of its own beside it."""


class GenerationConfig(BaseModel):
    """What is generated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prompt: str | None = Field(default=None, min_length=1)
    """The client's text. Where parties are processes of their own, only the client's config needs it."""

    new_tokens: int = Field(default=16, ge=1)
    """Tokens to generate, at most: an end token stops before."""

    capacity: int | None = Field(default=None, ge=2)
    """Cache rows: prefix, prompt and new tokens together; left out, just enough."""

    use_prefix: bool = True
    """Whether the model's prefix stands before the prompt."""

    sampling: SamplingConfig = SamplingConfig()
    """How the client chooses tokens; the client's config counts."""


class DecodingConfig(BaseModel):
    """How tokens are made, if not one by one: drafted by the client in the clear and verified in one secure pass (POST)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    mode: Literal["post"] = "post"
    """There is one way so far."""

    draft_model: ModelConfig | Literal["lookup"] = "lookup"
    """A model's name or YAML, public to the client and with the target's tokenizer; or `lookup`, which repeats what the text has
    said before."""

    draft_length: Annotated[int, Field(ge=1, le=_LONGEST_DRAFT)] | Literal["auto"] = "auto"
    """Drafted tokens a pass; `auto` goes by what passes cost and what is accepted."""

    disclosure: Disclosure = "distribution"
    """What is opened of a pass: the client's logits up to the first rejection, or verdicts of tests under encryption up to it, or
    all verdicts; see docs/leakage.md."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of the drafts there may be, beside none."""
        return DRAFT_LENGTHS if self.draft_length == "auto" else (self.draft_length,)

    @property
    def steady(self) -> bool:
        """Whether every draft has the same length."""
        return self.draft_model != "lookup" and len(self.sizes) == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest draft, for which the cache must have room behind the text."""
        return max(self.sizes)


class SparsityConfig(BaseModel):
    """That only the heads and blocks of neurons are computed that predictors choose (Comet), for models of the OPT family."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    file: Path | None = None
    """Of `spu-llm prepare comet`, by its path or by its name in configs/comet; between processes it stands in the owner's config
    alone."""

    renew: Annotated[int, Field(ge=1)] | Literal["token", "request"] = "token"
    """`token`: a fresh secret order of blocks for every token, by which nothing is told, and no head is skipped. A number: tokens
    that an order of heads and blocks serves before weights are shuffled anew; `request`: the whole generation. These are faster,
    and what they tell stands in docs/leakage.md."""

    count: Literal["constant", "variable"] = "constant"
    """`constant`: as many blocks of a layer for every token. `variable`: those that score above the threshold, filled up to the
    next of a few sizes: fewer, but how many names tokens."""

    @model_validator(mode="after")
    def _lasting(self) -> SparsityConfig:
        if self.count == "variable" and self.renew == "token":
            raise ValueError(
                "count variable tells more than a fresh order for every token hides: set renew to a number of tokens, or leave "
                "count out"
            )
        return self

    @property
    def tokens(self) -> int | None:
        """Tokens that shuffled weights serve; None where they are never shuffled anew."""
        return self.renew if isinstance(self.renew, int) else None


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and not any(map(str.isspace, text)) and port.isdecimal() and int(port) < 1 << 16


def _checked_address(text: str) -> str:
    if not is_address(text):
        raise ValueError("give HOST:PORT")
    return text


def _checked_name(text: str) -> str:
    if text in ("main", "baseline") or not re.fullmatch(r"\w[\w-]*", text):  # finished runs are files of that name
        raise ValueError("name a variant by letters, digits, _ and -, and neither main nor baseline")
    return text


_Address = Annotated[str, AfterValidator(_checked_address)]


class PartiesConfig(BaseModel):
    """Where each role's process is, for `spu-llm party` and `spu-llm dealer`: HOST:PORT, one's own being where it listens."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    client: _Address
    """HOST:PORT of the process that has the prompt."""

    owner: _Address
    """HOST:PORT of the process that has the weights."""

    helper: _Address | None = None
    """HOST:PORT of the third party, for protocols of three."""

    dealer: _Address | None = None
    """HOST:PORT of `spu-llm dealer`, for ops plugin."""

    certificates: Path
    """Folder with this role's own files (`spu-llm certificates`)."""

    timeout: float = Field(default=30.0, ge=3)
    """Seconds without a sign of life after which a party is given up."""

    patience: float = Field(default=120.0, ge=1)
    """Seconds to wait for the others to start."""

    prefetch: bool = False
    """Whether all material is fetched before the first pass; it is fetched ahead of each pass otherwise."""

    def identity(self, role: str) -> Identity:
        return Identity(self.certificates, role)


class Experiment(BaseModel):
    """One run, and what runs beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: ModelConfig
    """The owner's model; a name, a path of a YAML file, or the settings themselves."""

    ops: Literal["stock", "generic", "plugin"] = "stock"
    """SPU's own operations, these with functions narrowed to ranges (generic), or the plugin's dealer protocols (on SEMI2K)."""

    protocol: ProtocolConfig = ProtocolConfig()
    """SPU's protocol and numbers."""

    network: NetworkProfile
    """What lies between the parties; a name, a path of a YAML file, or the settings themselves."""

    generation: GenerationConfig
    """Prompt and length."""

    decoding: DecodingConfig | None = None
    """Drafts (POST); left out, tokens are made one by one."""

    sparsity: SparsityConfig | None = None
    """Active heads and blocks (Comet); left out, all are computed."""

    material: Path | None = None
    """A folder of correlated randomness dealt ahead (`spu-llm deal`); left out, a dealer is at hand."""

    soal: Path | None = None
    """The file of `spu-llm prepare soal`, whose prefix, ranges and references stand for those of the model's config."""

    processes: bool = False
    """Whether the parties (and the dealer) are processes of this machine instead of threads, as they are on networks of mode
    `link`."""

    parties: PartiesConfig | None = None
    """Where processes are that are started one by one."""

    baseline: dict[str, Any] | None = None
    """The settings in which a second run, made in the same go, differs from this one."""

    variants: dict[Annotated[str, AfterValidator(_checked_name)], dict[str, Any]] = {}
    """The settings in which further runs differ from this one, by name."""

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        if self.ops == "plugin" and (self.protocol.name, self.protocol.world_size) != ("SEMI2K", 2):
            given = f"{self.protocol.name} between {self.protocol.world_size} parties"
            raise ValueError(f"ops plugin runs on SEMI2K between 2 parties, not on {given}; change protocol or set ops: stock")
        if self.ops == "generic" and self.protocol.fraction_bits < _NARROW_BITS:
            raise ValueError(
                f"ops generic has coefficients of {_NARROW_BITS} fraction bits, protocol only {self.protocol.fraction_bits}; raise "
                "protocol.fraction_bits or set ops: stock"
            )
        if self.material is not None and self.ops != "plugin":
            raise ValueError("material is dealt for ops plugin only; leave it out or set ops: plugin")
        if self.soal is not None and self.ops != "stock" and not self.generation.use_prefix:
            raise ValueError("soal's ranges hold after its prefix only; leave it out or set generation.use_prefix: true")
        if self.sparsity is not None:
            self._check_sparsity(self.sparsity)
        if self.decoding is not None and self.material is not None:
            raise ValueError("material dealt ahead is for passes of one token, not for drafts; leave material or decoding out")
        if self.decoding is not None and self.apart and self.decoding.disclosure != "distribution":
            raise ValueError(
                f"disclosure {self.decoding.disclosure} runs with the parties as threads only; set decoding.disclosure: "
                "distribution, or processes: false and a network of mode model"
            )
        if self.decoding is not None and self.apart and self.ops == "plugin" and not self.decoding.steady:
            raise ValueError(
                "processes have material dealt ahead, for passes of one size: draft with a model, and set decoding.draft_length to "
                "a number"
            )
        if self.apart and self.ops == "generic":
            raise ValueError("ops generic runs with the parties as threads only; set ops: plugin or stock, or processes: false")
        if self.parties is not None and self.parties.dealer is None and self.ops == "plugin":
            raise ValueError("parties.dealer is missing: ops plugin needs the address of `spu-llm dealer`")
        if self.apart and self.material is not None:
            raise ValueError("processes fetch their material from the dealer's process; leave material out")
        return self

    def _check_sparsity(self, sparsity: SparsityConfig) -> None:
        if sparsity.file is None and self.parties is None:
            raise ValueError("sparsity.file is missing; name a file of `spu-llm prepare comet`")
        if self.ops == "generic" or self.material is not None:
            raise ValueError("sparsity has a dealer at hand if any: leave material out, and set ops: plugin or stock")
        if self.apart and (self.ops != "plugin" or sparsity.count != "constant"):
            raise ValueError(
                "between processes sparsity is for ops plugin and a constant count: set ops: plugin and leave sparsity.count out, "
                "or set processes: false and a network of mode model"
            )
        if sparsity.count == "variable" and self.ops != "plugin":
            raise ValueError(f"sparsity.count variable is for ops plugin, not {self.ops}; leave it out or set ops: plugin")

    @property
    def apart(self) -> bool:
        """Whether the parties are processes."""
        return self.processes or self.parties is not None or self.network.mode == "link"

    @property
    def prefix(self) -> tuple[int, ...]:
        """The public tokens computed ahead of time."""
        return self.model.prefix if self.generation.use_prefix else ()

    def alone(self) -> Experiment:
        """This run without what stands beside it."""
        return self.model_copy(update={"baseline": None, "variants": {}})


@dataclass(frozen=True)
class Runs:
    """What an experiment runs in one go: its own settings, its baseline's, and its variants' by name."""

    main: Experiment
    baseline: Experiment | None = None
    variants: dict[str, Experiment] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Experiment]:
        yield from filter(None, (self.main, self.baseline, *self.variants.values()))


def load_experiment(path: Path, overrides: tuple[str, ...] = ()) -> Runs:
    """Read an experiment, its baseline and its variants. `overrides` are "a.b=value" texts, applied over the file.

    `model` and `network` are names of files in the folders beside the config's own, or in the project's configs.
    Raises UserError for anything that does not fit.
    """
    raw = read_yaml(path)
    for text in overrides:
        _override(raw, text)
    return build_experiment(raw, path.resolve().parent.parent, str(path))


def build_experiment(raw: dict[str, Any], folder: Path, place: str) -> Runs:
    """Check settings that come from a file or from the command line; `place` names them in errors."""
    main = _validate(_resolve(raw, folder, place), place)
    alone = {key: value for key, value in raw.items() if key not in ("baseline", "variants")}

    def beside(over: dict[str, Any], name: str) -> Experiment:
        where = f"{place}, with {name}"
        for key in ("baseline", "variants"):
            if key in over:
                raise UserError(f"{where}: {key} stands beside it, not in it; move it out")
        return _validate(_resolve(_merge(alone, over), folder, where), where)

    baseline = None if main.baseline is None else beside(main.baseline, "baseline")
    return Runs(main, baseline, {name: beside(over, f"variant {name}") for name, over in main.variants.items()})


def load_model(name: str, folder: Path = CONFIGS) -> ModelConfig:
    """A model's configuration by name or by path of its YAML. Raises UserError where there is none, or it is wrong."""
    raw = _named("model", name, folder, "command line")
    try:
        return ModelConfig.model_validate(raw)
    except ValidationError as error:
        raise UserError(_first_line(error, f"model {name}", ModelConfig)) from None


def load_network(name: str, folder: Path = CONFIGS) -> NetworkProfile:
    """A network by name or by path of its YAML."""
    return NetworkProfile.model_validate(_named("network", name, folder, "command line"))


def with_prefix(model: ModelConfig, soal: Path) -> ModelConfig:
    """The model with the prefix of a prepared file. Raises UserError where the file is none."""
    return model.model_copy(update={"prefix": read_prefix(soal)})


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, loaded safely."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such config; see {CONFIGS.name}/experiment for examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = str(getattr(error, "problem", error)).splitlines()[0]
        raise UserError(f"{path}{where}: not valid YAML ({reason})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds {type(raw).__name__}, not a mapping of settings")
    return raw


def _resolve(raw: dict[str, Any], folder: Path, place: str) -> dict[str, Any]:
    """Replace the names of a model and of a network by what their files hold."""
    out = dict(raw)
    for kind in ("model", "network"):
        if isinstance(raw.get(kind), str):
            out[kind] = _named(kind, raw[kind], folder, place)
    draft = raw["decoding"].get("draft_model") if isinstance(raw.get("decoding"), dict) else None
    if isinstance(draft, str) and draft != "lookup":
        out["decoding"] = raw["decoding"] | {"draft_model": _named("model", draft, folder, place)}
    sparse = raw["sparsity"].get("file") if isinstance(raw.get("sparsity"), dict) else None
    if isinstance(sparse, str):
        out["sparsity"] = raw["sparsity"] | {"file": _sparsity_file(sparse, folder, place)}
    return out


def _sparsity_file(name: str, folder: Path, place: str) -> Path:
    """A prepared file by its path, or by its name."""
    candidates = [Path(name), *(base / "comet" / f"{name}.safetensors" for base in (folder, CONFIGS))]
    for path in candidates:
        if path.is_file():
            return path
    raise UserError(f"{place}: sparsity.file {name!r}: no such file; make it with `spu-llm prepare comet`")


def _named(kind: str, name: str, folder: Path, place: str) -> dict[str, Any]:
    candidates = [Path(name)] if name.endswith((".yaml", ".yml")) else [base / kind / f"{name}.yaml" for base in (folder, CONFIGS)]
    for path in candidates:
        if len(path.name) < 256 and path.is_file():
            raw = read_yaml(path)
            for key in ("path", "calibration"):
                if isinstance(raw.get(key), str):
                    raw[key] = Path(os.path.normpath(path.parent / raw[key]))
            return raw
    known = sorted({found.stem for base in (folder, CONFIGS) for found in (base / kind).glob("*.yaml")})
    raise UserError(f"{place}: unknown {kind} {name!r}; known: {', '.join(known)}, or give the path of a .yaml file")


def _override(raw: dict[str, Any], text: str) -> None:
    keys, sign, value = text.partition("=")
    if not sign or not keys:
        raise UserError(f"--set {text!r}: write it as key.key=value, for example --set protocol.ring=FM128")
    *parents, last = keys.split(".")
    for key in parents:
        raw = raw.setdefault(key, {})
        if not isinstance(raw, dict):
            raise UserError(f"--set {text!r}: {key} is not a section, so it has no {last}")
    try:
        raw[last] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"--set {text[:80]!r}: {value!r} is not valid YAML; quote it") from None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        out[key] = _merge(base[key], value) if nested else value
    return out


def _validate(raw: dict[str, Any], place: str) -> Experiment:
    try:
        experiment = Experiment.model_validate(raw)
    except ValidationError as error:
        raise UserError(_first_line(error, place, Experiment)) from None
    if experiment.soal is None:
        return experiment
    return experiment.model_copy(update={"model": with_prefix(experiment.model, experiment.soal)})


def _first_line(error: ValidationError, place: str, model: type[BaseModel]) -> str:
    """The first problem of a validation, in one line."""
    first = error.errors()[0]
    where = ".".join(str(key) for key in first["loc"] if re.fullmatch(r"\w+", str(key))) or "settings"  # not the names of types
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown key {where}; known here: {', '.join(_known_keys(model, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{place}: {where} is missing; add it"
    mapping = "give a mapping of settings"
    reason = mapping if first["type"] in ("model_type", "dict_type") else first["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:] if first["type"] != "value_error" else reason
    given = first["input"]
    value = f" is {given!r}" if isinstance(given, (str, int, float, bool)) else ""
    return f"{place}: {where}{value}: {reason}"


def _known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    for key in location:
        if key not in model.model_fields:  # the name of one of several types
            continue
        annotation = model.model_fields[str(key)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return list(model.model_fields)
